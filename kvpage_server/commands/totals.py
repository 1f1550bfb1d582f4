"""Counts what all connections together hold and have been sent, in steps, since there may be very many."""

from __future__ import annotations

from kvpage_server.commands.context import Server, Totals
from kvpage_server.commands.steps import STEP, Steps


def counted(server: Server) -> Steps[None]:
    """Steps until every connection is counted in `server.totals`."""
    totals, clients = Totals(), list(server.clients.values())
    for start in range(0, len(clients), STEP):
        for client in clients[start : start + STEP]:
            if not client.gone:
                totals.add(client)
        yield ()
    server.totals = totals
