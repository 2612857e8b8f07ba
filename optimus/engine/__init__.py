"""Runs a plan's programs on PyTorch distributed."""
