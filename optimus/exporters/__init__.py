"""Other trainers: a plan in their words, and what of it they cannot run."""
