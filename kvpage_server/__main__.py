"""`python -m kvpage_server` is `kvpage-server`."""

from kvpage_server.start import kvpage_server

kvpage_server()
