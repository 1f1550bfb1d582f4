"""The process that answers HTTP. `kvpage-server` starts it; by itself it is of no use."""

from kvpage_server.monitor.process import main
from kvpage_server.web.routes import ROUTES

main(ROUTES)
