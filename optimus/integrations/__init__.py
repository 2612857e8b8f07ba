"""Adapts filled pipelines to other trainers, one module per trainer, each pinned to one release of it."""
