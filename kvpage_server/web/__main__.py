"""Entry point of the HTTP process, which `kvpage-server` starts. It is of no use by itself."""

from kvpage_server.monitor.process import main
from kvpage_server.web.routes import ROUTES

main(ROUTES)
