"""Draws results as HTML, SVG and Perfetto traces."""
