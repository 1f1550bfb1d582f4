"""Models on disk: loading one with mlx-lm, and the digest that says which weights they are."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx.nn.layers.base import Module
    from mlx_lm.tokenizer_utils import TokenizerWrapper

DIGEST_FILE = "weights.sha256.json"


class UnknownModelError(ValueError):
    """The path holds no model that can be loaded; the message says why."""


def load(path: str | Path) -> tuple[Module, TokenizerWrapper]:
    """The model and tokenizer of a local mlx-lm model directory, weights in memory.

    Raises UnknownModelError when `path` is no such directory, when mlx-lm doesn't know its architecture, or when its
    weights are damaged or don't fit it. Never downloads.
    """
    import mlx_lm  # takes seconds: transformers comes with it

    directory = Path(path)
    weight_files(directory)
    try:
        model, tokenizer, *_ = mlx_lm.load(str(directory))
    except KeyError as error:
        raise UnknownModelError(f"the model in {directory} cannot be loaded: its config.json has no {error}") from error
    except (ValueError, TypeError, RuntimeError) as error:  # of mlx-lm and MLX, for a config or weights they can't use
        raise UnknownModelError(f"the model in {directory} cannot be loaded: {error}") from error
    return model, tokenizer


def weight_files(directory: Path) -> list[Path]:
    """The files that make the model what it is: config.json and its weights, in order of their names.

    Raises UnknownModelError when `directory` is no model directory.
    """
    if not directory.is_dir():
        raise UnknownModelError(f"{directory} is no directory; a model is a directory with config.json and safetensors")
    weights = sorted(directory.glob("model*.safetensors"))
    config = directory / "config.json"
    if not weights or not config.is_file():
        missing = "model*.safetensors" if config.is_file() else "config.json"
        raise UnknownModelError(f"{directory} is no model directory: it has no {missing}")
    return [config, *weights]


def weights_digest(path: str | Path) -> str:
    """SHA-256, in hex, of a model's weights and config: equal for two directories that compute the same.

    It is kept in a file beside the weights, and is good there for as long as their sizes and times of change stay.
    Raises UnknownModelError when `path` is no model directory.
    """
    directory = Path(path)
    files = weight_files(directory)
    stamp = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
    kept = directory / DIGEST_FILE
    try:
        known = json.loads(kept.read_text())
        if known["files"] == stamp:
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # none kept yet, or not by us
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            digest.update(file.name.encode() + hashlib.file_digest(content, "sha256").digest())
    with contextlib.suppress(OSError):  # a read-only directory: computed again next time
        kept.write_text(json.dumps({"sha256": digest.hexdigest(), "files": stamp}, indent=1) + "\n")
    return digest.hexdigest()
