"""`kvpage-engine run`: a graph goes on from where its instance was left, in whatever process."""

from __future__ import annotations

from pathlib import Path

from servers import RunningServer, free_port

# isort: split
import mlx.core as mx
import numpy as np
import pytest
import redis
from persistent_models import EXAMPLES

from benchmarks.decoder import SIZES, Plain, decoder
from engine.cli import main

WINDOW = str(EXAMPLES / "window.oinf.txt")


@pytest.fixture
def inputs(tmp_path: Path) -> str:
    path = tmp_path / "inputs.safetensors"
    mx.save_safetensors(str(path), {"x": mx.array(np.arange(18, dtype=np.float32).reshape(6, 3))})
    return str(path)


def test_steps_go_on_where_they_were_left(
    server: RunningServer, client: redis.Redis, inputs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", WINDOW, "--instance", "w", "--size", "D=3", "--inputs", inputs, "--url", server.url]
    assert main([*command, "--steps", "2"]) == 0
    printed = capsys.readouterr().out
    assert "w after step 2" in printed
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if "│" in line]
    assert rows == [
        ["n", "i64", "", "", "", "", "2"],
        ["seen", "f32[3]", "i: 4", "[4, 3]", "2", "24", ""],
        ["sum", "f32[3]", "", "[3]", "1", "12", ""],
    ]
    assert main([*command, "--steps", "4", "--autosave", "3"]) == 0
    assert "w after step 6" in capsys.readouterr().out
    assert main(command) == 1
    assert "x has inputs for 6 steps, none for step 6" in capsys.readouterr().err


def test_a_model_file_has_all_that_a_decoder_needs(
    server: RunningServer, client: redis.Redis, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = decoder()
    path = str(tmp_path / "decoder.safetensors")
    mx.save_safetensors(path, dict(model.tensors), {name: str(size) for name, size in SIZES.items()})
    command = ["run", str(EXAMPLES / "attention.oinf.txt"), "--instance", "d", "--model", path, "--url", server.url]
    for steps in ("5", "3"):
        assert main([*command, "--steps", steps]) == 0
    printed = capsys.readouterr().out
    assert "d after step 8" in printed
    plain = Plain(model)
    for _ in range(8):
        plain.step()
    rows = [line.split("│") for line in printed.splitlines() if "│" in line]
    values = {row[1].strip(): row[-2].strip() for row in rows}
    assert (values["t"], values["last"]) == ("8", str(plain.word.item()))


def test_an_error_is_reported_once(
    server: RunningServer, client: redis.Redis, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = tmp_path / "bad.oinf.txt"
    graph.write_text("block entry {\n    cache.read K >> x;\n}\n", encoding="utf-8")
    assert main(["run", str(graph), "--instance", "a", "--url", server.url]) == 1
    assert capsys.readouterr().err == (
        f"kvpage-engine: {graph}:2:16: there is no variable K, only none\n    cache.read K >> x;\n               ^\n"
    )
    good = tmp_path / "good.oinf.txt"
    good.write_text("persistent { n: i32; } block entry { cache.increment n; }", encoding="utf-8")
    assert main(["run", str(good), "--instance", "a", "--url", f"redis://127.0.0.1:{free_port()}"]) == 1
    assert "Error" in capsys.readouterr().err
    assert main(["run", str(tmp_path / "none"), "--instance", "a", "--url", server.url]) == 1
    assert "No such file" in capsys.readouterr().err
    assert main(["run", str(good), "--instance", "a", "--url", server.url]) == 0
    good.write_text("persistent { n: i32; } block entry { cache.increment 2 n; }", encoding="utf-8")
    assert main(["run", str(good), "--instance", "a", "--url", server.url]) == 1
    assert "instance a was made by program" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--steps", "0"], ["--steps", "x"], ["--size", "D"], ["--size", "D=-1"]])
def test_arguments_that_cannot_be(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", WINDOW, "--instance", "a", *wrong])
    assert caught.value.code == 2
