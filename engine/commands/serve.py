"""`kvpage-engine serve`: the engine over HTTP, with OpenAI's API."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from kvpage_server import tracing
from kvpage_server.system.descriptors import room_for
from kvpage_server.system.text import log_to_standard_error

from ..platform import OTHERS
from . import Failure
from .options import add_engine, count, import_engine, options, port, report, seconds, size


def add_to(commands: Any) -> None:
    parser = commands.add_parser("serve", help="serve the OpenAI-compatible HTTP API")
    add_engine(parser)
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=port, default=8000, help="port to listen on, 0 for any free one (default: %(default)s)")
    add("--name", help="name of the model for clients (default: its directory's name, or its id)")
    add("--token-file", type=Path, metavar="FILE", help='lines "NAME TOKEN"; each name is a tenant')
    add(
        "--allow-origin",
        type=origin,
        action="append",
        default=[],
        metavar="ORIGIN",
        help="site such as https://chat.example whose pages may send requests (CORS); can be given several times",
    )
    add(
        "--sanitize-control-tokens",
        action="store_true",
        help="encode control tokens such as <|im_end|> in the content of users and tools as plain text",
    )
    add(
        "--labels",
        choices=("words", "hash"),
        help="label of a context without a name: the first words of its user message, or their hash (default: words; "
        "hash with --share none and --share system, so that clients do not see each other's words)",
    )
    add("--max-tokens", type=count, default=512, metavar="N", help="default limit of an answer (%(default)s)")
    add("--max-body", type=size, default=1 << 20, metavar="SIZE", help="largest request (default: 1mb)")
    add("--max-queue", type=count, default=64, metavar="N", help="requests running or waiting (default: %(default)s)")
    add("--max-connections", type=count, default=1024, metavar="N", help="connections in all (default: %(default)s)")
    add("--max-from-address", type=count, default=256, metavar="N", help="connections of one address (%(default)s)")
    add("--timeout", type=seconds, default=600.0, metavar="S", help="seconds to answer a request (%(default)g)")
    add("--grace", type=seconds, default=30.0, metavar="S", help="seconds for running requests at a stop (%(default)g)")
    parser.set_defaults(run=serve)


def serve(args: argparse.Namespace) -> NoReturn:
    """Serve until a signal arrives, then end the process. Raises Failure if the engine cannot be served."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop_at_once)  # there is no context to save yet
    log_to_standard_error("%(asctime)s %(name)s: %(message)s")
    with _listen(args.host, args.port) as listener:
        import_engine()
        from ..api.auth import TokenFileError, Tokens
        from ..api.server import ServeError, run
        from ..api.service import Limits

        limits = Limits(
            args.max_body,
            args.max_queue,
            args.timeout,
            args.max_tokens,
            room_for(args.max_connections, OTHERS),
            args.max_from_address,
        )
        asked = {
            "host": args.host,
            "name": args.name,
            "origins": args.allow_origin,
            "grace": args.grace,
            "report": report,
        }
        labels = args.labels or ("words" if args.share == "all" else "hash")
        asked |= {"sanitize": args.sanitize_control_tokens, "hash_labels": labels == "hash"}
        try:
            tokens = Tokens.read(args.token_file) if args.token_file else Tokens({})
            code = run(options(args), listener, tokens, limits, **asked)
        except (TokenFileError, ServeError) as error:
            raise Failure(str(error)) from error
    # All contexts are written. An ordinary exit can abort: MLX's threads outlive the thread that started them.
    tracing.flush()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a full disk, or a closed pipe
            stream.flush()
    os._exit(code)


def origin(text: str) -> str:
    """Parse the origin of a site as browsers send it: scheme, host and port."""
    given = text.lower()
    parts = urlsplit(given)
    if not parts.hostname or given not in (f"http://{parts.netloc}", f"https://{parts.netloc}"):
        raise argparse.ArgumentTypeError(f"an origin is http:// or https:// and a name, perhaps a port, got {text!r}")
    return given


def _stop_at_once(*_: object) -> NoReturn:
    os._exit(0)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        raise Failure(f"cannot listen on {host} port {port}: {error}") from error
