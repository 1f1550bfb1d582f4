"""kvpage-engine in a terminal of ASCII: it shows any answer, and reads any question."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from api_engines import write_speaker, write_tiny
from engine_models import END, letter_tokenizer
from servers import RunningServer

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "smollm2"
ASCII = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
ACCENTS = "é è à ù é è à ù é è à ù é è à"

pytestmark = [pytest.mark.model, pytest.mark.skipif(not MODEL.exists(), reason="the small model is not there: make")]


def run(
    server: RunningServer, *words: str, typed: bytes = b"", model: Path = MODEL
) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "engine.cli", *words, "--model", str(model), "--store", server.url]
    environment = {**os.environ, **ASCII}
    return subprocess.run(command, env=environment, input=typed, capture_output=True, timeout=300)


def test_an_answer_with_accents_is_shown_in_ascii(server: RunningServer, tmp_path: Path) -> None:
    tokenizer = letter_tokenizer()
    tokenizer.add_tokens(["Ã©"])  # the two bytes of é
    model = write_speaker(tmp_path / "speaker", tokenizer, tokenizer.convert_tokens_to_ids([":", "Ã©", END]))
    done = run(server, "generate", "--max-tokens", "4", ACCENTS, model=model)
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
    assert rb"\u00e9" in done.stdout


def test_a_question_with_accents_is_read_in_ascii(server: RunningServer, tmp_path: Path) -> None:
    transcript = tmp_path / "transcript"
    words = ("chat", "--max-tokens", "2", "--transcript", str(transcript))
    done = run(server, *words, typed=f"{ACCENTS}\n".encode(), model=write_tiny(tmp_path / "tiny"))
    assert done.returncode == 0, done.stderr
    assert json.loads(transcript.read_text(encoding="utf-8"))[0] == {"role": "user", "content": ACCENTS}


def test_a_prompt_that_is_not_utf8_is_refused(server: RunningServer) -> None:
    done = run(server, "generate", "caf\udce9")
    assert done.returncode == 2
    assert b"argument PROMPT: expected a text in UTF-8: 'utf-8' codec can't decode byte 0xe9" in done.stderr


def test_input_that_cannot_be_decoded_is_refused(server: RunningServer) -> None:
    done = run(server, "generate", "-", typed=b"caf\xe9\n")
    assert done.returncode == 1
    assert b"kvpage-engine: the input is not utf-8: 'utf-8' codec can't" in done.stderr
    assert b"Traceback" not in done.stderr


def test_a_chat_leaves_out_a_line_that_cannot_be_decoded(server: RunningServer, tmp_path: Path) -> None:
    transcript = tmp_path / "transcript"
    words = ("chat", "--max-tokens", "2", "--transcript", str(transcript))
    done = run(server, *words, typed=b"one\ncaf\xe9\ntwo\n", model=write_tiny(tmp_path / "tiny"))
    assert done.returncode == 1
    assert b"kvpage-engine: this line is not utf-8; the line is left out" in done.stderr
    assert b"Traceback" not in done.stderr
    asked = [message["content"] for message in json.loads(transcript.read_text(encoding="utf-8"))[::2]]
    assert asked == ["one", "two"]
