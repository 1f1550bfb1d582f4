"""Sockets: sessions, listeners and their limits. The package imports the commands, and they do not import it."""
