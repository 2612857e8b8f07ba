"""Assesses answers: drawn batches, perturbed cost models, noise; explains rejected layouts; sweeps ranges."""
