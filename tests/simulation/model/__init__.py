"""The specification, in plain Python."""
