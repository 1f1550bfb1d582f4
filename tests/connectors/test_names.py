"""Names of blocks: engines find each other's blocks only if nothing that changes the bytes differs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kvpage_connectors import names
from kvpage_connectors.names import Identity, weights_digest

from kvpage_server.page import check_req_id

IDENTITY = Identity(
    weights="0123",
    dtype="float32",
    block_size=128,
    layout="lbhnc-vec",
    isa="avx512",
    backend="CPU_ATTN",
    tp=1,
    pp=1,
    hash="sha256",
    model={"layers": ["a", "b"], "heads": 3},
)


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "0124"},
        {"dtype": "bfloat16"},
        {"block_size": 16},
        {"layout": "x16"},  # the seed's [num_kv_heads, head_size/x, block_size, x]
        {"isa": "amx"},
        {"backend": "FLASH_ATTN"},
        {"tp": 2},
        {"pp": 2},
        {"hash": "sha256_cbor"},
        {"model": {"layers": ["a", "b"], "heads": 4}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_engine_has_other_names(change: dict[str, Any]) -> None:
    assert replace(IDENTITY, **change).names("vllm") != IDENTITY.names("vllm")


def test_another_format_has_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    before = IDENTITY.names("vllm")
    monkeypatch.setattr(names, "FORMAT", names.FORMAT + 1)
    assert IDENTITY.names("vllm") != before


def test_equal_engines_have_equal_names() -> None:
    reordered = replace(IDENTITY, model={"heads": 3, "layers": ["a", "b"]})
    assert reordered.names("vllm") == IDENTITY.names("vllm")
    assert IDENTITY.names("vllm-tier") != IDENTITY.names("vllm")


def test_a_name_shows_the_layout_and_is_a_request_id() -> None:
    prefix = IDENTITY.names("vllm")
    assert prefix.startswith(b"vllm.lbhnc-vec.")
    assert check_req_id(prefix + bytes(32).hex().encode())


@pytest.mark.parametrize("missing", ["weights", "dtype", "layout", "isa", "backend", "hash"])
def test_an_identity_without_a_value_is_refused(missing: str) -> None:
    with pytest.raises(ValueError, match=f"needs a value for {missing}"):
        replace(IDENTITY, **{missing: ""})


def test_a_layout_with_spaces_or_colons_is_refused() -> None:
    with pytest.raises(ValueError, match="layout must be 1 to 40 letters"):
        replace(IDENTITY, layout="[B, H]:N")


def test_the_digest_of_weights_does_not_depend_on_the_path(tmp_path: Path) -> None:
    for name, body in (("one", b"weights"), ("two", b"weights"), ("three", b"weightz")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model-1.safetensors").write_bytes(body)
        (tmp_path / name / "model-2.safetensors").write_bytes(b"more")
    one, two, three = (weights_digest(tmp_path / name) for name in ("one", "two", "three"))
    assert one == two != three
    (tmp_path / "two" / "README.md").write_text("not a weight", encoding="utf-8")
    assert weights_digest(tmp_path / "two") == one
    (tmp_path / "two" / "model-2.safetensors").write_bytes(b"mor")
    assert weights_digest(tmp_path / "two") != one


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no weights"):
        weights_digest(tmp_path)
