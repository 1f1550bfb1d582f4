"""Documents of the engine are true: every curl line is run, with the real small model and a store."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator

import pytest
from api_engines import SMOLLM2, RunningEngine, link_smollm2, start_engine, write_coder, write_tiny
from documents import blocks, check, commands, entry_point, run
from servers import RunningServer

# isort: split
import mlx_lm

pytestmark = pytest.mark.model
CURL = shutil.which("curl")
DOCUMENTS = ["docs/api.md", "docs/engine.md", "docs/messages.md", "docs/responses.md"]


@pytest.fixture(scope="module")
def engine(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """An engine with a tenant for each document, which finds no contexts of other documents. Its name is its token."""
    with server.client() as client:
        client.flushall()
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    documents = enumerate([*DOCUMENTS, "README.md"])
    tokens.write_text("".join(f"tenant{i} {document}\n" for i, document in documents), encoding="utf-8")
    with start_engine(SMOLLM2, "--store", server.url, "--token-file", str(tokens)) as engine:
        yield engine


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    with start_engine(link_smollm2(tmp_path_factory.mktemp("models") / "hermes")) as engine:
        yield engine


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """A random model with the name "smollm2", and a second model with the name "coder"."""
    models = tmp_path_factory.mktemp("models")
    model = write_coder(models / "qwen-coder")
    with start_engine(write_tiny(models / "smollm2"), "--model", f"coder={model}") as engine:
        yield engine


@pytest.mark.skipif(not CURL, reason="curl is not installed")
@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_curl_line_answers_as_shown(
    engine: RunningEngine, hermes: RunningEngine, coder: RunningEngine, document: str
) -> None:
    engines = {'"model": "hermes"': hermes, '"model": "coder"': coder, "coder=": coder, "/models/coder": coder}
    lines = 0
    for typed, shown in commands(document):
        program, *words = shlex.split(typed)
        asked_engine = next((other for part, other in engines.items() if part in typed), engine)
        if words[:1] == ["serve"]:
            log = asked_engine.log.replace(asked_engine.url, "http://127.0.0.1:8000").splitlines()
            assert {*shown.splitlines()} <= {*log}
            assert words[0] in run([*entry_point(program), *words[:1], "--help"])
            continue
        if program != "curl":
            continue
        asked = [word.replace("localhost:8000", asked_engine.url.removeprefix("http://")) for word in words]
        check(run([program, "-H", f"Authorization: Bearer {document}", *asked]), shown)
        lines += 1
    assert lines


def test_the_readme_shows_the_prompt_cache_in_ten_lines(engine: RunningEngine) -> None:
    (program,) = (block for block in blocks("README.md", "text") if "prompt_cache_options" in block)
    assert sum(bool(line) for line in program.splitlines()) <= 10
    short = program.replace('model="smollm2"', 'model="smollm2", max_output_tokens=8')
    changes = {"http://127.0.0.1:8000": engine.url, 'api_key="none"': 'api_key="README.md"'}
    for written, ours in changes.items():
        short = short.replace(written, ours)
    output = run([sys.executable, "-c", short])
    reused, diagnosis = output.splitlines()
    assert int(reused) >= 37  # the tokens of the first prompt
    assert "type='cache_hit'" in diagnosis


@pytest.mark.soak
def test_the_text_is_mlx_lms(engine: RunningEngine) -> None:
    model, tokenizer = mlx_lm.load(str(SMOLLM2))
    messages = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "Why is the sea salt?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    with engine.client("README.md") as client:
        chat = client.chat.completions.create(model="smollm2", messages=messages, temperature=0, max_tokens=12)
        text = client.completions.create(model="smollm2", prompt="Once upon a time", temperature=0, max_tokens=8)
    assert chat.choices[0].message.content == mlx_lm.generate(model, tokenizer, prompt, max_tokens=12)
    assert text.choices[0].text == mlx_lm.generate(model, tokenizer, "Once upon a time", max_tokens=8)
