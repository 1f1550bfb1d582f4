"""An engine reports a page server that it cannot use, and never calls a context saved that is in memory alone."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from api_engines import RunningEngine, start_engine, write_tiny
from servers import RunningServer, free_port, start_server
from waiting import until

from engine.tiers.server.connection import FAILURES


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model"))


def ask(engine: RunningEngine, agent: str) -> None:
    engine.client().chat.completions.create(
        model="model0",
        messages=[{"role": "user", "content": "hello " * 20}],
        max_tokens=4,
        extra_body={"agent_id": agent},
    )


def respond(engine: RunningEngine) -> str:
    """Return the id of a new response."""
    return engine.client().responses.create(model="model0", input="hello", max_output_tokens=2).id


def agent(engine: RunningEngine, name: str) -> dict[str, object]:
    found: dict[str, object] = httpx.get(f"{engine.url}/v1/agents/{name}").json()
    return found


def ready(engine: RunningEngine) -> dict[str, object]:
    answer = httpx.get(f"{engine.url}/health/ready")
    assert answer.status_code == 200
    found: dict[str, object] = answer.json()
    return found


@pytest.fixture
def without_store(model: Path) -> Iterator[RunningEngine]:
    with start_engine(model, "--name", "model0") as engine:
        yield engine


def test_nothing_is_saved_without_a_store(without_store: RunningEngine) -> None:
    ask(without_store, "alice")
    assert agent(without_store, "alice")["saved"] is False
    answer = httpx.post(f"{without_store.url}/v1/agents/alice/save")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "no_store")
    assert ready(without_store) == {"status": "ok"}


def test_unreachable_store_is_reported_and_fails_the_exit(model: Path) -> None:
    url = f"redis://127.0.0.1:{free_port()}"
    with start_engine(model, "--name", "model0", "--store", url, code=1) as engine:
        until(lambda: ready(engine).get("store") == "unreachable", "the outage in the health check")
        assert ready(engine)["reason"] == "down"
        for name in ("alice", "bob"):
            ask(engine, name)
        assert agent(engine, "alice")["saved"] is False
        assert (engine.metric("page_server_up"), engine.metric("page_server_saving")) == (0, 0)
        answer = httpx.post(f"{engine.url}/v1/agents/alice/save")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_saved")
        assert "page: down" in answer.json()["error"]["message"]
    assert engine.final_log.count("cannot connect to the page server at " + url) == 1
    assert "2 contexts could not be saved (page: down)" in engine.final_log


@pytest.mark.parametrize("count", [1, 2])
def test_a_store_is_not_ok_before_its_first_answer(model: Path, count: int) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(start_server()) for _ in range(count)]
        silent = servers[-1].process
        stack.callback(silent.send_signal, signal.SIGCONT)
        silent.send_signal(signal.SIGSTOP)
        with start_engine(model, "--store", ",".join(server.url for server in servers)) as engine:
            assert ready(engine) == {"status": "ok", "store": "connecting"}
            assert engine.metric("page_server_up") == 0
            silent.send_signal(signal.SIGCONT)
            until(lambda: ready(engine) == {"status": "ok", "store": "ok"}, "the connection")
            assert engine.metric("page_server_up") == 1


def test_lost_connection_is_logged_once_and_its_end_once(model: Path) -> None:
    port = free_port()
    with start_server(port=port) as server:
        url = server.url
        with start_engine(model, "--name", "model0", "--store", url) as engine:
            until(lambda: ready(engine) == {"status": "ok", "store": "ok"}, "the connection")
            ask(engine, "alice")
            until(lambda: agent(engine, "alice")["saved"], "alice on the store")
            respond(engine)
            server.stop()
            until(lambda: ready(engine).get("store") == "unreachable", "the outage")
            assert agent(engine, "alice")["saved"] is False  # the server was its only place
            responses = [respond(engine) for _ in range(FAILURES)]
            with start_server(port=port) as again, again.client() as client:
                until(lambda: client.exists(*(f"response::{name}" for name in responses)) == FAILURES, "the responses")
                until(lambda: ready(engine).get("store") == "ok", "the connection again")
                saved = httpx.post(f"{engine.url}/v1/agents/alice/save")
                assert (saved.status_code, saved.json()["saved"]) == (200, True)
                ask(engine, "bob")
                until(lambda: agent(engine, "bob")["saved"], "bob on the store")
    assert engine.final_log.count("lost connection to the page server") == 1
    assert engine.final_log.count("connected again to the page server") == 1
    assert "could not be saved" not in engine.final_log


def test_an_outage_has_the_reason_of_the_last_failure(model: Path) -> None:
    port = free_port()
    with start_engine(model, "--name", "model0", "--store", f"redis://127.0.0.1:{port}") as engine:
        until(lambda: ready(engine).get("reason") == "down", "the outage")
        with start_server("--requirepass", "sesame", port=port):
            until(lambda: ready(engine).get("reason") == "refused", "the server's own reason")
        until(lambda: ready(engine).get("reason") == "down", "the first reason again")
    assert engine.final_log.count("cannot connect to the page server") == 1
    (line,) = re.findall("still no connection to the page server.*", engine.final_log)
    assert "(refused): NOAUTH" in line


def test_an_outage_is_logged_once_for_all_models(model: Path) -> None:
    port = free_port()
    options = ("--name", "model0", "--store", f"redis://127.0.0.1:{port}")
    others = ("--model", f"model1={model}", "--model", f"model2={model}")
    with start_engine(f"model0={model}", *others, *options[2:]) as engine:

        def looked(times: int) -> set[int]:
            """Look for an agent with each model. Return the status codes."""
            agents = f"{engine.url}/v1/agents/nobody"
            names = [f"model{i}" for i in range(3)] * times
            return {httpx.get(agents, params={"model": name}, timeout=60).status_code for name in names}

        for _ in range(2):
            assert looked(FAILURES) == {503}
            with start_server(port=port):
                until(lambda: looked(1) == {404}, "a connection of each model")
    log = engine.final_log
    assert (log.count("cannot connect to"), log.count("lost connection to"), log.count("could not be saved")) == (
        1,
        1,
        0,
    )
    assert log.count(" connected to the page server") == log.count(" connected again to the page server") == 1


def test_evicted_context_is_not_called_saved(model: Path) -> None:
    with start_server() as server, start_engine(model, "--name", "model0", "--store", server.url) as engine:
        ask(engine, "alice")
        until(lambda: agent(engine, "alice")["saved"], "alice on the store")
        with server.client() as client:
            (block,) = {key.split(b":")[1] for key in client.scan_iter("seal:*")}
            assert agent(engine, "alice")["tiers"] == ["hot", "page"]
            assert client.execute_command("KVPAGEDEL", block)
            info = agent(engine, "alice")
            assert (info["saved"], info["tiers"]) == (False, ["hot"])
            assert httpx.post(f"{engine.url}/v1/agents/alice/save").json()["saved"] is True
            client.flushall()
        assert agent(engine, "alice")["saved"] is False


def test_refused_saves_are_logged_with_the_reason(model: Path) -> None:
    reader = ("--user", "reader", "on", ">open", "%R~*", "&*", "+@read", "+@connection", "+publish")
    with start_server(*reader) as server:
        url = server.url.replace("//", "//reader:open@")
        with start_engine(model, "--name", "model0", "--store", url, code=1) as engine:
            ask(engine, "alice")
            until(lambda: ready(engine).get("store") == "not saving", "the refusal")
            assert engine.metric("page_server_up") == 1
    assert engine.final_log.count("contexts cannot be written to the page server (refused)") == 1
    assert "1 context could not be saved (page: refused)" in engine.final_log


def test_wrong_password_is_logged_at_the_start(model: Path) -> None:
    with start_server("--requirepass", "sesame") as server:
        url = server.url.replace("//", "//:wrong@")
        with start_engine(model, "--name", "model0", "--store", url) as engine:
            until(lambda: ready(engine).get("store") == "unreachable", "the outage")
    assert "cannot connect to the page server" in engine.final_log
    assert "WRONGPASS" in engine.final_log
    assert "wrong@" not in engine.final_log


def test_listing_agents_is_no_use_of_them(model: Path) -> None:
    with start_server() as server, start_engine(model, "--name", "model0", "--store", server.url) as engine:
        ask(engine, "alice")
        until(lambda: agent(engine, "alice")["saved"], "alice on the store")
        with server.client() as client:
            (manifest,) = client.scan_iter("manifest:*")
            client.client_no_touch("ON")
            until(lambda: client.object("idletime", manifest) >= 1, "a second without a use")
            assert agent(engine, "alice")["saved"] is True
            httpx.get(f"{engine.url}/v1/agents").raise_for_status()
            assert client.object("idletime", manifest) >= 1


def test_nothing_is_unknown_or_deleted_while_the_store_is_away(model: Path) -> None:
    port = free_port()
    with start_server(port=port) as server:
        with start_engine(model, "--name", "model0", "--store", server.url) as first:
            for name in ("alice", "bob"):
                ask(first, name)
        with start_engine(model, "--name", "model0", "--store", server.url) as engine:
            ask(engine, "carol")
            until(lambda: agent(engine, "carol")["saved"], "carol on the store")
            server.process.send_signal(signal.SIGSTOP)
            try:
                agents = f"{engine.url}/v1/agents"
                answers = [
                    httpx.delete(f"{agents}/carol", timeout=60),  # it is in memory, too
                    httpx.delete(f"{agents}/carol", timeout=60),
                    httpx.delete(f"{agents}/alice", timeout=60),
                    httpx.get(f"{agents}/alice", timeout=60),
                    httpx.post(f"{agents}/alice/fork", json={"to": "dave"}, timeout=60),
                ]
                ask(engine, "erin")
                answers.append(httpx.post(f"{agents}/erin/fork", json={"to": "bob"}, timeout=60))
            finally:
                server.process.send_signal(signal.SIGCONT)
            codes = [(answer.status_code, answer.json()["error"]["code"]) for answer in answers]
            assert codes == [(503, "store_unavailable")] * len(answers)
            until(lambda: ready(engine).get("store") == "ok", "the connection again")
            assert httpx.delete(f"{agents}/alice").json()["deleted"] is True
            assert httpx.get(f"{agents}/alice").status_code == 404
            assert httpx.post(f"{agents}/erin/fork", json={"to": "bob"}).status_code == 409


def test_context_that_the_store_has_lost_is_written_at_the_stop(model: Path) -> None:
    with start_server() as server, server.client() as client:
        with start_engine(model, "--name", "model0", "--store", server.url) as engine:
            for name in ("alice", "bob"):
                ask(engine, name)
                until(lambda name=name: agent(engine, name)["saved"], f"{name} on the store")
            client.flushall()
            listed = httpx.get(f"{engine.url}/v1/agents").json()["data"]
            assert [info["saved"] for info in listed] == [False, False]
        assert len([*client.scan_iter("manifest:*")]) == 2
        with start_engine(model, "--name", "model0", "--store", server.url) as engine:
            assert agent(engine, "alice")["saved"] is True


@pytest.mark.parametrize("crash", [False, True], ids=["running", "killed"])
def test_a_stopping_engine_does_not_store_a_deleted_agent(model: Path, tmp_path: Path, crash: bool) -> None:
    """Another engine deletes agents that it has in memory, and the page server may be killed afterwards."""
    port = free_port()
    tiered = ("--store", "tiered", "--appendfsync", "always")
    options = (model, "--name", "model0", "--store", f"redis://127.0.0.1:{port}")
    first = start_server(*tiered, port=port, directory=tmp_path, killed=crash)
    with first as server, start_engine(*options) as holder:
        for name in ("alice", "bob"):
            ask(holder, name)
            until(lambda name=name: agent(holder, name)["saved"], f"{name} on the store")
        with start_engine(*options) as deleter:
            for name in ("alice", "bob"):
                answer = httpx.delete(f"{deleter.url}/v1/agents/{name}")
                assert answer.json()["deleted"] is True
                assert httpx.get(f"{deleter.url}/v1/agents/{name}").status_code == 404
        ask(holder, "bob")  # a use at this engine after the deletion
        until(lambda: agent(holder, "bob")["saved"], "bob on the store again")
        assert agent(holder, "alice")["tiers"] == ["hot"]
        if crash:
            server.stop(signal.SIGKILL)
            with start_server(*tiered, port=port, directory=tmp_path, name="again") as again:
                until(lambda: ready(holder).get("store") == "ok", "the connection again")
                holder.stop()
                assert stored_agents(again) == {"bob"}
        else:
            holder.stop()
            assert stored_agents(server) == {"bob"}
    assert "could not be saved" not in holder.final_log


def stored_agents(server: RunningServer) -> set[str]:
    with server.client() as client:
        return {key.decode().split(":")[1] for key in client.scan_iter("manifest:*")}
