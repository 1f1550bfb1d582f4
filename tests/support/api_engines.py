"""Engines as `kvpage-engine serve` runs them: processes on free ports, with tiny models that were written to disk."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import openai
from engine_models import END, letter_tokenizer, tiny, tiny_llama
from forked import begin
from servers import RunningServer

# isort: split
import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import AddedToken

START_WITHIN = 60.0  # seconds, on a busy machine
SMOLLM2 = Path(__file__).parents[2] / "models" / "smollm2"

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'
TOOL_TEMPLATE = "{% if tools %}<tool_call> {{ tools[0].function.name }} {# tool_call.name #}\n{% endif %}" + TEMPLATE

HERMES_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nYou may call these functions:\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Answer with <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for message in messages %}<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}\n"
    "{% if message.role == 'tool' %}<tool_response>\n{{ message.content }}\n</tool_response>"
    "{% else %}{{ message.content }}{% endif %}"
    "{% for tool_call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ tool_call.function.name }}", "arguments": {{ tool_call.function.arguments | tojson }}}'
    "\n</tool_call>{# tool_call.name #}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny(directory: Path, **changes: object) -> Path:
    """A random Llama whose tokens are letters, in mlx-lm's layout. The end of a text is never its likeliest token."""
    model = tiny_llama(**changes)
    model.lm_head.weight[-1] = 0.0
    return _write(directory, model, letter_tokenizer(), TEMPLATE)


def write_family(directory: Path, kind: str, dtype: mx.Dtype = mx.float32, joined: Sequence[str] = ()) -> Path:
    """A random model of another family, with the tokenizer and the template of `write_tiny`. Texts of several letters
    in `joined` are tokens, too.
    """
    tokenizer = letter_tokenizer()
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in joined])
    model = tiny(kind, vocab_size=len(tokenizer))
    model.set_dtype(dtype)
    return _write(directory, model, tokenizer, TEMPLATE)


def write_offered(directory: Path, marks: Sequence[str] = ("<tool_call>", "</tool_call>")) -> Path:
    """The random Llama of `write_tiny` with tools in its chat template, and a token for each of `marks`."""
    tokenizer = letter_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    return _write(directory, tiny_llama(vocab_size=len(tokenizer)), tokenizer, TOOL_TEMPLATE)


def write_coder(directory: Path) -> Path:
    """The random Llama of `write_tiny` with Qwen2.5-Coder's tokens for a text between two others."""
    tokenizer = letter_tokenizer()
    marks = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=True) for mark in marks])
    return _write(directory, tiny_llama(vocab_size=len(tokenizer)), tokenizer, TEMPLATE)


def link_smollm2(directory: Path) -> Path:
    """SmolLM2 with a chat template that writes tools as Qwen's and Hermes' do, because its own has none."""
    directory.mkdir(parents=True)
    for file in SMOLLM2.iterdir():
        (directory / file.name).symlink_to(file.resolve())
    config = json.loads((SMOLLM2 / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["chat_template"] = HERMES_TEMPLATE
    (directory / "tokenizer_config.json").unlink()
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def write_caller(directory: Path, call: str = CALL, before: str = "", template: str = TOOL_TEMPLATE) -> Path:
    """A Llama that calls a tool, whatever it is asked; `call` is the text between the marks. `before` is a text and a
    newline before the call.
    """
    tokenizer = letter_tokenizer()
    marked = ["<tool_call>", call, "</tool_call>"]
    tokenizer.add_tokens([AddedToken(step, normalized=False) for step in [*marked, *before.split()]])
    steps = [":", *before.split(), *(["Ċ"] if before else []), *marked, END]
    return write_speaker(directory, tokenizer, tokenizer.convert_tokens_to_ids(steps), template=template)


def write_speaker(
    directory: Path, tokenizer: Any, tokens: Sequence[int], rows: int = 0, template: str = TEMPLATE
) -> Path:
    """A Llama that says `tokens`, after the first of them. Its layers add nothing, and each token has one that follows.

    It has `rows` tokens if that is more than the tokenizer has.
    """
    assert len({*tokens}) == len(tokens) <= 128
    size = max(len(tokenizer), rows)
    model = tiny_llama(vocab_size=size, hidden_size=128, num_hidden_layers=1)
    layer = model.model.layers[0]
    layer.self_attn.o_proj.weight *= 0
    layer.mlp.down_proj.weight *= 0
    known, follows = mx.zeros((size, 128)), mx.zeros((size, 128))
    for i, (token, next_token) in enumerate(pairwise(tokens)):
        known[token, i] = 1.0
        follows[next_token, i] = 10.0
    model.model.embed_tokens.weight = known
    model.lm_head.weight = follows
    return _write(directory, model, tokenizer, template)


def _write(directory: Path, model: Any, tokenizer: Any, template: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(directory / "model.safetensors"), dict(tree_flatten(model.parameters())))
    config = {name: value for name, value in vars(model.args).items() if value is not None}
    (directory / "config.json").write_text(
        json.dumps({**config, "eos_token_id": tokenizer.eos_token_id}), encoding="utf-8"
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return directory


@dataclass
class RunningEngine(RunningServer):
    """A process that answers OpenAI's clients."""

    token: str = "none"  # that may ask
    watcher: str = "none"  # the token for the metrics of all
    final_log: str = ""  # the log of a process that has ended

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, token: str = "none", **options: Any) -> openai.OpenAI:
        """OpenAI's own, which never tries twice."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=token, max_retries=0, timeout=60, **options)

    def metric(self, name: str) -> float:
        """The sum of a metric of its own, over all its labels; 0 when it was never counted."""
        text = httpx.get(f"{self.url}/metrics", headers={"Authorization": f"Bearer {self.watcher}"}).text
        values = (line.rpartition(" ") for line in text.splitlines() if line.startswith(f"kvpage_engine_{name}"))
        named = (f"kvpage_engine_{name}", f"kvpage_engine_{name}{{")
        return sum(float(value) for key, _, value in values if key == named[0] or key.startswith(named[1]))


@contextmanager
def start_engine(
    model: Path, *options: str, code: int = 0, start: Callable[..., subprocess.Popen[bytes]] | None = None
) -> Iterator[RunningEngine]:
    """`kvpage-engine serve` with a model, which must end with that exit code, and without a traceback.

    `start` begins the process in another way.
    """
    command = [sys.executable, "-m", "engine.cli", "serve", "--model", str(model), "--port", "0", *options]
    with TemporaryDirectory() as place:
        log_file = Path(place, "log")
        with log_file.open("wb") as log:
            process = start(command, stdout=log, stderr=subprocess.STDOUT) if start else begin(command, log)
        engine = RunningEngine(process, 0, log_file)
        try:
            engine.port = _port(engine)
            yield engine
        finally:
            ended = engine.stop()
            engine.final_log = engine.log
        assert ended == code, f"exit code {ended}:\n{engine.log}"
        assert "Traceback" not in engine.log, engine.log


def _port(engine: RunningEngine) -> int:
    deadline = time.monotonic() + START_WITHIN
    while " is served on " not in engine.log:
        if engine.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the engine does not start:\n{engine.log}")
        time.sleep(0.02)
    return int(engine.log.partition(" is served on ")[2].split()[0].rpartition(":")[2])
