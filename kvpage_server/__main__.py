"""`python -m kvpage_server` is `kvpage-server`."""

from kvpage_server.app import main

main()
