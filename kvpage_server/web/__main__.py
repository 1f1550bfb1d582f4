"""Entry point of the HTTP process. Only `kvpage-server` can start it, because it needs the server's sockets."""

from kvpage_server.monitor.process import main
from kvpage_server.web.routes import ROUTES

main(ROUTES)
