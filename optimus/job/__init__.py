"""What the user asks for: model, cluster, workload, layout constraints, and how it runs today."""
