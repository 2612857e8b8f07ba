"""Verifies plans by rules and an independent replay of time and memory."""
