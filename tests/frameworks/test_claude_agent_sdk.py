"""Claude Agent SDK, with the program that it brings: two turns of a session, the second one from the cache.

The program asks for long answers, so the model is one that says a word and ends.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recorder import Recorder, recording
from serving import ENVIRONMENT, PYTHON, ROOT, serving

sdk = pytest.importorskip("claude_agent_sdk", reason="`make test-frameworks` runs it")

MAKE = """
import sys
from pathlib import Path
from api_engines import write_speaker
from engine_models import END, letter_tokenizer
tokenizer = letter_tokenizer()
write_speaker(Path(sys.argv[1]), tokenizer, tokenizer.convert_tokens_to_ids([":", "P", "a", "r", "i", "s", END]))
"""


@pytest.fixture
def speaker(tmp_path: Path) -> Iterator[Recorder]:
    """A proxy of an engine whose model says "Paris"."""
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}"}
    subprocess.run([PYTHON, "-c", MAKE, str(tmp_path / "speaker")], cwd=ROOT, env=environment, check=True, timeout=120)
    with serving(tmp_path / "speaker") as engine, recording(engine) as recorder:
        yield recorder
    assert recorder.wrong == []


def options(url: str, home: Path, **more: Any) -> Any:
    """Return options with which the program asks the engine alone, and reads no settings of its user."""
    environment = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CONFIG_DIR": str(home / "config"),
        "DISABLE_AUTOUPDATER": "1",
        "HOME": str(home),
    }
    return sdk.ClaudeAgentOptions(
        model="speaker", system_prompt="Be brief.", tools=[], setting_sources=[], cwd=home, env=environment, **more
    )


async def talk(client: Any, text: str) -> Any:
    """Return the result of a turn."""
    await client.query(text)
    results = [message async for message in client.receive_response() if isinstance(message, sdk.ResultMessage)]
    return results[-1]


def test_a_session_and_its_second_turn(speaker: Recorder, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{speaker.server_port}"

    async def run() -> list[Any]:
        async with sdk.ClaudeSDKClient(options(url, tmp_path)) as client:
            return [await talk(client, text) for text in ("What is the capital of France?", "And of Italy?")]

    first, second = asyncio.run(asyncio.wait_for(run(), 120))
    assert [first.result, second.result] == ["Paris", "Paris"]
    assert [first.is_error, second.is_error] == [False, False]
    before, after = speaker.usages[-2:]
    assert after["prompt_tokens_details"]["cached_tokens"] > 0.98 * before["prompt_tokens"], speaker.usages
