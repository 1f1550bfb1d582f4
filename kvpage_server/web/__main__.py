"""Entry point of the HTTP process, which only `kvpage-server` can start."""

from kvpage_server.monitor.process import main
from kvpage_server.web.routes import ROUTES

main(ROUTES)
