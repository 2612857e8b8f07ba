"""What people and other tools see: text, JSON and pictures."""
