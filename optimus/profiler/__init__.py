"""Measures segments and links on a machine, for the planner."""
