"""A plan as one page: what it costs, where the time and memory go, how sure that is, what else was tried."""
