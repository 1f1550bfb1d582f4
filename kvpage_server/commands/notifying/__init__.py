"""What clients are told without asking: messages of channels, events of keys, changes of what they track.

Knows the keyspace's events and what a listener is. Knows no command.
"""
