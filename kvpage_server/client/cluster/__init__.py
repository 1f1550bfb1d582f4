"""Pages and blocks on several servers through the same PageClient: on a Valkey or Redis Cluster, or on servers side by
side.

This package contains the map of a cluster, the encoding of a block as one string, and the requests of each client
method. A method is a *plan* (`plan.py`), which does no I/O: it yields rounds of requests, at most one to each node, and
is sent their outcomes. Only `nodes.py`, for threads, and AsyncPageClient do I/O. `kvpage_server.client` has the
commands for one server.
"""
