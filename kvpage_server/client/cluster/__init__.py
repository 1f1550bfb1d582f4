"""Pages and blocks on several servers through the same PageClient: on a Valkey or Redis Cluster, or on servers side by
side.

This package contains the map of a cluster, the encoding of a block as one string, and each client method as a *plan*
(`plan.py`). A plan does no I/O: it yields rounds of requests, at most one to each node, and receives their outcomes.
`nodes.py`, for threads, and AsyncPageClient do the I/O. `kvpage_server.client` has the commands for one server.
"""
