"""SIGHUP to a service: it reopens its log file and reloads its certificates."""

from __future__ import annotations

import asyncio
import logging
from copy import copy

from kvpage_server.commands.context import Server
from kvpage_server.configuration import certificates, log

logger = logging.getLogger("kvpage")


async def renew_when(told: asyncio.Event, server: Server) -> None:
    """Renew whenever the event is set, until cancelled."""
    while True:
        await told.wait()
        told.clear()
        for what, renew in _STEPS.items():
            try:
                await renew(server)
            except Exception:  # of which nobody knew: the other steps and the next SIGHUP are done nevertheless
                logger.exception("SIGHUP: the %s could not be renewed", what)


async def _renew_log(server: Server) -> None:
    file = server.config.logfile
    if not file:
        logger.info("SIGHUP: there is no log file to begin anew")
        return
    try:
        log.reopen(server.config)
        logger.info("SIGHUP: the log goes on here")
    except OSError as error:
        logger.warning("SIGHUP: the log goes on in the old file; %s: %s", file, error.strerror)


async def _renew_certificates(server: Server) -> None:
    """Renew them for new connections; open ones go on. Clients are served while the certificates are read."""
    if not server.config.tls_port:
        return
    asked = copy(server.config)
    try:
        found = await asyncio.to_thread(certificates.load, asked)
    except certificates.CertificateError as error:
        logger.warning("SIGHUP: the old certificates stay in use; %s", error)
        return
    if all(asked.words(name) == server.config.words(name) for name in certificates.PARAMETERS):  # no CONFIG SET since
        server.tls = found
        logger.info("SIGHUP: new connections get the certificates that are there now")


_STEPS = {"log file": _renew_log, "certificates": _renew_certificates}
