"""Schedules as data: pipelines, their timelines and their bubbles."""
