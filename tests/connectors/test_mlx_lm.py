"""mlx-lm's server and prompt-cache files with a page server: contexts after a restart, of others, and without it."""

from __future__ import annotations

import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any

import httpx
import pytest
from api_engines import RunningEngine, start_engine, write_family, write_tiny
from engine_families import TOKENIZER, TOKENS, family
from forked import begin
from kvpage_connectors.mlx_lm import StoredPromptCache, load_prompt_cache, save_prompt_cache
from proxy import start_proxy
from servers import RunningServer, free_port, start_server
from waiting import PATIENCE, eventually

# isort: split
import numpy as np
from kvpage.engine.memory import kvcache
from kvpage_connectors import mlx_lm_command
from mlx_lm.models.cache import BatchKVCache

KEY = ("tiny", None, None)  # mlx-lm's key of a model
CHAT: list[Any] = [
    {"role": "system", "content": "Answer in one word. " * 30},
    {"role": "user", "content": "What is the capital of France?"},
]


@contextmanager
def start_mlx_lm(model: Path, store: str) -> Iterator[RunningEngine]:
    """`kvpage-engine mlx-lm server`, once it answers."""
    port = free_port()
    options = ["--store", store, "server", "--model", str(model), "--port", str(port)]
    with TemporaryDirectory() as place:
        log_file = Path(place, "log")
        with log_file.open("wb") as log:
            process = begin([sys.executable, "-m", "engine.cli", "mlx-lm", *options], log)
        running = RunningEngine(process, port, log_file)
        try:
            eventually(lambda: answers(running), 60)
            yield running
        finally:
            assert running.stop() == 0, running.log
            running.final_log = running.log
        assert "kvpage_connectors" not in running.final_log, running.final_log  # in a traceback


def answers(running: RunningEngine) -> bool:
    assert running.process.poll() is None, running.log
    try:
        return httpx.get(f"{running.url}/health").status_code == 200
    except httpx.TransportError:
        return False


def ask(running: RunningEngine, messages: Any = CHAT, **options: Any) -> tuple[str, int]:
    """The answer, and the tokens of the prompt that were not computed."""
    with running.client() as client:
        asked: dict[str, Any] = {"model": "default_model", "temperature": 0, "max_tokens": 12, **options}
        answer = client.chat.completions.create(messages=messages, **asked)
    assert answer.usage
    assert answer.usage.prompt_tokens_details
    return str(answer.choices[0].message.content), answer.usage.prompt_tokens_details.cached_tokens or 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("mlx-lm") / "tiny", max_position_embeddings=8192)


def test_a_context_is_there_after_a_restart(model: Path) -> None:
    with start_server() as server:
        with start_mlx_lm(model, server.url) as first:
            text, reused = ask(first)
            assert reused == 0
            ask(first, [*CHAT, {"role": "assistant", "content": text}, {"role": "user", "content": "And of Italy?"}])
        with start_mlx_lm(model, server.url) as second:
            again, reused = ask(second)
            assert again == text
            assert reused > 600
            assert ask(second)[1] >= reused


def test_an_engine_and_another_server_use_the_context(model: Path) -> None:
    with start_server() as server, start_mlx_lm(model, server.url) as one, start_mlx_lm(model, server.url) as two:
        text, _ = ask(one)
        eventually(lambda: stored(server), 20)
        again, reused = ask(two)
        assert (again, reused > 600) == (text, True)
        with start_engine(model, "--store", server.url) as engine:
            again, reused = ask(engine, model="tiny")
            assert (again, reused > 600) == (text, True)


def stored(server: RunningServer) -> list[Any]:
    """Blocks whose digest is written, which is the last step of a block."""
    with server.client() as client:
        return list(client.scan_iter("seal:*"))


@pytest.mark.parametrize("kind", ["gemma3_text", "mamba2"])
def test_families_with_states_are_restored(kind: str, tmp_path: Path) -> None:
    folder = write_family(tmp_path / kind, kind)
    with start_server() as server:
        with start_mlx_lm(folder, server.url) as first:
            text, _ = ask(first)
        with start_mlx_lm(folder, server.url) as second:
            again, reused = ask(second)
            assert (again, reused > 500) == (text, True)


def test_streams_go_on_while_a_prompt_waits_for_the_store(model: Path) -> None:
    """A reply of the store takes a second. If the generation thread waited for it, no token would arrive meanwhile."""
    with start_server() as server, start_proxy(server.port) as proxy, start_mlx_lm(model, proxy.url) as running:
        ask(running)
        arrived: list[float] = []
        enough = Event()

        def stream() -> None:
            options: Any = {"model": "default_model", "max_tokens": 6000, "stream": True}
            with running.client() as client:
                for _ in client.chat.completions.create(messages=[{"role": "user", "content": "Go"}], **options):
                    arrived.append(time.monotonic())
                    if enough.is_set():
                        break

        streaming = Thread(target=stream)
        streaming.start()
        eventually(lambda: len(arrived) > 5, 30)
        proxy.hold = 1.0
        begun = time.monotonic()
        ask(running, [{"role": "user", "content": "Another prompt. " * 40}], max_tokens=1)
        waited = time.monotonic() - begun
        proxy.hold = 0
        enough.set()
        streaming.join()
        assert waited > 0.9
        assert sum(begun < at < begun + 0.9 for at in arrived) > 3


def test_without_a_store_it_is_mlx_lms_server(model: Path) -> None:
    nobody = f"redis://127.0.0.1:{free_port()}"
    with start_mlx_lm(model, nobody) as running:
        text, reused = ask(running)
        assert reused == 0
        again, reused = ask(running)
        assert (again, reused > 600) == (text, True)
    assert "cannot connect" in running.final_log, running.final_log


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next", "mamba2"])
def test_the_bytes_of_a_restored_context_are_equal(kind: str, server: RunningServer) -> None:
    of = family(kind)
    whole = StoredPromptCache(server.url)
    whole.attach(KEY, of.model, TOKENIZER)
    whole.insert_cache(KEY, TOKENS[:280], of.computed(280))
    whole.close()
    empty = StoredPromptCache(server.url)
    empty.attach(KEY, of.model, TOKENIZER)
    empty.prefetch(KEY, TOKENS[:290])
    cache, rest = empty.fetch_nearest_cache(KEY, TOKENS[:290])
    empty.close()
    assert rest == TOKENS[280:290]
    assert cache is not None
    assert np.array_equal(of.continuation(cache, 280), of.continuation(of.computed(280), 280))


def test_a_finished_context_is_copied_by_the_writer(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generation thread goes on with the next prompt of the context before it is copied."""
    of, goes_on, copies = family("llama"), Event(), kvcache.extract

    def extract(*args: Any, **options: Any) -> Any:
        assert goes_on.wait(PATIENCE)
        return copies(*args, **options)

    monkeypatch.setattr(kvcache, "extract", extract)
    cache = StoredPromptCache(server.url)
    cache.attach(KEY, of.model, TOKENIZER)
    pairs = zip(of.computed(280), of.computed(290), strict=True)
    finished = [BatchKVCache.merge(pair).extract(0) for pair in pairs]  # arrays that are not evaluated
    cache.insert_cache(KEY, TOKENS[:280], finished)
    taken, _ = cache.fetch_nearest_cache(KEY, TOKENS[:290])
    of.continuation(taken, 280)
    goes_on.set()
    cache.close()
    assert not cache._contexts[KEY].reasons.counts
    fresh = StoredPromptCache(server.url)
    fresh.attach(KEY, of.model, TOKENIZER)
    fresh.prefetch(KEY, TOKENS[:290])
    restored, rest = fresh.fetch_nearest_cache(KEY, TOKENS[:290])
    fresh.close()
    assert (restored is not None, rest) == (True, TOKENS[280:290])
    assert np.array_equal(of.continuation(restored, 280), of.continuation(of.computed(280), 280))


def test_contexts_that_cannot_be_saved_are_named(caplog: pytest.LogCaptureFixture) -> None:
    of, cache = family("llama"), StoredPromptCache(f"redis://127.0.0.1:{free_port()}")
    cache.attach(KEY, of.model, TOKENIZER)
    cache.insert_cache(KEY, TOKENS[:280], of.computed(280))
    cache.close()
    assert "kvpage: save missed 2 blocks, reason: down" in caplog.text
    assert "1 context could not be saved since the start" in caplog.text


def test_memory_that_has_more_than_the_store_is_used(server: RunningServer) -> None:
    of = family("llama")
    cache = StoredPromptCache(server.url)
    cache.attach(KEY, of.model, TOKENIZER)
    cache.insert_cache(KEY, TOKENS[:280], of.computed(280))
    cache.prefetch(KEY, TOKENS[:290])
    assert cache.fetch_nearest_cache(KEY, TOKENS[:290])[1] == TOKENS[280:290]
    cache.close()


def named(server: RunningServer, name: str = "poem") -> str:
    return f"{server.url}#{name}"


def test_a_named_prompt_cache_has_the_bytes_of_a_file(tmp_path: Path) -> None:
    of = family("gemma3_text")
    computed = of.computed(200)
    with start_server() as server:
        save_prompt_cache(named(server), computed, {"model": "tiny"})
        save_prompt_cache(str(tmp_path / "cache.safetensors"), computed)
        restored, metadata = load_prompt_cache(named(server), return_metadata=True)
        assert metadata == {"model": "tiny"}
        from_file = load_prompt_cache(str(tmp_path / "cache.safetensors"))
        assert np.array_equal(of.continuation(restored, 200), of.continuation(from_file, 200))


def test_a_named_prompt_cache_is_replaced_as_a_whole() -> None:
    of = family("llama")
    with start_server() as server, server.client() as client:
        save_prompt_cache(named(server), of.computed(200))
        save_prompt_cache(named(server), of.computed(100))
        assert client.dbsize() == 2
        assert load_prompt_cache(named(server))[0].offset == 100


def test_a_named_prompt_cache_that_is_unusable_is_refused(server: RunningServer) -> None:
    with server.client() as client:
        with pytest.raises(FileNotFoundError, match="was not stored, or was evicted"):
            load_prompt_cache(named(server, "absent"))
        with pytest.raises(ValueError, match="needs a name"):
            load_prompt_cache(server.url)
        save_prompt_cache(named(server, "flipped"), family("llama").computed(20))
        (piece,) = client.scan_iter("mlx-prompt-cache:flipped:*")
        client.set(piece, bytes(client.get(piece))[:-1] + b"\x55")
        with pytest.raises(ValueError, match="other bytes"):
            load_prompt_cache(named(server, "flipped"))
        client.delete(piece)
        with pytest.raises(FileNotFoundError):
            load_prompt_cache(named(server, "flipped"))


def test_mlx_lms_commands_take_a_name_for_a_file(model: Path, server: RunningServer, tmp_path: Path) -> None:
    def run(command: str, *options: str) -> str:
        words = [sys.executable, "-m", "engine.cli", "mlx-lm", command, *options]
        return subprocess.run(words, check=True, capture_output=True, encoding="utf-8", timeout=120).stdout

    said = []
    for cache in (str(tmp_path / "cache.safetensors"), named(server, "guide")):
        prompt, question = "You know many cities. " * 10, ["--prompt", "Where is Rome?", "--max-tokens", "8"]
        run("cache_prompt", "--model", str(model), "--prompt", prompt, "--prompt-cache-file", cache)
        said.append(run("generate", "--prompt-cache-file", cache, *question, "--verbose", "False"))
    assert said[0] == said[1] != ""


def test_an_unusable_url_is_refused_before_the_computation(capsys: pytest.CaptureFixture[str]) -> None:
    for url, why in ((f"redis://127.0.0.1:{free_port()}#a", "refused"), ("redis://127.0.0.1:1", "needs a name")):
        options = ["--model", "none", "--prompt", "x", "--prompt-cache-file", url]
        assert mlx_lm_command.run(Namespace(command="cache_prompt", options=options)) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert why in line


def test_another_version_of_mlx_lm_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mlx_lm_command, "version", lambda _: "9.9.0")
    assert mlx_lm_command.run(None) == 1  # type: ignore[arg-type]
    assert "mlx-lm 9.9.0 was not tried, only 0.32" in capsys.readouterr().err
