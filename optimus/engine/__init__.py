"""The executor: plays a plan's programs on PyTorch distributed."""
