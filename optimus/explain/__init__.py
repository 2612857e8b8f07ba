"""Why not something else: the reason against a layout, and a plan at every value of a sweep."""
