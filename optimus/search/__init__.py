"""Decides what a job leaves open: layouts for now, and why the others were not taken."""
