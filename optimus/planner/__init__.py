"""Decides what a job leaves open, compares systems, and makes the plan; says why others were not taken."""
