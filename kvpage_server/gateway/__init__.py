"""`store cluster`: the commands of a gateway to a Valkey or Redis Cluster, which stores the values.

A gateway stores nothing, so a cluster can have any number of them. A command becomes a call of the asynchronous client.
It has the same row in the command table as on a server, with another function. Commands that a cluster can't do are
refused.
"""
