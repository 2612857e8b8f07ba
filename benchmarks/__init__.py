"""Side by side with the bare engine: real, paced."""
