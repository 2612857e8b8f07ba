"""Plans as data: the planner writes them, the engine runs them, render draws them."""
