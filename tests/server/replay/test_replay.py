"""`kvpage replay`: the hit ratios of policies on a recorded trace."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvpage_server.replay import (
    TracedPrompt,
    TraceError,
    clairvoyant,
    read_trace,
    simulate,
    simulate_nodes,
    simulate_noeviction,
)
from kvpage_server.store.eviction.policies import LRU, S3FIFO
from kvpage_server.store.eviction.prefix import Prefix


def trace_of(*chains: str) -> list[TracedPrompt]:
    """A request a chain, ten seconds apart; a letter is a block."""
    return [TracedPrompt(10 * i, [block.encode() for block in chain]) for i, chain in enumerate(chains)]


def chat_trace(requests: int, users: int, seed: int = 1) -> list[dict[str, object]]:
    """Users who return a few times, each time with their whole context and more, among others who do not."""
    chance = random.Random(seed)
    fresh = iter(range(1, 10**9))
    talks: dict[int, list[int]] = {}
    lines = []
    for at in range(requests):
        user = chance.randrange(users) if chance.random() < 0.2 else -1 - at
        if user not in talks or len(talks[user]) > 40 or chance.random() < 0.4:
            talks[user] = [0]
        talks[user] = [*talks[user], *(next(fresh) for _ in range(chance.randint(2, 8)))]
        lines.append({"timestamp": at * 1000, "input_length": 1, "output_length": 1, "hash_ids": talks[user]})
    return lines


def write_trace(path: Path, lines: Sequence[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_lru_by_hand() -> None:
    trace = trace_of("abc", "abd", "xy", "abc")
    found = simulate(LRU, trace, 4)
    assert (found.asked, found.hits) == (11, 2)  # x and y push out a and b, which were used before d
    assert (found.written, found.evicted) == (3 + 1 + 2 + 2, 4)
    assert simulate(LRU, trace, 6).hits == 2 + 3


def test_a_hole_ends_the_hits() -> None:
    found = simulate(LRU, trace_of("abcd", "x", "abcd"), 4)
    assert found.hits == 0  # x evicts a: the blocks behind a exist, and are useless
    assert simulate(Prefix, trace_of("abcd", "x", "abcd"), 4).hits == 3


def test_a_trace_that_fits_is_kept_under_any_policy() -> None:
    trace = trace_of("abc", "abd", "xy", "abc", "xyz")
    for make in (LRU, S3FIFO, Prefix):
        found = simulate(make, trace, 7)
        assert (found.hits, found.evicted, found.written) == (2 + 3 + 2, 0, 7)
    assert simulate_noeviction(trace, 7).hits == clairvoyant(trace, 7).hits == 7


def test_noeviction_keeps_the_first_blocks() -> None:
    found = simulate_noeviction(trace_of("abc", "xyz", "abc", "xyz"), 4)
    assert (found.hits, found.written) == (3 + 1, 4)


def test_hindsight_by_hand() -> None:
    trace = trace_of("abc", "xy", "abd", "xy")
    assert clairvoyant(trace, 4).hits == 2 + 2  # c and d are never asked for again and take no room
    assert clairvoyant(trace, 3).hits == 2 + 1
    assert clairvoyant(trace, 2).hits == 2


def test_the_default_wins_on_a_chat_and_clairvoyance_beats_all(tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path / "chat.jsonl", chat_trace(3000, 30)))
    for capacity in (200, 400, 800):
        lru, s3fifo, prefix = (simulate(make, trace, capacity).ratio for make in (LRU, S3FIFO, Prefix))
        assert prefix >= 0.99 * max(lru, s3fifo)
        assert clairvoyant(trace, capacity).ratio >= prefix
    assert simulate(Prefix, trace, 200).ratio > 1.1 * simulate(LRU, trace, 200).ratio


def test_the_command_shows_a_table_and_writes_json_and_a_picture(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "chat.jsonl", chat_trace(300, 20))
    words = ["replay", str(trace), "--policy", "allkeys-lru", "clairvoyant", "--capacity", "50", "100"]
    words += ["--block-bytes", "2mb", "--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")]
    done = run(*words)
    assert done.returncode == 0, done.stderr
    assert "300 requests" in done.stdout
    assert done.stdout.count("allkeys-lru") == done.stdout.count("clairvoyant") == 2
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert found["block_bytes"] == 2 << 20
    assert [(row["policy"], row["capacity"]) for row in found["replays"]] == [
        (policy, capacity) for policy in ("allkeys-lru", "clairvoyant") for capacity in (50, 100)
    ]
    requests = read_trace(trace)
    assert found["replays"][0]["hits"] == simulate(LRU, requests, 50).hits
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: must be an object with timestamp and hash_ids"),
        ('{"timestamp": "now", "hash_ids": []}', "line 2: timestamp must be a number of milliseconds, got 'now'"),
        ('{"timestamp": 0, "hash_ids": ["a"]}', "line 2: hash_ids must be a list of whole numbers"),
        ('{"timestamp": 0, "hash_ids": [1, 2, 1]}', "line 2: hash_ids names a block twice"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "hash_ids": [1]}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(TraceError, match=complaint.replace("[", r"\[")):
        read_trace(path)


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    trace = str(write_trace(tmp_path / "chat.jsonl", chat_trace(5, 2)))
    missing = run("replay", str(tmp_path / "nowhere.jsonl"))
    assert (missing.returncode, "nowhere.jsonl" in missing.stderr) == (1, True)
    unknown = run("replay", trace, "--policy", "random")
    assert unknown.returncode == 2
    assert "allkeys-prefix" in unknown.stderr
    assert run("replay", trace, "--capacity", "0").returncode == 2
    (tmp_path / "empty").touch()
    assert "has no requests" in run("replay", str(tmp_path / "empty")).stderr


def test_a_replay_is_fast(tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path / "chat.jsonl", chat_trace(1000, 50)))
    blocks = sum(len(request.blocks) for request in trace)
    started = time.process_time()
    simulate(Prefix, trace, 500)
    assert (time.process_time() - started) / blocks < 500e-6


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvpage_server.cli", *words]
    return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60, check=False)


# -- several nodes -----------------------------------------------------------------------------------------------------


def test_several_nodes_find_as_much_as_one_of_their_size() -> None:
    trace = trace_of("abcdefgh", "abcdxyz", "abcdefgh")
    for nodes in (1, 2, 5):
        for segment in (1, 2, 64):
            found = simulate_nodes(LRU, trace, 1000, nodes, segment)
            assert found.outcome.hits == simulate(LRU, trace, 1000).hits
            assert sum(load.blocks for load in found.loads) == found.outcome.asked


def test_longer_segments_use_fewer_nodes_less_evenly(tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path / "trace", chat_trace(300, 20)))
    spreads = [simulate_nodes(LRU, trace, 400, 8, segment) for segment in (1, 4, 64)]
    assert [s.nodes_a_prompt for s in spreads] == sorted((s.nodes_a_prompt for s in spreads), reverse=True)
    assert 1 <= spreads[0].busiest_by_blocks < spreads[2].busiest_by_blocks


def test_prompts_with_a_common_prefix_are_spread() -> None:
    trace = trace_of(*("s" + "abcdefgh"[i] + "123" for i in range(8)))
    found = simulate_nodes(LRU, trace, 100, 8, 64)
    assert max(load.blocks for load in found.loads) < sum(load.blocks for load in found.loads) / 2


def test_a_lost_node_costs_only_its_blocks() -> None:
    trace = trace_of("abcd", "abcd", "abcd", "abcd")
    whole = simulate_nodes(LRU, trace, 100, 1, 1)
    lossy = simulate_nodes(LRU, trace, 100, 1, 1, lose_at=2)
    assert whole.outcome.hits - lossy.outcome.hits == 4
    two = simulate_nodes(LRU, trace, 100, 4, 1, lose_at=2)
    assert 0 < whole.outcome.hits - two.outcome.hits <= 4


def test_the_command_shows_the_effect_of_nodes(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", chat_trace(100, 10))
    figures, plot = tmp_path / "figures.json", tmp_path / "plot.png"
    words = ["replay", str(trace), "--nodes", "4", "--capacity", "200", "--json", str(figures), "--plot", str(plot)]
    shown = subprocess.run([sys.executable, "-m", "kvpage_server.cli", *words], capture_output=True, encoding="utf-8")
    assert shown.returncode == 0, shown.stderr
    assert "busiest, blocks" in shown.stdout
    received = json.loads(figures.read_text(encoding="utf-8"))
    assert [each["segment"] for each in received["replays"]] == [1, 2, 4, 8, 16, 32, 64]
    assert plot.read_bytes().startswith(b"\x89PNG")
    refused = subprocess.run(
        [sys.executable, "-m", "kvpage_server.cli", *words[:4], "--policy", "clairvoyant"],
        capture_output=True,
        encoding="utf-8",
    )
    assert refused.returncode != 0
    assert "--nodes takes one --policy, of" in refused.stderr
