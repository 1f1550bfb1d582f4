"""Proxy between a framework and the engine, which records requests and validates replies with the SDKs' types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import httpx
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.shared import ErrorObject
from pydantic import TypeAdapter

WITHIN = 300.0  # seconds for an answer, on a busy machine
_TYPES: dict[tuple[str, bool], Any] = {  # by path, and whether it is a stream
    ("/v1/chat/completions", False): ChatCompletion,
    ("/v1/chat/completions", True): ChatCompletionChunk,
    ("/v1/completions", False): Completion,
    ("/v1/completions", True): Completion,
}

_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


class Recorder(ThreadingHTTPServer):
    """Requests that passed, and the usage of their answers."""

    def __init__(self, engine: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.engine = engine
        self.requests: list[dict[str, Any]] = []
        self.usages: list[dict[str, Any]] = []
        self.replies: list[dict[str, Any]] = []  # whole messages of Anthropic's API
        self.wrong: list[str] = []  # errors of validation

    def validate(self, path: str, status: int, reply: str) -> None:
        """Validate a reply, and keep its usage."""
        try:
            if path.startswith("/v1/messages"):
                self._validate_message(path, reply)
                return
            if status != 200:
                ErrorObject.model_validate(json.loads(reply)["error"])
                return
            if path == "/v1/responses":
                self._validate_response(reply)
                return
            if not reply.startswith("data: "):
                whole = json.loads(reply)
                _TYPES[path, False].model_validate(whole)
                self.usages.append(whole["usage"])
                return
            *chunks, done, rest = reply.split("\n\n")
            assert (done, rest) == ("data: [DONE]", "")
            for chunk in map(json.loads, (chunk.removeprefix("data: ") for chunk in chunks)):
                if path == "/v1/completions":  # null before the end, in OpenAI's API too, but not in the SDK's type
                    for choice in chunk["choices"]:
                        choice["finish_reason"] = choice["finish_reason"] or "stop"
                _TYPES[path, True].model_validate(chunk)
                if chunk.get("usage"):
                    self.usages.append(chunk["usage"])
        except Exception as error:  # noqa: BLE001 - the test fails, and not the proxy
            self.wrong.append(f"{error!r} in {reply}")

    def _validate_response(self, reply: str) -> None:
        whole = reply
        if reply.startswith("event: "):
            *events, rest = reply.split("\n\n")
            assert rest == ""
            parsed = [json.loads(event.partition("\ndata: ")[2]) for event in events]
            for event in parsed:
                _EVENT.validate_python(event)
            whole = json.dumps(parsed[-1]["response"])
        usage = Response.model_validate_json(whole).usage
        assert usage
        cached = {"cached_tokens": usage.input_tokens_details.cached_tokens}
        self.usages.append({"prompt_tokens": usage.input_tokens, "prompt_tokens_details": cached})

    def _validate_message(self, path: str, reply: str) -> None:
        whole = reply
        if path.partition("?")[0] == "/v1/messages/count_tokens":
            MessageTokensCount.model_validate_json(reply)
            return
        if reply.startswith("event: "):
            *events, rest = reply.split("\n\n")
            assert rest == ""
            parsed = [json.loads(event.partition("\ndata: ")[2]) for event in events]
            for event in parsed:
                _MESSAGE_EVENT.validate_python(event)
            message = parsed[0]["message"] | parsed[-2]["delta"] | {"usage": parsed[-2]["usage"]}
            whole = json.dumps(message)
        message = json.loads(whole)
        Message.model_validate(message)
        self.replies.append(message)
        usage = message["usage"]
        read = usage["cache_read_input_tokens"]
        prompt = usage["input_tokens"] + usage["cache_creation_input_tokens"] + read
        self.usages.append({"prompt_tokens": prompt, "prompt_tokens_details": {"cached_tokens": read}})

    def check_reuse(self) -> None:
        """Check that each answer reused the prompt of the one before it from the cache."""
        assert len(self.usages) > 1
        for before, after in zip(self.usages, self.usages[1:], strict=False):
            assert after["prompt_tokens_details"]["cached_tokens"] >= before["prompt_tokens"], self.usages


class _Handler(BaseHTTPRequestHandler):
    server: Recorder

    def do_HEAD(self) -> None:  # the Claude Agent SDK looks whether a server is there
        self.send_response(404)
        self.end_headers()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append(json.loads(body))
        url = self.server.engine + self.path
        with httpx.stream("POST", url, content=body, timeout=WITHIN) as reply:
            self.send_response(reply.status_code)
            self.send_header("Content-Type", reply.headers["Content-Type"])
            self.end_headers()
            text = last = b""
            for part in reply.iter_raw():
                self.wfile.write(last)
                text += part
                last = part
        # The test may look at the usage as soon as it has the last part.
        self.server.validate(self.path, reply.status_code, text.decode())
        self.wfile.write(last)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def recording(engine: str) -> Iterator[Recorder]:
    """Run a proxy of the engine with this URL."""
    with Recorder(engine) as recorder:
        serving = Thread(target=recorder.serve_forever, daemon=True)
        serving.start()
        try:
            yield recorder
        finally:
            recorder.shutdown()
