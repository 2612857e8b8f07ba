"""What runs, as data: the planner writes it, the engine plays it, render shows it, and it knows neither."""
