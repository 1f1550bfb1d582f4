"""Identity of a vLLM engine: everything that the bytes of its blocks depend on."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import vllm

from kvpage_connectors.names import Identity, weights_digest


def identity_of(
    vllm_config: Any, weights: str, *, layout: str, isa: str, backend: str, dtype: str, block_size: int, **model: Any
) -> Identity:
    """Return the identity of an engine with `weights`, a digest. Arguments are fields of Identity; `model` has the
    layers and sizes of the cache. The version of vLLM is a part of it, because kernels may change.
    """
    config, parallel = vllm_config.model_config, vllm_config.parallel_config
    known = {key: value for key, value in config.hf_config.to_dict().items() if key != "_name_or_path"}
    return Identity(
        weights=weights,
        dtype=dtype,
        block_size=block_size,
        layout=layout,
        isa=isa,
        backend=f"{backend} of vLLM {vllm.__version__}",
        tp=parallel.tensor_parallel_size,
        pp=parallel.pipeline_parallel_size,
        hash=str(vllm_config.cache_config.prefix_caching_hash_algo),
        model={
            **model,
            "dtype": str(config.dtype),
            "quantization": str(config.quantization),
            "config": hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest(),
        },
    )


def weights_of(vllm_config: Any) -> str:
    """Return the digest of the weights that vLLM loads. Raises OSError or ValueError if they can't be read."""
    model = vllm_config.model_config
    if str(vllm_config.load_config.load_format) == "dummy":
        return f"dummy {model.seed}"
    folder = model.model
    if not os.path.isdir(folder):
        from huggingface_hub import snapshot_download

        folder = snapshot_download(folder, revision=model.revision, local_files_only=True)
    return weights_digest(Path(folder))
