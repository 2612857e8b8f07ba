"""Benchmarks of the engine, side by side with torch's own pipeline schedules."""
