"""`kvpage-engine generate` and `chat`, which give prompts to an engine in this process, and `demo`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from io import TextIOWrapper
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from kvpage_server import bounded
from kvpage_server.bounded import read_regular
from kvpage_server.system.durable import replacing
from kvpage_server.system.program import report_line, say

from . import Failure
from .options import add_engine, agent, count, given_path, number, open_engine, utf8

if TYPE_CHECKING:
    from ..agent_engine import Answer
    from ..generation.sampling import Sampling
    from ..generation.text import ChatTemplate
    from ..generation.unbatched import Sampler
    from ..scheduling.request import Token, TokenReceiver
    from ..startup import Engine

# -- Prompts to an engine in this process, one at a time ---------------------------------------------------------------


class Interrupted(Exception):
    """The user ended an answer by Ctrl-C."""


def ask(
    engine: Engine,
    agent_id: str,
    tokens: Sequence[int],
    *,
    max_tokens: int,
    sampler: Sampler | Sampling | None = None,
    continues: bool = False,
    on_token: TokenReceiver | None = None,
    interrupted: Event | None = None,
) -> Answer:
    """Run the engine until one prompt is answered, and return the answer. Raises Failure with the engine's error, and
    Interrupted when that event is set.
    """
    answers: list[Answer] = []
    errors: list[Exception] = []
    uid = engine.agent_engine.submit(
        agent_id,
        tokens,
        max_tokens=max_tokens,
        sampler=sampler,
        continues=continues,
        on_token=on_token,
        on_done=answers.append,
        on_error=errors.append,
    )
    while engine.agent_engine.step(timeout=1.0):
        if interrupted is not None and interrupted.is_set():
            engine.agent_engine.cancel(uid)
            raise Interrupted
    if errors:
        raise Failure(str(errors[0]))
    return answers[0]


def print_text(token: Token) -> None:
    sys.stdout.write(token.text)
    sys.stdout.flush()


def account(answer: Answer) -> str:
    """Return a line about an answer: the number and tier of its reused tokens, and the time to the first token."""
    reuse = answer.reuse
    where = {
        "hot": "from memory",
        "prefix": "from a shared prefix in memory",
        "page": "from the page server",
        "cold": "from a file",
    }
    how = f" (coded {reuse.coded:.2f})" if reuse.coded else " (mapped)" if reuse.mapped else ""
    found = f" {where[reuse.tier]}{how} in {1000 * reuse.restore_seconds:.0f} ms" if reuse.tier in where else ""
    why = f" ({reuse.why})" if reuse.why else ""
    return (
        f"{reuse.tokens:,} of {answer.prompt_tokens:,} tokens reused{found}{why}; "
        f"first token after {reuse.time_to_first_token:.2f} s"
    )


Messages = list[dict[str, str]]

_MOST_BYTES = 64 << 20  # bytes of a transcript
_MOST_MESSAGES = 100_000
_MOST_WORDS = 8 * _MOST_MESSAGES  # strings, including the names of fields


def add_to(commands: Any) -> None:
    generate_ = commands.add_parser("generate", help="answer one prompt")
    generate_.add_argument("prompt", type=utf8, metavar="PROMPT", help="the prompt; - reads it from stdin")
    generate_.add_argument("--raw", action="store_true", help="do not apply the chat template")
    chat_ = commands.add_parser("chat", help="chat in the terminal; each turn reports the reused tokens")
    chat_.add_argument(
        "--transcript", type=given_path, metavar="FILE", help="JSON file of the conversation, continued if it exists"
    )
    chat_.add_argument("--system", type=utf8, metavar="TEXT", help="system prompt of a new conversation")
    for parser, run in ((generate_, generate), (chat_, chat)):
        add_engine(parser)
        add = parser.add_argument
        add(
            "--agent",
            type=agent,
            default="terminal",
            metavar="NAME",
            help="agent that owns the context (default: %(default)s)",
        )
        add("--max-tokens", type=count, default=256, metavar="N", help="limit of an answer (default: %(default)s)")
        add(
            "--temperature",
            type=number(0),
            default=0.0,
            metavar="T",
            help="0 selects the likeliest token (%(default)g)",
        )
        add("--top-p", type=number(0, 1), default=1.0, metavar="P", help="nucleus sampling (default: %(default)g)")
        add("--seed", type=int, metavar="N", help="seed of the sampler, for the same text in each run")
        parser.set_defaults(run=run)
    demo = commands.add_parser("demo", help="a conversation that moves from one engine to another, in about a minute")
    demo.add_argument("--model", default="models/smollm2", metavar="DIR", help="default: %(default)s")
    demo.set_defaults(run=run_demo)


def generate(args: argparse.Namespace) -> int:
    """Answer one prompt: print the answer on stdout, and its reuse on stderr. Return 1 if the context could not be
    saved, else 0. Raises Failure.
    """
    prompt = _read_all() if args.prompt == "-" else args.prompt
    if not prompt:
        raise Failure("the prompt is empty")
    engine = open_engine(args)
    try:
        with _encoding():
            if engine.tokenizer.has_chat_template and not args.raw:
                with _chat_template(engine) as template:
                    tokens = template.tokens([{"role": "user", "content": prompt}])
            else:
                tokens = engine.batch.encode(prompt)
        answer = _say(engine, args, tokens)
        report_line(account(answer))
    finally:
        unsaved = engine.close()
    return int(unsaved > 0)


def chat(args: argparse.Namespace) -> int:
    """Answer each line of stdin until it ends. A line that cannot be decoded, or that the chat template refuses, is
    reported and left out. Ctrl-C ends an answer; at the prompt, it ends the chat.

    Return 1 if a line was left out or the context could not be saved, else 0. Raises Failure.
    """
    from ..generation.text import history_adds_space

    messages = _transcript(args)
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    engine = open_engine(args)
    left_out = False
    try:
        if not engine.tokenizer.has_chat_template:
            raise Failure(f"{engine.model_id} has no chat template; `kvpage-engine generate --raw` goes on with a text")
        with _chat_template(engine) as template:
            keeps_space = not history_adds_space(engine.tokenizer, template.plain)
            while line := _line():
                asked = [*messages, {"role": "user", "content": line}]
                try:
                    if not _is_unicode(line):
                        raise Failure(f"this line is not {sys.stdin.encoding}")
                    with _encoding():
                        tokens = template.tokens(asked)
                except Failure as failure:
                    left_out = True
                    say("kvpage-engine", f"{failure}; the line is left out", 1)
                    continue
                text, note = _turn(engine, args, tokens, continues=keeps_space)
                messages = [*asked, {"role": "assistant", "content": text}]
                print(f"  [{note}]\n", flush=True)
                if args.transcript:
                    _write(args.transcript, messages)
    finally:
        unsaved = engine.close()
    return int(unsaved > 0 or left_out)


def _turn(engine: Engine, args: argparse.Namespace, tokens: list[int], *, continues: bool) -> tuple[str, str]:
    """Print the answer to a conversation. Return its text, which Ctrl-C ends, and a note about it."""
    said: list[str] = []

    def hear(token: Token) -> None:
        said.append(token.text)
        print_text(token)

    with _interruptible() as interrupted:
        try:
            answer = _say(engine, args, tokens, continues=continues, on_token=hear, interrupted=interrupted)
            return answer.text, account(answer)
        except Interrupted:
            print(flush=True)
            return "".join(said), "interrupted"


@contextmanager
def _interruptible() -> Iterator[Event]:
    """Let Ctrl-C set an event in the caller's ``with`` block. Another Ctrl-C raises KeyboardInterrupt."""
    interrupted = Event()

    def interrupt(*_: object) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, usual)

    usual = signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, usual)


def _say(engine: Engine, args: argparse.Namespace, tokens: list[int], **options: Any) -> Answer:
    """Print an answer while it is computed, and return it. `options` are those of `ask`."""
    from ..generation.sampling import Sampling

    sampling = Sampling(args.temperature, args.top_p, seed=args.seed)
    options = {"on_token": print_text, **options}
    answer = ask(engine, args.agent, tokens, max_tokens=args.max_tokens, sampler=sampling, **options)
    print(flush=True)
    return answer


@contextmanager
def _chat_template(engine: Engine) -> Iterator[ChatTemplate]:
    """Render the model's chat template in a process, for the caller's ``with`` block."""
    from ..generation.templates import Renderer
    from ..generation.text import ChatTemplate

    with closing(Renderer()) as renderer:
        yield ChatTemplate(engine.tokenizer, renderer)


@contextmanager
def _encoding() -> Iterator[None]:
    """Raise Failure if the chat template or the tokenizer fails in the caller's ``with`` block."""
    from ..generation.templates import TemplateFailedError
    from ..generation.tokens import PromptError

    try:
        yield
    except PromptError as error:
        raise Failure(str(error)) from error
    except (TemplateFailedError, RuntimeError) as error:
        raise Failure(f"the model's chat template refuses this: {error}") from error


def _read_all() -> str:
    """Return all of standard input, decoded in the encoding of `sys.stdin`. Raises Failure if that fails for a byte."""
    try:
        text = sys.stdin.read()
        text.encode()  # the locale may decode a wrong byte as half of a surrogate pair
    except UnicodeError as error:
        raise Failure(f"the input is not {sys.stdin.encoding}: {error}") from error
    return text


def _is_unicode(text: str) -> bool:
    """Return whether a text has no halves of surrogate pairs, which stand for bytes that cannot be decoded."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _line() -> str:
    """Return the next line that is not blank; "" at the end of the input."""
    try:
        while True:
            line = input("> " if sys.stdin.isatty() else "")
            if line.strip():
                return line
    except EOFError:
        return ""


def _transcript(args: argparse.Namespace) -> Messages:
    """Return the messages of the transcript file, or, if there is none, the system message if one is given. Raises
    Failure.
    """
    begun = [{"role": "system", "content": args.system}] if args.system else []
    if not args.transcript:
        return begun
    if not args.transcript.exists():
        if not os.access(args.transcript.parent, os.W_OK):
            raise Failure(f"cannot write the transcript: {args.transcript.parent} is no directory that can be written")
        return begun
    try:
        raw = read_regular(args.transcript, _MOST_BYTES)
        messages: Messages = bounded.parse(raw, containers=_MOST_MESSAGES, strings=_MOST_WORDS, values=_MOST_WORDS)
        if not isinstance(messages, list) or not all(
            isinstance(message["role"], str) and isinstance(message["content"], str) for message in messages
        ):
            raise TypeError("it must be a list of messages with role and content")
        json.dumps(messages, ensure_ascii=False).encode()  # raises ValueError for half of a surrogate pair
        return messages
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise Failure(f"{args.transcript} is no transcript: {error}") from error


def _write(path: Path, messages: Messages) -> None:
    try:
        with replacing(path) as file:
            file.write(json.dumps(messages, ensure_ascii=False, indent=1).encode() + b"\n")
    except OSError as error:
        raise Failure(f"cannot write the transcript: {error}") from error


# -- Demonstration -----------------------------------------------------------------------------------------------------


def run_demo(args: argparse.Namespace) -> int:
    """Run the demonstration. Return the exit code: 1 if a result does not reach its promised value, else 0."""
    from rich.console import Console  # imported here, as are the next: only `demo` needs them

    from ..demo import story

    if not Path(args.model).is_dir():
        raise Failure(f"no model in {args.model}; `kvpage-engine fetch-model smollm2` gets one")
    console = Console()
    try:
        outcome = story.run(args.model, console)
    except story.ProcessError as error:
        raise Failure(str(error)) from error
    story.show(outcome, console)
    return 0 if all(outcome.promises().values()) else 1
