"""Pages and blocks on several servers through the same PageClient: on a Valkey or Redis Cluster, or side by side.

This package contains the map of a cluster, a block as one value, and the requests of each client method. A method is a
*plan* (`plan.py`), which does no I/O: it says what to ask which nodes at once, and is sent the outcomes. Only
`nodes.py`, for threads, and AsyncPageClient wait. The commands for one server are above, in `kvpage_server.client`.
"""
