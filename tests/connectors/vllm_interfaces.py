"""Compares the interfaces of the stub with those of vLLM: prints each method whose arguments differ.

The environment of vLLM runs it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

STUB = Path(__file__).parent / "stub"
INTERFACES = {  # classes that connectors derive from or call, by module
    "vllm.v1.kv_offload.base": ["ReqContext", "ScheduleEndContext"],
    "vllm.v1.kv_offload.cpu.policies.base": ["CachePolicy", "ChunkStatus"],
    "vllm.v1.kv_offload.file_mapper": ["FileMapper"],
    "vllm.v1.kv_offload.tiering.async_lookup": ["AsyncLookupManager"],
    "vllm.v1.kv_offload.tiering.base": ["JobResult", "SecondaryTierManager", "TransferJob"],
    "vllm.distributed.kv_transfer.kv_connector.v1.base": ["KVConnectorBase_V1"],
}

GIVEN = {"ReqContext", "FileMapper", "ScheduleEndContext"}  # classes whose objects only vLLM makes


def differences(name: str, classes: list[str]) -> Iterator[str]:
    """Yield the methods of a module's classes whose arguments differ, with both argument lists."""
    path = STUB.joinpath(*name.split(".")).with_suffix(".py")
    stub, real = load(path), importlib.import_module(name)
    for kind in classes:
        for method, function in vars(getattr(stub, kind)).items():
            is_called = not method.startswith("_") or (method == "__init__" and kind not in GIVEN)
            if inspect.isfunction(function) and is_called:
                ours, theirs = arguments(function), arguments(getattr(getattr(real, kind), method, None))
                if theirs is None or ours != theirs[: len(ours or [])]:
                    yield f"{kind}.{method}: {ours}, in vLLM {theirs}"


def load(path: Path) -> ModuleType:
    spec = spec_from_file_location(f"stub_{path.stem}", path)
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def arguments(function: Any) -> list[str] | None:
    return [*inspect.signature(function).parameters] if function else None


if __name__ == "__main__":
    for module, classes in INTERFACES.items():
        for line in differences(module, classes):
            print("differs:", line)
