"""Reads and checks a job: model, cluster, workload, layout constraints, and how it runs today."""
