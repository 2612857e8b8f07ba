"""Adapts to other packages, one module each: trainers around filled pipelines, and trackers of metrics."""
