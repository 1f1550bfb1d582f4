"""Models of the Hugging Face Hub, downloaded with huggingface_hub into its cache or a directory.

The hub's client shows the progress on a terminal, continues after a broken connection, keeps complete files for the
next try, and sends the token of `HF_TOKEN` or of `hf auth login`.
"""

from __future__ import annotations

import shutil
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
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
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from .smollm2 import FetchError

NEEDED = ("config.json", "model*.safetensors")  # as `engine.model.load` needs them


def fetch(name: str, revision: str | None, target: Path | None) -> Path:
    """Download the model `name` (``ORG/NAME``) at a branch, tag or commit, and return its directory: `target`, or one
    in the hub's cache, where `--model` finds it.

    Files that are there already are not downloaded again. Raises FetchError, with the reason.
    """
    wanted: dict[str, Any] = {"revision": revision, "local_dir": target, "allow_patterns": DEFAULT_ALLOW_PATTERNS}
    try:
        files = huggingface_hub.snapshot_download(name, dry_run=True, tqdm_class=_Silent, **wanted)
        for needed in NEEDED:
            if not any(fnmatch(file.filename, needed) for file in files):
                raise FetchError(f"{name} is no model for mlx-lm: it has no {needed}")
        _check_room(target or Path(constants.HF_HUB_CACHE), sum(file.file_size for file in files if file.will_download))
        bar = tqdm if sys.stderr.isatty() else _Silent
        return Path(huggingface_hub.snapshot_download(name, tqdm_class=bar, **wanted))
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
