"""`kvpage-engine serve`: the engine over HTTP, with OpenAI's API."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import quote, urlsplit

from kvpage_server import tracing
from kvpage_server.kv_events import EventQueue, KVEvents, KVEventsError
from kvpage_server.system.process import raise_descriptor_limit
from kvpage_server.system.program import cannot_listen, not_empty
from kvpage_server.system.text import log_to_standard_error

from ..platform import OTHERS
from . import Failure
from .options import MODEL, add_tiers, count, given_path, import_engine, options, port, report, seconds, size

if TYPE_CHECKING:
    from ..startup import Options

SMALLEST_BODY = 1 << 10  # bytes that --max-body allows at least: a request with a few words


def add_to(commands: Any) -> None:
    parser = commands.add_parser("serve", help="serve the OpenAI-compatible HTTP API")
    add = parser.add_argument
    add(
        "--model",
        action="append",
        type=not_empty,
        metavar="[NAME=]DIR_OR_ID",
        help="directory of a model, or its id in the local Hugging Face cache, and its name for clients (default: "
        f"{MODEL}, and the directory's name or the id). Can be given several times: the first model is loaded at the "
        "start, each other one for its first request, and unloaded when others need its memory",
    )
    add(
        "--adapter",
        action="append",
        type=not_empty,
        default=[],
        metavar="[NAME=]DIR",
        help="adapter of mlx-lm (LoRA, DoRA, full) for the model, with several models for the one of this name",
    )
    add_tiers(parser)
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=port, default=8000, help="port to listen on, 0 for any free one (default: %(default)s)")
    add("--name", type=not_empty, help="name for clients, if there is one model")
    add("--token-file", type=given_path, metavar="FILE", help='lines "NAME TOKEN"; each name is a tenant')
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
    add(
        "--volatile-lines",
        choices=("keep", "move", "drop"),
        default="keep",
        help="up to 3 lines of a system message that change from one prompt of a client to the next, such as a date: "
        "keep them, move them to the end of the last message, or drop them (default: %(default)s)",
    )
    add("--max-tokens", type=count, default=512, metavar="N", help="default limit of an answer (%(default)s)")
    add(
        "--max-body",
        type=partial(size, least=SMALLEST_BODY),
        default=1 << 20,
        metavar="SIZE",
        help="largest request (default: 1mb)",
    )
    add("--max-queue", type=count, default=64, metavar="N", help="requests running or waiting (default: %(default)s)")
    add("--max-connections", type=count, default=1024, metavar="N", help="connections in all (default: %(default)s)")
    add("--max-from-address", type=count, default=256, metavar="N", help="connections of one address (%(default)s)")
    add("--timeout", type=seconds, default=600.0, metavar="S", help="seconds to answer a request (%(default)g)")
    add("--grace", type=seconds, default=30.0, metavar="S", help="seconds for running requests at a stop (%(default)g)")
    add(
        "--kv-events",
        metavar="ADDRESS",
        help="address of ZMQ, such as tcp://127.0.0.1:5557, on which blocks in memory are published as vLLM does",
    )
    add("--kv-events-replay", metavar="ADDRESS", help="address from which subscribers get the last events again")
    parser.set_defaults(run=serve)


def serve(args: argparse.Namespace) -> NoReturn:
    """Serve until a signal arrives, then end the process. Raises Failure if the engine cannot be served."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop_at_once)  # there is no context to save yet
    log_to_standard_error("%(asctime)s %(name)s: %(message)s")
    with _listen(args.host, args.port) as listener, _kv_events(args) as events:
        import_engine()
        from ..api.auth import TokenFileError, Tokens
        from ..api.server import ServeError, run
        from ..api.service import Limits

        limits = Limits(
            args.max_body,
            args.max_queue,
            args.timeout,
            args.max_tokens,
            max(raise_descriptor_limit(args.max_connections, OTHERS), 1),
            args.max_from_address,
        )
        asked = {
            "host": args.host,
            "origins": args.allow_origin,
            "grace": args.grace,
            "report": report,
        }
        labels = args.labels or ("words" if args.share == "all" else "hash")
        asked |= {"sanitize": args.sanitize_control_tokens, "hash_labels": labels == "hash"}
        asked["volatile_lines"] = args.volatile_lines
        try:
            tokens = Tokens.read(args.token_file) if args.token_file else Tokens({})
            models = {name: replace(one, publish=events.put if events else None) for name, one in _models(args).items()}
            code = run(models, listener, tokens, limits, **asked)
        except (TokenFileError, ServeError) as error:
            raise Failure(str(error)) from error
    # All contexts are written. An ordinary exit can abort: MLX's threads outlive the thread that started them.
    tracing.flush()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a full disk, or a closed pipe
            stream.flush()
    os._exit(code)


@contextmanager
def _kv_events(args: argparse.Namespace) -> Iterator[EventQueue | None]:
    """Publish the events of blocks in memory during a `with` block, if that is asked for. Raises Failure."""
    if args.kv_events is None:
        if args.kv_events_replay:
            raise Failure("--kv-events-replay needs --kv-events")
        yield None
        return
    try:
        events = KVEvents(args.kv_events, args.kv_events_replay or "", EventQueue)
    except KVEventsError as error:
        raise Failure(f"--kv-events: {error}") from error
    events.start()
    try:
        yield events.changes
    finally:
        events.close()


def _models(args: argparse.Namespace) -> dict[str, Options]:
    """Return the options of each model by its name for clients. Raises Failure for unclear names."""
    from ..startup import model_name

    given = [_named(text) for text in args.model or [MODEL]]
    if args.name:
        if len(given) > 1:
            raise Failure("--name is for one model; with several, give a name with --model NAME=DIR")
        given = [(args.name, given[0][1])]
    adapters: dict[str | None, Path] = {name: Path(path) for name, path in map(_named, args.adapter)}
    found: dict[str, Options] = {}
    for name, model in given:
        known_as = name or model_name(model)
        adapter = adapters.pop(known_as, None) or (adapters.pop(None, None) if len(given) == 1 else None)
        name = name or model_name(model, adapter)
        if name in found:
            raise Failure(f"two models have the name {name!r}: give them other names with --model NAME=DIR")
        found[name] = replace(options(args, model, adapter), models=len(given))
    if None in adapters:
        raise Failure("--adapter with several models names one of them: --adapter NAME=DIR")
    if adapters:
        raise Failure(f"--adapter: there is no model {', '.join(map(repr, adapters))}")
    if args.cold and len(found) > 1:  # an agent has a file for each model
        return {name: replace(one, cold=args.cold / quote(name, safe="")) for name, one in found.items()}
    return found


def _named(text: str) -> tuple[str | None, str]:
    """Split the name from the directory or id, if `text` has one and is no directory. Raises Failure if nothing
    follows the name.
    """
    name, equals, where = text.partition("=")
    if not (name and equals) or Path(text).is_dir():
        return None, text
    if not where:
        raise Failure(f"{text} names no directory")
    return name, where


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
        raise Failure(cannot_listen(f"{host} port {port}", error)) from error
