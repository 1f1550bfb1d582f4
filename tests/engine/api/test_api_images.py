"""Images, audio and files are refused in each API's own form of error, and are neither decoded nor fetched."""

from __future__ import annotations

import base64
import json
import socket
import struct
import zlib
from collections.abc import Callable
from typing import Any

import anthropic.types
import httpx
import openai
import pytest
from api_engines import RunningEngine
from openai.types.shared import ErrorObject

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


def png(side: int, data: bytes) -> bytes:
    """A PNG image of `side` by `side` pixels with this data."""
    header = struct.pack(">IIBBBBB", side, side, 8, 6, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(data, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )


def encoded(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


IMAGES: dict[str, Callable[[], str]] = {
    "image": lambda: encoded("image/png", png(1, b"\0" * 5)),
    "bomb": lambda: encoded("image/png", png((1 << 31) - 1, b"\0" * (100 << 20))),
    "no image": lambda: encoded("image/png", b"GIF89a" + b"\xff" * 1000),
    "no base64": lambda: "data:image/png;base64,!!!",
    "no URL": lambda: "x" * 100_000,
    "a file": lambda: "file:///etc/passwd",
}


def image_bodies(url: str) -> dict[str, dict[str, Any]]:
    """Requests with an image, by path."""
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2] or url}
    return {
        CHAT: {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]},
        RESPONSES: {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]},
        MESSAGES: {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}], "max_tokens": 8},
    }


def refusal(engine: RunningEngine, path: str, body: dict[str, Any]) -> str:
    """Send a request, which must be refused. Return the error's message."""
    reply = httpx.post(engine.url + path, json={"model": "tiny", **body}, timeout=60)
    assert reply.status_code == 400, reply.text
    found = reply.json()
    if path == MESSAGES:
        error = anthropic.types.ErrorResponse.model_validate(found).error
        assert error.type == "invalid_request_error"
        return error.message
    parsed = ErrorObject.model_validate(found["error"])
    assert (parsed.type, parsed.code) == ("invalid_request_error", "unsupported_value")
    return parsed.message


@pytest.mark.parametrize("image", IMAGES)
def test_images_are_refused_while_others_get_their_answers(
    engine: RunningEngine, api: openai.OpenAI, image: str
) -> None:
    messages: Any = [{"role": "user", "content": f"Hello, {image}"}]
    stream = api.chat.completions.create(model="tiny", messages=messages, max_tokens=2000, temperature=0, stream=True)
    next(iter(stream))
    running = engine.metric("answers_total")
    for path, body in image_bodies(IMAGES[image]()).items():
        assert "image" in refusal(engine, path, body)
    assert engine.metric("answers_total") == running  # the stream goes on
    stream.close()


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {"data": "!", "format": "wav"}},
        {"type": "file", "file": {"file_data": "!"}},
        {"type": "video_url", "video_url": {"url": "x"}},
        {"type": ["image_url"]},
        {"type": {"a": 1}},
        {"type": "x" * 100_000},
        {"type": None},
        {},
        "text",
        17,
    ],
    ids=lambda part: json.dumps(part)[:30],
)
def test_other_parts_are_refused(engine: RunningEngine, part: Any) -> None:
    text = {"type": "text", "text": "Hello"}
    message = refusal(engine, CHAT, {"messages": [{"role": "user", "content": [text, part]}]})
    assert message.startswith("messages[0].content: part 1 is ")
    assert len(message) < 300


def test_no_url_is_fetched(engine: RunningEngine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as site:
        site.settimeout(0.2)
        for path, body in image_bodies(f"http://127.0.0.1:{site.getsockname()[1]}/image.png").items():
            refusal(engine, path, body)
        with pytest.raises(TimeoutError):
            site.accept()


def test_an_image_beyond_the_limit_of_a_body(engine: RunningEngine) -> None:
    body = {"model": "tiny", **image_bodies(encoded("image/png", b"\0" * (1 << 20)))[CHAT]}
    reply = httpx.post(engine.url + CHAT, json=body, timeout=60)
    assert reply.status_code == 413
    assert ErrorObject.model_validate(reply.json()["error"]).code == "body_too_large"


def test_a_client_sends_all_of_a_refused_body(engine: RunningEngine) -> None:
    with socket.create_connection(("127.0.0.1", engine.port), timeout=60) as sock:
        sock.sendall(b"POST /v1/kv_hints HTTP/1.1\r\nHost: localhost\r\nContent-Length: 8000000\r\n\r\n")
        sock.sendall(bytes(8_000_000))
        assert sock.recv(1000).startswith(b"HTTP/1.1 413")
