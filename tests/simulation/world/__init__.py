"""Simulated machine. It knows nothing of commands, keys or replies.

`machine.install` is called before the server is imported: from then on the server's own code asks this world for the
time, for threads and for its database, without knowing it.
"""
