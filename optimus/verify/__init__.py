"""Parts of the validator: what a plan asks for, what waits for what, deadlocks, time and bytes."""
