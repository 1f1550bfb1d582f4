"""docs/models.md: its commands convert a 4-bit model for a CPU, and the engine answers with it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from api_engines import write_tiny
from documents import HANGS, commands, entry_point
from mlx_lm.convert import convert

DOCUMENT = "docs/models.md"


@pytest.mark.slow
def test_a_4_bit_model_is_converted_to_float32(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    convert(str(write_tiny(tmp_path / "tiny")), str(models / "small-4bit"), quantize=True, q_group_size=32, q_bits=4)
    typed = [words for line, _ in commands(DOCUMENT) if (words := shlex.split(line))[1] != "fetch-model"]
    assert [words[0] for words in typed] == ["python", "kvpage-engine"]
    for program, *words in typed:
        command = [sys.executable] if program == "python" else entry_point(program)
        done = subprocess.run([*command, *words], cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=HANGS)
        assert done.returncode == 0, done.stderr
    weights = mx.load(str(models / "small-float32" / "model.safetensors"))
    assert {str(array.dtype) for array in weights.values()} == {"mlx.core.float32"}
