"""Data only: models, clusters, jobs and measured curves, every number with its source."""
