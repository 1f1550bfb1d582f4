"""Policy, benchmark and `kvpage connectors verify vllm` with the real vLLM."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import httpx
from api_engines import start_engine, write_tiny
from documents import blocks
from servers import free_port, start_server
from vllm_process import ENVIRONMENT, PYTHON, ROOT, needs_vllm

pytestmark = needs_vllm


def run_python(*arguments: str, text: str = "") -> str:
    """Run a program in the environment of vLLM. Return its standard output. Raises AssertionError with all output."""
    assert PYTHON
    done = subprocess.run(
        [PYTHON, *arguments], input=text, cwd=ROOT, env=ENVIRONMENT, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_stub_has_the_interfaces_of_vllm() -> None:
    assert "differs" not in run_python("tests/connectors/vllm_interfaces.py")


def test_the_tier_works_below_the_manager_of_vllm() -> None:
    """Check backpressure, partial loads and uses without a model."""
    with start_server() as server:
        assert run_python("tests/connectors/vllm_manager.py", server.url).count(" is right\n") == 3


def test_the_configurations_of_the_page_are_those_of_vllm() -> None:
    """Let vLLM read each configuration of docs/vllm.md, and find its classes."""
    program = """
import json, sys
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
for one in json.load(sys.stdin):
    print(KVConnectorFactory.get_connector_class(KVTransferConfig(**one)).__name__)
    for tier in one["kv_connector_extra_config"].get("secondary_tiers", []):
        print(SecondaryTierFactory.get_tier_class(tier).__name__)
"""
    configurations = [one for one in map(json.loads, blocks("docs/vllm.md", "json")) if "kv_connector" in one]
    assert run_python("-c", program, text=json.dumps(configurations)).split()[-4:] == [
        "KvpageConnector",
        "OffloadingConnector",
        "KvpageTier",
        "OffloadingConnector",
    ]


def test_the_policy_passes_its_tests_with_the_classes_of_vllm() -> None:
    path = "tests/connectors/test_vllm_policy.py"
    output = run_python("-m", "pytest", "-q", "--noconftest", "-c", os.devnull, "--rootdir", str(ROOT), path)
    assert "28 passed" in output


def test_the_benchmark_of_policies_runs(tmp_path: Path) -> None:
    """Run a trace in which a prompt returns after many others, with vLLM's own manager of the tier."""
    trace = tmp_path / "trace.jsonl"
    prompts = [[1, 2, 3], [1, 2, 4], *([10 * i, 10 * i + 1, 10 * i + 2] for i in range(1, 20)), [1, 2, 5]]
    lines = [f'{{"timestamp": {5000 * i}, "hash_ids": {prompt}}}\n' for i, prompt in enumerate(prompts)]
    trace.write_text("".join(lines), encoding="utf-8")
    output = run_python("-m", "benchmarks", "vllm_policies", "--trace", str(trace), "--capacity", "20", "100")
    rows = [line.split("\t") for line in output.splitlines() if "\t" in line]
    asked = sum(map(len, prompts))
    some, most = f"{2 / asked:.2%}", f"{4 / asked:.2%}"
    assert rows[-4:] == [
        ["capacity", "20", "100"],
        ["lru", some, most],
        ["arc", most, most],
        ["PrefixPolicy", most, most],
    ]


def test_verify_saves_and_restores_a_context() -> None:
    options = '{"dtype": "float32", "max_model_len": 2048, "gpu_memory_utilization": 0.5}'
    with start_server() as server:
        words = ["connectors", "verify", "vllm", "--url", server.url, "--model", "models/smollm2", "--options", options]
        output = run_python("-m", "kvpage_server.cli", *words)
    print(output)
    assert "prompt of 1025 tokens: 1024 restored by another process\n" in output
    assert "kvpage: the names of blocks begin with vllm.lbhnc-" in output


READ_EVENTS = """
import json, sys
import msgspec, zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
socket = zmq.Context().socket(zmq.DEALER)
socket.connect(sys.argv[1])
found = []
decoder, encoder = msgspec.msgpack.Decoder(KVEventBatch), msgspec.msgpack.Encoder()
while len(found) < int(sys.argv[2]):
    socket.send_multipart([b"", bytes(8)])
    found, next_number = [], 0
    while (frames := socket.recv_multipart())[2] != ZmqEventPublisher.END_SEQ:
        assert int.from_bytes(frames[2], "big") == next_number
        next_number += 1
        batch = decoder.decode(frames[3])
        assert batch.data_parallel_rank == 0
        as_vllm_sends, ours = (msgspec.msgpack.decode(one) for one in (encoder.encode(batch), frames[3]))
        assert as_vllm_sends == ours, (as_vllm_sends, ours)
        found += batch.events
assert type(found[0]) is AllBlocksCleared
assert {type(event) for event in found} <= {AllBlocksCleared, BlockRemoved, BlockStored}
print("RESULT", json.dumps([msgspec.to_builtins(event) for event in found]))
print("HASH", maybe_convert_block_hash(BlockHash(bytes.fromhex("ab" * 24 + "0123456789abcdef"))))
"""


def read_events(address: str, at_least: int) -> tuple[list[Any], int]:
    """Read all events with the types of vLLM. Return them, and the hash that vLLM publishes for a block of ours."""
    output = run_python("-c", READ_EVENTS, address, str(at_least))
    result, block = (line.partition(" ")[2] for line in output.splitlines() if line.startswith(("RESULT ", "HASH ")))
    return json.loads(result), int(block)


def test_vllm_reads_the_events_of_the_server() -> None:
    """Decode with vLLM's types, and encode again: vLLM must send the same fields."""
    replay, name = f"tcp://127.0.0.1:{free_port()}", "vllm.lbhnc-vec.31d70e42848e5546." + "ab" * 24 + "0123456789abcdef"
    options = ["--kv-events", f"tcp://127.0.0.1:{free_port()}", "--kv-events-replay", replay]
    with start_server(*options) as server, server.client() as client:
        client.execute_command("KVPAGESET", name, 0, 0, 0, 0, 1, 1, 8, 0, b"x" * 16)
        read_events(replay, 2)  # the removal is in another batch, which does not leave out the block
        client.execute_command("KVPAGEDEL", name)
        client.execute_command("KVPAGESET", "chat", 0, 0, 3, 0, 1, 1, 8, 0, b"x" * 16)
        (_, stored, removed, of_request), block = read_events(replay, 4)
    assert stored["block_hashes"] == removed["block_hashes"] == [block]
    assert (stored["medium"], stored["locality"]) == ("STORAGE", "REMOTE")
    assert stored["ownership"] == removed["ownership"] == "kvpage:vllm.lbhnc-vec.31d70e42848e5546"
    assert of_request["session_id"] == "chat"


def test_vllm_reads_the_events_of_the_engine(tmp_path: Path) -> None:
    replay = f"tcp://127.0.0.1:{free_port()}"
    options = ["--kv-events", f"tcp://127.0.0.1:{free_port()}", "--kv-events-replay", replay]
    with start_engine(write_tiny(tmp_path / "tiny", max_position_embeddings=8192), *options) as engine:
        body = {"model": "tiny", "prompt": "a" * 1000, "max_tokens": 1, "user": "reader"}
        assert httpx.post(f"{engine.url}/v1/completions", json=body, timeout=60).status_code == 200
        (_, stored, *_), _ = read_events(replay, 2)
    assert len(stored["token_ids"]) == len(stored["block_hashes"]) * stored["block_size"]
    assert (stored["medium"], stored["session_id"]) == ("GPU", "reader")
