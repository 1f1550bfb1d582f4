"""What must be true, in plain Python."""
