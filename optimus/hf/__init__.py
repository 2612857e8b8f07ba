"""Trains unmodified transformers models in a filled pipeline: splitting, inputs, loss, weights in and out."""
