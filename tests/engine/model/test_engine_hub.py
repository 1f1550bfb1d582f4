"""fetch-model with the real huggingface_hub, against a server that speaks the hub's API."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from engine.model.download import PATTERNS

ORG_NAME = "acme/tiny"
COMMITS = {"main": "a" * 40, "v1": "b" * 40}
TOKEN = "hf_letmein"
WEIGHTS = os.urandom(24 << 20)
CHUNK = 10 << 20  # of the client, which keeps whole ones
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": WEIGHTS,
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"not for mlx-lm",
}


@dataclass
class Hub:
    """The answers of the hub, and the requests that it got: method, path, Range and Authorization."""

    url: str
    files: dict[str, bytes] = field(default_factory=FILES.copy)
    gated: bool = False
    private: bool = False
    breaks: int = 0  # connections that end within the weights, after `part` bytes
    part: int = CHUNK + 1
    seen: list[tuple[str, str, str | None, str | None]] = field(default_factory=list)

    def ranges(self) -> list[str]:
        return [wanted for method, path, wanted, _ in self.seen if method == "GET" and wanted and "model.s" in path]


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.hub = hub = Hub(f"http://127.0.0.1:{server.server_port}")  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield hub
    server.shutdown()
    thread.join()
    server.server_close()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        path, token = self.path.partition("?")[0], self.headers.get("Authorization")
        hub.seen.append((self.command, path, self.headers.get("Range"), token))
        if not re.match(f"(/api/models)?/{ORG_NAME}(/|$)", path) or (hub.private and token != f"Bearer {TOKEN}"):
            return self.error(401, "RepoNotFound")
        if hub.gated and token != f"Bearer {TOKEN}" and "/resolve/" in path:
            return self.error(401 if not token else 403, "GatedRepo")
        if found := re.fullmatch(f"/api/models/{ORG_NAME}(/revision/(.+))?", path):
            if (revision := found[2] or "main") not in COMMITS:
                return self.error(404, "RevisionNotFound")
            return self.json({"id": ORG_NAME, "sha": COMMITS[revision], "siblings": []})
        if found := re.fullmatch(f"/api/models/{ORG_NAME}/tree/(.+)", path):
            oids = {name: hashlib.sha1(content).hexdigest() for name, content in hub.files.items()}
            files = hub.files.items()
            return self.json([{"type": "file", "path": n, "size": len(c), "oid": oids[n]} for n, c in files])
        if found := re.fullmatch(f"/{ORG_NAME}/resolve/([^/]+)/(.+)", path):
            return self.file(hub, found[1], found[2])
        return self.error(404, "EntryNotFound")

    def file(self, hub: Hub, commit: str, name: str) -> None:
        content, start = hub.files[name], 0
        if wanted := re.fullmatch("bytes=([0-9]+)-", self.headers.get("Range") or ""):
            start = int(wanted[1])
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "GET":
            end = len(content)
            if hub.breaks and name == "model.safetensors":
                hub.breaks, end = hub.breaks - 1, start + hub.part
            self.wfile.write(content[start:end])

    def json(self, answer: Any) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def error(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", f"the hub's words for {code}")
        self.send_header("Content-Length", "0")
        self.end_headers()


def run(tmp_path: Path, endpoint: str, *arguments: str, code: int = 0, **environment: str) -> str:
    """Run fetch-model, and return its output, or its error text if it is to fail."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    ours = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    process = subprocess.run(
        [sys.executable, "-m", "engine.cli", "fetch-model", *arguments],
        env=clean | ours | environment,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    assert process.returncode == code, process.stderr
    assert "%|" not in process.stderr, "a progress bar is for terminals"
    return process.stderr[process.stderr.rindex("kvpage-engine: ") :] if code else process.stdout


def directory(output: str) -> Path:
    return Path(output.removeprefix(f"{ORG_NAME} is in ").rstrip("\n"))


def test_the_files_are_those_that_mlx_lm_downloads() -> None:
    assert PATTERNS == DEFAULT_ALLOW_PATTERNS


def test_a_model_is_downloaded_into_the_hubs_cache(hub: Hub, tmp_path: Path) -> None:
    found = directory(run(tmp_path, hub.url, ORG_NAME))
    assert found.is_relative_to(tmp_path / "home" / "hub")
    assert sorted(path.name for path in found.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (found / "model.safetensors").read_bytes() == WEIGHTS
    downloads = len([path for method, path, *_ in hub.seen if method == "GET" and "/resolve/" in path])
    assert directory(run(tmp_path, hub.url, ORG_NAME)) == found
    again = len([path for method, path, *_ in hub.seen if method == "GET" and "/resolve/" in path])
    assert (downloads, again) == (3, 3), "what is there is not downloaded again"


def test_an_engine_finds_it_there_by_its_name(hub: Hub, tmp_path: Path) -> None:
    found = directory(run(tmp_path, hub.url, ORG_NAME))
    code = f"from engine.startup import _directory; print(_directory({ORG_NAME!r}))"
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": "http://127.0.0.1:1"}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, encoding="utf-8") == f"{found}\n"


def test_a_directory_and_a_revision_can_be_named(hub: Hub, tmp_path: Path) -> None:
    target = tmp_path / "models" / "tiny"
    assert directory(run(tmp_path, hub.url, ORG_NAME, "--to", str(target), "--revision", "v1")) == target
    assert (target / "model.safetensors").read_bytes() == WEIGHTS
    assert any(f"/resolve/{COMMITS['v1']}/" in path for _, path, *_ in hub.seen)


def test_a_broken_download_is_resumed(hub: Hub, tmp_path: Path) -> None:
    hub.breaks = 2
    found = directory(run(tmp_path, hub.url, ORG_NAME))
    assert hub.ranges() == [f"bytes={CHUNK}-", f"bytes={2 * CHUNK}-"]
    assert (found / "model.safetensors").read_bytes() == WEIGHTS


def test_the_next_try_keeps_complete_files(hub: Hub, tmp_path: Path) -> None:
    hub.breaks, hub.part = 6, 0  # the client tries again five times
    errors = run(tmp_path, hub.url, ORG_NAME, code=1)
    assert "could not be downloaded" in errors
    assert "the next try keeps the files that are complete" in errors
    hub.seen.clear()
    found = directory(run(tmp_path, hub.url, ORG_NAME))
    assert (found / "model.safetensors").read_bytes() == WEIGHTS
    assert len({path for method, path, *_ in hub.seen if method == "GET" and "/resolve/" in path}) == 1


def test_the_token_of_the_environment_is_sent(hub: Hub, tmp_path: Path) -> None:
    hub.private = hub.gated = True
    assert "is private, set HF_TOKEN" in run(tmp_path, hub.url, ORG_NAME, code=1)
    assert "the token has no access to it" in run(tmp_path, hub.url, ORG_NAME, code=1, HF_TOKEN="hf_another")
    assert directory(run(tmp_path, hub.url, ORG_NAME, HF_TOKEN=TOKEN)).is_dir()


def test_a_gated_model_names_the_page_with_its_terms(hub: Hub, tmp_path: Path) -> None:
    hub.gated = True
    for environment in ({}, {"HF_TOKEN": "hf_another"}):
        errors = run(tmp_path, hub.url, ORG_NAME, code=1, **environment)
        assert errors.startswith(f"kvpage-engine: {ORG_NAME} is gated: accept its terms on {hub.url}/{ORG_NAME}, and")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["acme/none"], "{url} has no model acme/none; if it is private, set HF_TOKEN to a token with access to it"),
        ([ORG_NAME, "--revision", "v9"], f"{ORG_NAME} has no revision v9"),
        (["acme/ti ny"], "the name of a model is smollm2 or ORG/NAME, got 'acme/ti ny'"),
        (["tiny"], "the name of a model is smollm2 or ORG/NAME, got 'tiny'"),
        (["smollm2", "--revision", "v1"], "smollm2 has no revisions"),
    ],
)
def test_a_wrong_name_or_revision_is_named(hub: Hub, tmp_path: Path, arguments: list[str], error: str) -> None:
    assert run(tmp_path, hub.url, *arguments, code=1) == f"kvpage-engine: {error.format(url=hub.url)}\n"


def test_a_repository_without_a_model_is_refused_at_once(hub: Hub, tmp_path: Path) -> None:
    del hub.files["model.safetensors"]
    assert "is no model for mlx-lm: it has no model*.safetensors" in run(tmp_path, hub.url, ORG_NAME, code=1)
    assert not [path for method, path, *_ in hub.seen if method == "GET" and "/resolve/" in path]


def test_without_a_network_the_address_is_named(hub: Hub, tmp_path: Path) -> None:
    errors = run(tmp_path, "http://127.0.0.1:1", ORG_NAME, code=1)
    assert errors.startswith(f"kvpage-engine: {ORG_NAME} could not be downloaded from http://127.0.0.1:1 (")
    assert "HF_HUB_OFFLINE is set" in run(tmp_path, hub.url, ORG_NAME, code=1, HF_HUB_OFFLINE="1")
    assert len(errors.splitlines()) == 1
