"""Contexts that an engine reads in the memory of its page server, over a unix socket."""

from __future__ import annotations

import sys
from pathlib import Path

from engine_models import tiny_llama
from pools import pool_of
from servers import start_server
from test_engine_cold import TOKENIZER, TOKENS, computed, fetch_same

# isort: split
import pytest

from engine.agent_engine import Reuse
from engine.commands.talk import account
from engine.pool import BlockPool
from engine.spec import ModelCacheSpec
from engine.tiers.pages import PageTier

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs sealed shared memory of Linux")

pool = pool_of(64)


@pytest.mark.parametrize("over", ["unix", "tcp"])
@pytest.mark.parametrize("user", ["default", "tenant"])
def test_a_context_is_read_in_the_server_s_memory(
    tmp_path: Path, pool: BlockPool, monkeypatch: pytest.MonkeyPatch, user: str, over: str
) -> None:
    """An engine that is connected over TCP finds the unix socket. A user with limited rights reads copies."""
    monkeypatch.setattr("kvpage_server.client.calls.LEAST_MAPPED", 1)
    model = tiny_llama()
    spec = ModelCacheSpec.probe(model, TOKENIZER, model_id="tiny")
    saved = computed(model, spec, TOKENS)
    path = tmp_path / "socket"
    tenant = ("--user", "tenant", "on", ">secret", "~kv:*", "~seal:*", "~manifest:*", "~refs:*", "~tails:*", "~label:*")
    with start_server("--unixsocket", str(path), *tenant, "~state:*", "~claim:*", "&*", "+@all") as server:
        login = "tenant:secret@" if user == "tenant" else ""
        url = f"unix://{login}{path}" if over == "unix" else f"redis://{login}127.0.0.1:{server.port}"
        tier = PageTier(url, spec, pool)
        try:
            assert tier.save(saved)
            assert fetch_same(tier, saved, pool).mapped
        finally:
            tier.close()


def test_an_answer_says_that_blocks_were_mapped() -> None:
    class Answered:
        prompt_tokens = 120
        reuse = Reuse("page", 100, 0.1, mapped=True)

    assert "from the page server (mapped) in 100 ms" in account(Answered())  # type: ignore[arg-type]
