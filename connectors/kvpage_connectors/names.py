"""Identity of a KV cache, and the names of its blocks.

Engines share a block if its name is equal. So everything that makes two caches incompatible is a part of the name: an
engine with another identity finds nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from kvpage_server.page import DType

DTYPES = {"torch.float32": DType.FLOAT32, "torch.float16": DType.FLOAT16, "torch.bfloat16": DType.BFLOAT16}
FORMAT = 1  # of the bytes that a connector stores; another number is another name
_WEIGHTS = ("*.safetensors", "*.gguf", "*.bin", "*.pt", "*.pth")  # the first pattern with a file is used
_PIECE = 16 * 1024 * 1024
_WORD = re.compile(r"[A-Za-z0-9_-]{1,40}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Properties of an engine. Two engines share blocks if all of them are equal.

    The constructor raises ValueError for a field without a value, and for a `layout` that is no word.
    """

    weights: str  # digest of the weights, never their path
    dtype: str  # of the cache
    block_size: int  # tokens
    layout: str  # order of the bytes of a block, a word; it is readable in the names
    isa: str  # instruction set of the attention kernel, which may pack the bytes of a block
    backend: str  # attention kernel
    tp: int  # tensor parallel size
    pp: int  # pipeline parallel size
    hash: str  # algorithm of the block hashes
    model: Mapping[str, Any] = field(default_factory=dict)  # layers, heads, sizes, position encoding

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "model" and not value:
                raise ValueError(f"an identity needs a value for {name}")
        if not _WORD.match(self.layout):
            raise ValueError(f"layout must be 1 to 40 letters, digits, '_' and '-', got {self.layout!r}")

    @property
    def digest(self) -> str:
        """Digest of all fields: 16 hexadecimal digits."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def names(self, engine: str) -> bytes:
        """Return the common beginning of the names of all blocks, ``engine.layout.digest.``; `engine` is a word."""
        return f"{engine}.{self.layout}.{self.digest}.".encode()


def weights_digest(folder: Path) -> str:
    """Return a digest of the contents of all weight files in a folder. It reads every byte once.

    Raises OSError if a file can't be read, ValueError if the folder has no weights.
    """
    files = next((found for pattern in _WEIGHTS if (found := sorted(folder.glob(pattern)))), None)
    if not files:
        raise ValueError(f"{folder} has no weights ({', '.join(_WEIGHTS)})")
    every = hashlib.sha256()
    for path in files:
        one, size = xxhash.xxh3_128(), 0
        with path.open("rb", buffering=0) as file:
            while piece := file.read(_PIECE):
                one.update(piece)
                size += len(piece)
        every.update(b"%d %b\n" % (size, one.digest()))
    return every.hexdigest()[:32]
