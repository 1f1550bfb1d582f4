"""Pages and blocks on several servers through the same PageClient: on a Valkey or Redis Cluster, or side by side.

This package contains the map of a cluster, a block as one value, and the requests of each client method. A method is a
*plan* (`plan.py`), which does no I/O: it yields the requests of a round, one to each node, and is sent their outcomes.
Only `nodes.py`, for threads, and AsyncPageClient wait. `kvpage_server.client` has the commands for one server.
"""
