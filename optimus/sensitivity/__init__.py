"""How sure an answer is: over drawn batches, under other cost models, and with noise."""
