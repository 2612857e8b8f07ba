"""Schedules as data: pipelines, their timelines, their bubbles, and the systems made of them."""
