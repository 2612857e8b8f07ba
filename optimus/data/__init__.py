"""Data sets, and the assignment of their sequences and items to microbatches and encoder pipelines."""
