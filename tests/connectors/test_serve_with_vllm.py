"""vLLM's HTTP server with the connector of docs/vllm.md: a process saves a prompt, another one restores it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from documents import blocks
from servers import start_server
from vllm_process import ENVIRONMENT, PYTHON, QUICK, ROOT, STARTS_WITHIN, needs_vllm
from waiting import until

from benchmarks.ports import free_port
from engine.api.openai.schema import ChatBody, CompletionBody

pytestmark = [*needs_vllm, pytest.mark.skipif(QUICK, reason="two starts of vLLM's server take a minute")]
PROMPT = [i * 7919 % 40_000 + 100 for i in range(400)]  # three blocks and sixteen tokens


@dataclass
class Served:
    """A server of vLLM."""

    url: str

    def ask(self, path: str, body: dict[str, Any] | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=STARTS_WITHIN) as answer:
            text: str = answer.read().decode()
            return text

    def complete(self, **more: Any) -> tuple[str, int]:
        """Return the text of a greedy answer, and the number of cached tokens."""
        body = {"model": "SmolLM2", "prompt": PROMPT, "max_tokens": 16, "temperature": 0, **more}
        found = json.loads(self.ask("/v1/completions", body))
        return found["choices"][0]["text"], (found["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0

    def counts(self) -> dict[tuple[str, str], float]:
        """Return vllm:kvpage_blocks_total by job and result."""
        pattern = r'^vllm:kvpage_blocks_total\{.*?job="(\w+)".*?result="(\w+)".*?\} (\S+)$'
        return {(job, how): float(n) for job, how, n in re.findall(pattern, self.ask("/metrics"), re.MULTILINE)}


@contextmanager
def serving(log: Path, store: str) -> Iterator[Served]:
    """Start a server with the command of docs/vllm.md, and the URL of a store in its configuration."""
    (typed,) = (block for block in blocks("docs/vllm.md", "text") if "$ vllm serve" in block)
    *words, documented = shlex.split(typed)
    assert words == ["$", "vllm", "serve", "SmolLM2", "--dtype", "float32", "--kv-transfer-config"]
    config = json.loads(documented)
    config["kv_connector_extra_config"] = {"url": store, "lookup_seconds": 30, "transfer_seconds": 60}
    port = free_port()
    options = [
        *("--model", "models/smollm2", "--served-model-name", "SmolLM2", "--enforce-eager", "--max-model-len", "2048"),
        *("--max-num-seqs", "4", "--enable-prompt-tokens-details", "--port", str(port)),
        *(*words[4:], json.dumps(config)),
    ]
    assert PYTHON
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", *options]
    environment = {**ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1"}  # for /reset_prefix_cache
    served = Served(f"http://127.0.0.1:{port}")

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text(encoding="utf-8", errors="replace")[-5000:]
        try:
            return served.ask("/health") == ""
        except OSError:
            return False

    with (
        log.open("wb") as output,
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output) as process,
    ):
        try:
            until(is_ready, "a server of vLLM", within=STARTS_WITHIN)
            yield served
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                process.kill()


def test_a_server_restores_the_prompt_of_another(tmp_path: Path) -> None:
    with start_server("--maxmemory", "1gb") as store, store.client() as client:
        with serving(tmp_path / "first", store.url) as first:
            computed, cached = first.complete(kv_transfer_params={"kvpage_retain_seconds": 60})
            assert cached == 0
            until(lambda: client.dbsize() == 3 * 30 * 3 * 2, "the saved blocks", within=60)
            until(lambda: first.counts().get(("save", "ok")) == 3, "counts", within=60)
        with serving(tmp_path / "second", store.url) as second:
            assert second.complete() == (computed, 384)
            until(lambda: second.counts().get(("load", "ok")) == 3, "counts", within=60)
            assert json.loads(second.ask("/reset_prefix_cache?reset_external=true", {})) == {"success": True}
            assert second.complete() == (computed, 0)


FIELDS = """
import json
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
print(json.dumps([[*ChatCompletionRequest.model_fields], [*CompletionRequest.model_fields]]))
"""
NEUTRAL = {  # fields that change no answer of a text model, or only together with a field that is refused
    "cache_salt",
    "ec_transfer_params",
    "media_io_kwargs",
    "mm_payload",
    "mm_processor_kwargs",
    "priority",
    "request_id",
    "return_mm_kwargs",
    "routed_experts_prompt_start",
    "session_id",
    "spaces_between_special_tokens",
    "stream_interval",
    "truncation_side",
}


def test_the_engine_knows_each_field_of_vllms_requests() -> None:
    """It honours or refuses every field that changes the answer."""
    shown = subprocess.run(
        [PYTHON, "-c", FIELDS], capture_output=True, encoding="utf-8", check=True, timeout=STARTS_WITHIN
    )
    chat, text = json.loads(shown.stdout.splitlines()[-1])
    for ours, theirs in ((ChatBody, chat), (CompletionBody, text)):
        assert {*theirs} - {*ours.model_fields, *ours.unsupported} <= NEUTRAL
