"""Models on disk, loaded with mlx-lm."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx.nn.layers.base import Module
    from mlx_lm.tokenizer_utils import TokenizerWrapper


class UnknownModelError(ValueError):
    """The path holds no model that can be loaded; the message says why."""


def load(path: str | Path) -> tuple[Module, TokenizerWrapper]:
    """The model and tokenizer of a local mlx-lm model directory, weights in memory.

    Raises UnknownModelError when `path` is no such directory, when mlx-lm doesn't know its architecture, or when its
    weights are damaged or don't fit it. Never downloads.
    """
    import mlx_lm  # takes seconds: transformers comes with it

    directory = Path(path)
    _check(directory)
    try:
        model, tokenizer, *_ = mlx_lm.load(str(directory))
    except KeyError as error:
        raise UnknownModelError(f"the model in {directory} cannot be loaded: its config.json has no {error}") from error
    except (ValueError, TypeError, RuntimeError) as error:  # of mlx-lm and MLX, for a config or weights they can't use
        raise UnknownModelError(f"the model in {directory} cannot be loaded: {error}") from error
    return model, tokenizer


def _check(directory: Path) -> None:
    if not directory.is_dir():
        raise UnknownModelError(f"{directory} is no directory; a model is a directory with config.json and safetensors")
    for needed in ("config.json", "model*.safetensors"):
        if not any(directory.glob(needed)):
            raise UnknownModelError(f"{directory} is no model directory: it has no {needed}")
