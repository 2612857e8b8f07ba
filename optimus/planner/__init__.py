"""Searches layouts, compares systems, and plans a job; every rejected layout keeps its reason."""
