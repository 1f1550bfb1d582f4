"""`store cluster`: the page commands, and those of strings, in front of a Valkey or Redis Cluster that has the values.

A gateway keeps nothing, so any number of them may stand before a cluster. A command becomes a call of the asynchronous
client; its row of the command table is the one that the store has, with another function. What a cluster can't do is
refused.
"""
