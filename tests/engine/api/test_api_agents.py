"""Agents over HTTP: remembered by whichever engine is asked, across restarts, by their own tenant alone."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from api_engines import RunningEngine, start_engine, write_tiny
from documents import ROOT
from servers import RunningServer
from terminals import terminal

from engine import cli

# isort: split
import mlx.core as mx
import mlx_lm
from mlx_lm.generate import generate_step

HANDBOOK = "The lamp is lit at dusk and put out at dawn, and the log says who did it and when. " * 8  # 664 letters
QUESTIONS = ["Who lit it?", "And when?", "Who put it out?", "Is it in the log?"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def alone(tiny: Path) -> Any:
    """mlx-lm's own text, whose contexts nobody keeps."""
    model, tokenizer = mlx_lm.load(str(tiny))

    def answer(messages: list[dict[str, str]], max_tokens: int) -> str:
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return tokenizer.decode([token for token, _ in generate_step(mx.array(prompt), model, max_tokens=max_tokens)])

    return answer


@pytest.fixture(scope="module")
def engines(tiny: Path, server: RunningServer) -> Iterator[list[RunningEngine]]:
    """Two that share a store and nothing else."""
    with ExitStack() as stack:
        yield [stack.enter_context(start_engine(tiny, "--store", server.url)) for _ in range(2)]


def ask(engine: RunningEngine, messages: list[dict[str, str]], agent: str, token: str = "none", **more: Any) -> Any:
    with engine.client(token) as client:
        return client.chat.completions.create(
            model="tiny", messages=messages, temperature=0, max_tokens=20, extra_body={"agent_id": agent}, **more
        )


def agents(engine: RunningEngine, method: str, path: str = "", token: str = "none", **more: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.request(method, f"{engine.url}/v1/agents{path}", headers=headers, timeout=60, **more)


def test_an_answer_that_ends_after_a_delete_is_not_kept(engines: list[RunningEngine]) -> None:
    asked = [{"role": "user", "content": HANDBOOK}]
    for deletes in (True, False):
        ask(engines[0], asked, "late")
        more: dict[str, Any] = {"model": "tiny", "messages": asked, "max_tokens": 200, "stream": True}
        with engines[0].client() as client:
            chunks = iter(client.chat.completions.create(**more, extra_body={"agent_id": "late", "ignore_eos": True}))
            next(chunks)
            if deletes:
                assert agents(engines[0], "DELETE", "/late").json()["deleted"]
            assert len(list(chunks)) > 0
        assert agents(engines[0], "GET", "/late").status_code == (404 if deletes else 200)


def test_a_conversation_alternates_between_two_engines(engines: list[RunningEngine], alone: Any) -> None:
    messages = [{"role": "system", "content": HANDBOOK}]
    reused = []
    for turn, question in enumerate(QUESTIONS):
        messages.append({"role": "user", "content": question})
        answer = ask(engines[turn % 2], messages, "keeper")
        text = answer.choices[0].message.content
        assert text == alone(messages, 20)
        messages.append({"role": "assistant", "content": text})
        reused.append((answer.kvpage["tier"], answer.usage.prompt_tokens - answer.kvpage["tokens_reused"]))
        assert answer.usage.prompt_tokens_details.cached_tokens == answer.kvpage["tokens_reused"]
        assert agents(engines[turn % 2], "POST", "/keeper/save").json()["saved"]
    (first, _), (second, computed), *others = reused
    assert (first, second) == ("none", "page")
    assert computed < 60
    # The context of two turns ago may be fetched or computed, whichever is faster.
    assert all(tier in ("hot", "page") and computed < 150 for tier, computed in others), reused


def test_a_stopped_engine_answers_and_another_continues(tiny: Path, server: RunningServer, alone: Any) -> None:
    messages = [{"role": "system", "content": HANDBOOK[::-1]}, {"role": "user", "content": "Read it backwards."}]
    with start_engine(tiny, "--store", server.url) as first, first.client() as client:
        stream = client.chat.completions.create(
            model="tiny", messages=messages, temperature=0, max_tokens=150, stream=True, user="mirror"
        )
        chunks = [next(stream) for _ in range(3)]
        first.process.send_signal(signal.SIGTERM)
        chunks += stream
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == alone(messages, 150), "it was finished"
        assert chunks[-1].choices[0].finish_reason == "length"
        assert first.process.wait(60) == 0
        with pytest.raises(openai.APIConnectionError):
            ask(first, messages, "mirror")
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Again."}]
    with start_engine(tiny, "--store", server.url, code=128 + signal.SIGTERM) as second:
        answer = ask(second, messages, "mirror")
        assert answer.kvpage["tier"] == "page"
        assert answer.usage.prompt_tokens - answer.kvpage["tokens_reused"] < 60
        assert answer.choices[0].message.content == alone(messages, 20)
        with second.client() as client:
            stream = client.chat.completions.create(
                model="tiny", messages=messages, temperature=0, max_tokens=2000, stream=True
            )
            next(stream)
            second.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            assert second.process.poll() is None, "it finishes what runs"
            second.process.send_signal(signal.SIGTERM)
            second.process.wait(60)


def test_a_closed_terminal_loses_no_context(tiny: Path, server: RunningServer) -> None:
    """It receives SIGHUP twice, as from a shell that ends with it; a service continues after SIGHUP."""
    messages = [{"role": "user", "content": HANDBOOK[::-1] + "hung up"}]
    with terminal() as place, start_engine(tiny, "--store", server.url, start=place.start) as first:
        text = ask(first, messages, "hung-up").choices[0].message.content
        first.process.send_signal(signal.SIGHUP)
        place.close()
        assert first.process.wait(60) == 0
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Again."}]
    with start_engine(tiny, "--store", server.url, start=partial(subprocess.Popen, start_new_session=True)) as second:
        for _ in range(2):
            second.process.send_signal(signal.SIGHUP)
        answer = ask(second, messages, "hung-up")
        assert answer.kvpage["tier"] == "page"
        assert answer.usage.prompt_tokens - answer.kvpage["tokens_reused"] < 60


def test_hangup_during_the_start_waits_for_its_handler() -> None:
    program = """
import signal, sys
from kvpage.engine.commands import serve
from kvpage_server import __main__
serve._listen = lambda *_: (print(flush=True), sys.stdin.read(), sys.exit(40 + len(signal.sigpending())))
sys.argv = ["kvpage-engine", "serve"]
__main__.kvpage_engine()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as starting:
        assert starting.stdout
        assert starting.stdout.readline() == b"\n"
        starting.send_signal(signal.SIGHUP)
        starting.communicate(timeout=60)
        assert starting.returncode == 41


def test_agents_are_listed_shown_forked_and_forgotten(engines: list[RunningEngine]) -> None:
    messages = [{"role": "user", "content": HANDBOOK}]
    text = ask(engines[0], messages, "original").choices[0].message.content
    (shown,) = [agent for agent in agents(engines[0], "GET").json()["data"] if agent["id"] == "original"]
    assert shown["tokens"] > 664
    assert shown["bytes"] == shown["tokens"] * 4 * 2 * 2 * 16 * 4, "layers, planes, heads, width, itemsize"
    assert "hot" in shown["tiers"]
    forked = agents(engines[0], "POST", "/original/fork", json={"to": "copy"})
    assert (forked.status_code, forked.json()["tokens"]) == (201, shown["tokens"])
    assert agents(engines[0], "POST", "/copy/save").json()["saved"]
    elsewhere = agents(engines[1], "GET", "/copy").json()
    assert (elsewhere["tokens"], elsewhere["tiers"]) == (shown["tokens"], ["page"])
    assert agents(engines[0], "DELETE", "/original").json() == {
        "id": "original",
        "object": "agent.deleted",
        "deleted": True,
    }
    assert agents(engines[0], "GET", "/original").status_code == 404
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
    answer = ask(engines[1], messages, "copy")
    assert answer.kvpage["tier"] == "page"
    assert answer.usage.prompt_tokens - answer.kvpage["tokens_reused"] < 40


def test_keys_with_invalid_agent_names_are_not_listed(engines: list[RunningEngine], server: RunningServer) -> None:
    ask(engines[0], [{"role": "user", "content": HANDBOOK}], "kept")
    assert agents(engines[0], "POST", "/kept/save").json()["saved"]
    with server.client() as client:
        (key,) = client.keys("manifest:kept:*")
        odd = [key.replace(b"kept", name) for name in (b" ", b"a b", b"..", b"\xff", b"a:b", b"", b"x" * 129, b"<i>")]
        client.mset(dict.fromkeys(odd, "x"))
        reply = agents(engines[0], "GET")
        client.delete(*odd)
    assert reply.status_code == 200, reply.text
    names = [agent["id"] for agent in reply.json()["data"]]
    assert "kept" in names
    assert all(re.fullmatch(r"[\w-]+", name) for name in names), names


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("GET", "/nobody", None, 404, "agent_id"),
        ("DELETE", "/nobody", None, 404, "agent_id"),
        ("POST", "/nobody/save", None, 404, "agent_id"),
        ("POST", "/nobody/fork", {"to": "somebody"}, 404, "agent_id"),
        ("POST", "/nobody/fork", {}, 400, "to"),
        ("POST", "/nobody/fork", {"to": "a@b"}, 400, "to"),
        ("GET", "/some/body", None, 400, "agent_id"),
        ("GET", "/some%2Fbody", None, 400, "agent_id"),
        ("DELETE", "/..%2F..%2Fetc", None, 400, "agent_id"),
        ("GET", "/" + "a" * 10_240, None, 400, "agent_id"),
    ],
)
def test_an_agent_that_is_none_is_named(
    engines: list[RunningEngine], method: str, path: str, body: Any, status: int, param: str
) -> None:
    reply = agents(engines[0], method, path, content=None if body is None else json.dumps(body))
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param), reply.text


def test_an_agent_takes_all_methods_that_are_named(engines: list[RunningEngine]) -> None:
    reply = agents(engines[0], "PUT", "/nobody")
    assert (reply.status_code, reply.headers["allow"]) == (405, "DELETE, GET, HEAD")
    assert reply.json()["error"]["message"] == "there is no PUT /v1/agents/nobody here, only DELETE, GET, HEAD"


@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE", "PUT"])
@pytest.mark.parametrize("path", ["/nobody/save", "/nobody/fork"])
def test_save_and_fork_need_post(engines: list[RunningEngine], method: str, path: str) -> None:
    reply = agents(engines[0], method, path)
    assert (reply.status_code, reply.headers["allow"]) == (405, "POST")


def test_a_file_that_cannot_be_removed_is_reported(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "squatted.safetensors").mkdir()
    with start_engine(tiny, "--cold", str(tmp_path)) as engine:
        reply = agents(engine, "DELETE", "/squatted")
        assert reply.status_code == 500
        assert "'squatted' is forgotten but for its cold file, which cannot be removed: " in reply.text
        assert agents(engine, "DELETE", "/nobody").status_code == 404


def test_four_agents_on_two_engines_compute_their_rules_once(engines: list[RunningEngine]) -> None:
    output = example("four_agents.py", *(engine.url for engine in engines))
    turns = re.findall(r"^(\w+) +at engine (\d): .*\n +\[(\d+) of \d+ tokens reused: (\w+)\]$", output, re.MULTILINE)
    assert [(name, int(engine)) for name, engine, *_ in turns] == [
        *zip(("captain", "pilot", "engineer", "cook"), (0, 1, 0, 1), strict=True),
        *zip(("captain", "pilot", "engineer", "cook"), (1, 0, 1, 0), strict=True),
    ]
    (_, _, first, _), *others = turns
    assert int(first) < 20, "the chat template's first tokens may be known"
    assert all(int(reused) >= 1280 for _, _, reused, _ in others), output


def test_the_example_with_openais_client_continues(engines: list[RunningEngine]) -> None:
    assert example("openai_client.py", engines[0].url).count("tokens reused") == 3
    assert "[0 tokens reused" not in example("openai_client.py", engines[0].url)


def example(name: str, *words: str) -> str:
    command = [sys.executable, str(ROOT / "examples" / name), *words]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_line_gives_the_same_result(
    engines: list[RunningEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: str) -> str:
        assert cli.main(["agents", "--url", engines[0].url, *words]) == 0
        return capsys.readouterr().out

    ask(engines[0], [{"role": "user", "content": HANDBOOK}], "shelly")
    tokens = agents(engines[0], "GET", "/shelly").json()["tokens"]
    assert re.search(rf"^shelly +tiny +hot.* {tokens} ", run("list"), re.MULTILINE)
    assert re.search(rf"^shelly +tiny +hot, page +yes +{tokens} ", run("save", "shelly"), re.MULTILINE)
    assert run("fork", "shelly", "shelly-2").splitlines()[1].startswith("shelly-2 ")
    assert run("delete", "shelly") == "shelly is deleted\n"
    assert "shelly-2" in run("show", "shelly-2")
    assert cli.main(["agents", "show", "shelly-2", "--url", engines[0].url]) == 0
    assert capsys.readouterr().out == run("show", "shelly-2")
    for words, complaint in (
        (["--url", engines[0].url, "show", "shelly"], "nothing is remembered of 'shelly'"),
        (["fork", "shelly-2", "shelly-2", "--url", engines[0].url], "'shelly-2'; --replace replaces it"),
        (["--url", engines[0].url, "show", "a/b"], "agent_id must be 1 to 128"),
        (["--url", engines[0].url, "--model", "other", "list"], "'other' is not served here"),
        (["--url", "http://127.0.0.1:1", "list"], "cannot ask http://127.0.0.1:1: "),
        (["--url", "nonsense", "list"], "cannot ask nonsense: "),
    ):
        assert cli.main(["agents", *words]) == 1
        (error,) = capsys.readouterr().err.splitlines()
        assert error.startswith("kvpage-engine: ")
        assert complaint in error


@pytest.mark.parametrize("reply", [b"[]", b"{}", b'"x"', b'{"data": [1]}', b'{"data": [{"id": "a"}]}'])
@pytest.mark.parametrize("words", [("list",), ("show", "alice"), ("delete", "alice")])
def test_a_server_that_is_no_engine_is_named(
    reply: bytes, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(reply)

        do_DELETE = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert cli.main(["agents", *words, "--url", url]) == 1
        thread.join()
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"kvpage-engine: {url} is no engine: it answered ")


def test_a_request_that_cannot_be_served_is_one_line(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokens").write_text("acme one two\n", encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words, complaint in (
            (["--model", str(tiny), "--port", str(port)], f"port {port}: Address already in use: stop the program"),
            (["--model", str(tmp_path), "--port", "0"], "it has no config.json"),
            (["--model", "no/such-model", "--port", "0"], "neither a directory nor the id of a model"),
            (["--model", str(tiny), "--port", "0", "--token-file", str(tmp_path / "none")], "cannot read the tokens"),
            (["--model", str(tiny), "--port", "0", "--token-file", str(tmp_path / "tokens")], "line 1: expected"),
        ):
            assert cli.main(["serve", *words]) == 1
            error = capsys.readouterr().err.splitlines()[-1]
            assert error.startswith("kvpage-engine: ")
            assert complaint in error
        with pytest.raises(SystemExit) as ended:
            cli.main(["serve", "--model", str(tiny), "--port", "0", "--store", "http://here"])
        assert ended.value.code == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert "redis-cluster:// or rediss-cluster://, got 'http://here'" in error
