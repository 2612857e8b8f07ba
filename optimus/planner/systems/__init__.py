"""Systems: named ways to run a job, each at its best, simulated in the same IR."""
