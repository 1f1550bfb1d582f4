"""Sockets: sessions, listeners and their limits. Knows the commands; nothing below knows it."""
