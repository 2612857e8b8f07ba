"""Verifies plans by nine rules and an independent replay of time and memory."""
