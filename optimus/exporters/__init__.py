"""Exports a plan to other trainers' arguments, and says what of it they cannot run."""
