"""Errors in a reply, or in the server's state."""
