"""A router: it sends a chat to the engine that has the longest beginning of it in memory, by the engines' KV events.

pip install '.[engine,events]' httpx
kvpage-engine serve --port 8001 --kv-events tcp://127.0.0.1:5501 --kv-events-replay tcp://127.0.0.1:5601
kvpage-engine serve --port 8002 --kv-events tcp://127.0.0.1:5502 --kv-events-replay tcp://127.0.0.1:5602
python examples/router.py models/smollm2 8000 127.0.0.1:8001:5501:5601 127.0.0.1:8002:5502:5602
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from threading import Thread
from typing import Any

import httpx
import msgspec
import uvicorn
import zmq
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from transformers import AutoTokenizer


class Engine:
    """An engine, and the blocks in its memory: the hash of each, by the hash of the block before it and its tokens."""

    patience = 1000  # milliseconds for a reply of the replay

    def __init__(self, host: str, port: str, events: str, replay: str) -> None:
        self.url, self.prompts, self.size, self.next, self.time = f"http://{host}:{port}", 0, 1, 0, 0.0
        self.blocks: dict[Any, int] = {}
        self.keys: dict[int, Any] = {}  # of `blocks`, by hash
        self.replay = f"tcp://{host}:{replay}"
        self.subscriber: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self.subscriber.subscribe(b"")
        self.subscriber.connect(f"tcp://{host}:{events}")
        Thread(target=self.follow, daemon=True).start()

    def follow(self) -> None:
        self.catch_up()
        while True:
            if self.subscriber.poll(self.patience):
                _, number, payload = self.subscriber.recv_multipart()
                if msgspec.msgpack.decode(payload)[0] <= self.time:  # it was replayed
                    continue
                if int.from_bytes(number, "big") == self.next:
                    self.apply(number, payload)
                    continue
            elif [msgspec.msgpack.decode(batch)[0] for _, batch in self.replayed(self.next - 1)] == [self.time]:
                continue  # the last batch of the engine has been applied
            self.catch_up()  # batches were lost, or the engine was restarted

    def catch_up(self) -> None:
        if batches := list(self.replayed(0)):
            self.blocks, self.keys = {}, {}
        for batch in batches:
            self.apply(*batch)

    def replayed(self, first: int) -> Iterator[list[bytes]]:
        """Ask for the batches from a number on, and yield the number and the payload of each."""
        # A new socket gets no late replies to an earlier request.
        replayer: zmq.Socket[bytes]
        with zmq.Context.instance().socket(zmq.DEALER) as replayer:
            replayer.setsockopt(zmq.LINGER, 0)
            replayer.connect(self.replay)
            replayer.send_multipart([b"", max(first, 0).to_bytes(8, "big")])
            while replayer.poll(self.patience) and (batch := replayer.recv_multipart())[3]:
                yield batch[2:]

    def apply(self, number: bytes, payload: bytes) -> None:
        self.next = int.from_bytes(number, "big") + 1
        self.time, events, _ = msgspec.msgpack.decode(payload)
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.blocks.clear()
            parent, tokens = event.get("parent_block_hash"), event.get("token_ids")
            for i, block in enumerate(event.get("block_hashes", ())):
                self.blocks.pop(self.keys.pop(block, None), None)
                if event["type"] == "BlockStored":
                    self.size = event["block_size"]
                    self.keys[block] = parent, tuple(tokens[i * self.size : (i + 1) * self.size])
                    self.blocks[self.keys[block]] = parent = block

    def count(self, tokens: list[int]) -> int:
        """Return how many blocks with the first tokens of a prompt are in memory."""
        count, block = 0, None
        while block := self.blocks.get((block, tuple(tokens[count * self.size : (count + 1) * self.size]))):
            count += 1
        return count


def router(model: str, engines: list[Engine]) -> Starlette:
    tokenizer, client = AutoTokenizer.from_pretrained(model), httpx.AsyncClient(timeout=None)

    async def chat(request: Request) -> StreamingResponse:
        body = await request.body()
        messages = json.loads(body)["messages"]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        engine = max(engines, key=lambda one: (one.count(tokens), -one.prompts))  # new chats are shared equally
        engine.prompts += 1
        asked = client.build_request("POST", engine.url + request.url.path, content=body)
        reply = await client.send(asked, stream=True)
        headers = {"content-type": reply.headers["content-type"], "x-engine": engine.url}
        return StreamingResponse(reply.aiter_raw(), reply.status_code, headers, background=BackgroundTask(reply.aclose))

    async def known(request: Request) -> JSONResponse:
        return JSONResponse({one.url: {"blocks": len(one.blocks), "chats": one.prompts} for one in engines})

    return Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"]), Route("/engines", known)])


if __name__ == "__main__":
    model, port, *engines = sys.argv[1:]
    uvicorn.run(router(model, [Engine(*one.split(":")) for one in engines]), port=int(port))
