"""kvpage-engine generate, chat, bench and doctor, as they are typed, with a tiny model and a real store."""

from __future__ import annotations

import importlib
import importlib.metadata
import io
import json
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from api_engines import write_tiny
from servers import RunningServer
from surroundings import OPEN_FILES

from engine import cli
from engine.commands.measure import Fetching
from kvpage_server import __version__

# isort: split
import mlx_lm

HANDBOOK = "The lamp is lit at dusk and put out at dawn. " * 14  # 630 letters
ACCOUNT = re.compile(
    r"([\d,]+) of ([\d,]+) tokens reused( from \S+(?: \S+)* in \d+ ms)?(?: \(.*\))?; first token after"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


def run(*words: str) -> None:
    assert cli.main(words) == 0


def reused(output: str) -> list[tuple[int, str]]:
    """Return the reused tokens of each turn, and their source."""
    return [(int(found[1].replace(",", "")), found[3] or "") for found in ACCOUNT.finditer(output)]


def test_generate_prints_mlx_lms_answer_and_the_reused_tokens(
    tiny: Path, server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", str(tiny), "--store", server.url, "--max-tokens", "8"]
    model, tokenizer = mlx_lm.load(str(tiny))
    chat = tokenizer.apply_chat_template([{"role": "user", "content": HANDBOOK}], add_generation_prompt=True)
    expected = mlx_lm.generate(model, tokenizer, chat, max_tokens=8)
    for _ in range(2):
        run("generate", *options, "--agent", "gen", HANDBOOK)
    out, err = capsys.readouterr()
    assert out == 2 * f"{expected}\n"
    (first, nowhere), (second, where) = reused(err)
    assert (first, nowhere) == (0, "")
    assert second >= 512
    assert where.startswith(" from the page server in ")
    run("generate", *options, "--raw", "Once there was")
    assert capsys.readouterr().out == mlx_lm.generate(model, tokenizer, "Once there was", max_tokens=8) + "\n"


def test_a_chat_continues(
    tiny: Path,
    server: RunningServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transcript = tmp_path / "transcript"
    options = ["--model", str(tiny), "--store", server.url, "--max-tokens", "6", "--agent", "chatty"]
    options += ["--transcript", str(transcript), "--system", HANDBOOK[::-1]]
    turns = []
    for typed in ("Hello\n\nAgain\n", "Still there?\n"):
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        run("chat", *options)
        turns += reused(capsys.readouterr().out)
    assert [where.partition(" in ")[0] for _, where in turns] == ["", " from memory", " from the page server"]
    assert turns[0][0] == 0
    assert 630 < turns[1][0] < turns[2][0]
    messages = json.loads(transcript.read_text(encoding="utf-8"))
    assert [message["role"] for message in messages] == ["system", *3 * ["user", "assistant"]]


def test_ctrl_c_ends_an_answer_and_not_the_chat(tiny: Path, tmp_path: Path) -> None:
    transcript = tmp_path / "transcript"
    command = [sys.executable, "-m", "engine.cli", "chat", "--model", str(tiny), "--max-tokens", "5000"]
    command += ["--transcript", str(transcript)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8") as process:
        assert process.stdin
        assert process.stdout
        for said in ("Hello", "Again"):
            process.stdin.write(f"{said}\n")
            process.stdin.flush()
            assert process.stdout.read(20)
            process.send_signal(signal.SIGINT)
            while "[interrupted]" not in (line := process.stdout.readline()):
                assert line
        process.stdin.close()
        assert process.wait(100) == 0
    messages = json.loads(transcript.read_text(encoding="utf-8"))
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert all(message["content"] for message in messages)


def asked(model: Path, *words: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "engine.cli", *words, "--model", str(model), "--max-tokens", "2"]
    return subprocess.run(command, input=typed, capture_output=True, encoding="utf-8", timeout=100)


def changed(model: Path, directory: Path, name: str, content: str) -> Path:
    """A copy of a model's directory, in which one file has other content."""
    shutil.copytree(model, directory)
    (directory / name).write_text(content, encoding="utf-8")
    return directory


REFUSES = "the model's chat template refuses this: "


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 9**(9**9) }}", REFUSES + "it takes more than 1 second"),
        ("{{ raise_exception('no ' ~ messages[0].content) }}", REFUSES + "no Hello"),
        ("{% if %}", REFUSES + "TemplateSyntaxError: "),
        ("{{ a.b.c }}", REFUSES + "UndefinedError: 'a' is undefined"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", REFUSES + "RecursionError: "),
        ("{{ '\\ud800' }}", "'\\ud800' is half of a surrogate pair, which is no text"),
    ],
)
def test_a_failing_template_ends_generate_in_one_line(tiny: Path, tmp_path: Path, template: str, reason: str) -> None:
    done = asked(changed(tiny, tmp_path / "model", "chat_template.jinja", template), "generate", "Hello")
    assert done.returncode == 1
    *steps, last = done.stderr.splitlines()
    assert last.startswith(f"kvpage-engine: {reason}")
    assert all(step.startswith("kvpage-engine: ") for step in steps)
    assert not done.stdout


def test_a_chat_leaves_out_a_line_that_its_template_refuses(tiny: Path, tmp_path: Path) -> None:
    template = (tiny / "chat_template.jinja").read_text(encoding="utf-8")
    refuses = "{% if 'two' in messages[-1].content %}{{ raise_exception('no twos') }}{% endif %}"
    model = changed(tiny, tmp_path / "model", "chat_template.jinja", refuses + template)
    transcript = tmp_path / "transcript"
    done = asked(model, "chat", "--transcript", str(transcript), typed="one\ntwo\nthree\n")
    assert done.returncode == 1
    line = f"kvpage-engine: {REFUSES}no twos; the line is left out"
    assert line in done.stderr.splitlines()
    assert "Traceback" not in done.stderr
    messages = json.loads(transcript.read_text(encoding="utf-8"))
    assert [message["content"] for message in messages[::2]] == ["one", "three"]


def test_a_text_that_the_tokenizer_cannot_encode_is_refused(tiny: Path, tmp_path: Path) -> None:
    """Its regular expression takes too many steps, after which the library panics."""
    tokenizer = json.loads((tiny / "tokenizer.json").read_text(encoding="utf-8"))
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    content = json.dumps(tokenizer | {"pre_tokenizer": pattern})
    model = changed(tiny, tmp_path / "model", "tokenizer.json", content)
    for words in (("generate", 40 * "a" + "!"), ("generate", "--raw", 40 * "a" + "!")):
        done = asked(model, *words)
        assert done.returncode == 1
        last = done.stderr.splitlines()[-1]
        assert last.startswith("kvpage-engine: the tokenizer cannot encode this text: ")
        assert "Traceback" not in done.stderr
    done = asked(model, "chat", typed=f"one\n{40 * 'a'}!\ntwo\n")
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) == 6
    assert "the line is left out" in done.stderr


BROKEN = [
    ("config.json", {"vocab_size": 0}, "cannot be loaded: "),
    ("config.json", {"rope_scaling": 7}, "cannot be loaded: "),
    ("config.json", {"eos_token_id": "x"}, "cannot be loaded: StrictDataclass"),
    (
        "tokenizer.json",
        {"model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}},
        "cannot be loaded: Exception: ",
    ),
    ("tokenizer_config.json", {"tool_parser_type": "x"}, "cannot be loaded: ModuleNotFoundError: "),
]


@pytest.mark.parametrize(("name", "change", "reason"), BROKEN)
def test_a_broken_file_of_a_model_ends_the_start_in_one_line(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, change: Any, reason: str
) -> None:
    found = json.loads((tiny / name).read_text(encoding="utf-8"))
    content = json.dumps(found | change if isinstance(change, dict) else change)
    model = changed(tiny, tmp_path / "model", name, content)
    assert cli.main(["generate", "Hello", "--model", str(model)]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"kvpage-engine: the model in {model} {reason}")


@pytest.mark.parametrize(("content", "reason"), [("[]", "is no JSON object"), ("{", "is no JSON: JSONDecodeError: ")])
def test_a_configuration_is_a_json_object(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, reason: str
) -> None:
    model = changed(tiny, tmp_path / "model", "config.json", content)
    assert cli.main(["generate", "Hello", "--model", str(model)]) == 1
    assert f"kvpage-engine: {model / 'config.json'} {reason}" in capsys.readouterr().err.splitlines()[-1]


def test_the_version_names_the_computing_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    versions = [importlib.metadata.version(name) for name in ("mlx", "mlx-lm")]
    assert capsys.readouterr().out == "kvpage-engine {}, mlx {}, mlx-lm {}\n".format(__version__, *versions)


def test_the_doctor_measures_and_decides(tiny: Path, server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    with server.client() as client:
        before = set(client.scan_iter(count=1000))
        run("doctor", "--model", str(tiny), "--store", server.url, "--tokens", "300")
        output = capsys.readouterr().out
        left = {key for key in client.scan_iter(count=1000) if not key.startswith(b"refs:deleted:measured-")}
        assert left == before, "only the marks of deleted agents are left, for a day"
    for line in (
        r"^model +tiny, 1.0 KiB a token",
        r"^speed +prefill [\d,]+ tokens a second, decode [\d,.]+$",
        r"^store +kvpage-server ",
        r"^link +[\d.]+ ms round trip, .* a second$",
        r"^code +(blocks are 1\.[1-9]\d times shorter .* a second, or sends less than |the lossless code would not)",
        r"^verdict +fetching is (faster than computing here from [\d,]+ tokens? on|never faster than computing here)",
    ):
        assert re.search(line, output, re.MULTILINE), output
    run("doctor", "--model", str(tiny), "--tokens", "64")
    assert "none; --store URL measures one" in capsys.readouterr().out


def test_noise_makes_no_fast_link() -> None:
    """A long context can arrive sooner than a short one, where both take less than the load of the machine."""
    fetching = Fetching.of((16, 0.0040), (64, 0.0039))
    assert 1 / fetching.each < 20 * 64 / 0.0039
    clear = Fetching.of((16, 0.010), (64, 0.022))
    assert (clear.fixed, clear.each) == pytest.approx((0.006, 0.00025))


def test_bench_shows_the_first_token_computed_and_remembered(
    tiny: Path, server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    run("bench", "--model", str(tiny), "--store", server.url, "--tokens", "600")
    output = capsys.readouterr().out
    assert re.search(r"^computed +0 +[\d,]+ ms", output, re.MULTILINE)
    for where in ("from memory", "from the page server"):
        assert re.search(rf"^{where} +599 ", output, re.MULTILINE), output


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["generate", ""], "the prompt is empty"),
        (["generate", "--memory", "5", "Hello"], "take 262,144: --memory must be at least 256kb"),
        (["generate", "a" * 5000], "leaves no room in a context of 4096"),
        (["chat", "--transcript", "/"], "/ is no transcript"),
        (["doctor", "--tokens", "5000"], "leaves no room in a context of 4096"),
        (["doctor", "--tokens", "64", "--store", "redis://127.0.0.1:1"], "no store at redis://127.0.0.1:1"),
        (["bench", "--kv-bits", "8"], "64"),
    ],
)
def test_an_impossible_command_is_reported_in_one_line(
    tiny: Path, words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *rest = words
    assert cli.main([command, "--model", str(tiny), *rest]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("kvpage-engine: ")
    assert complaint in error


def test_a_transcript_with_half_a_surrogate_pair_is_refused(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transcript = tmp_path / "transcript"
    transcript.write_text(r'[{"role": "user", "content": "\ud800"}]', encoding="utf-8")
    assert cli.main(["chat", "--model", str(tiny), "--transcript", str(transcript)]) == 1
    assert f"{transcript} is no transcript: " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["chat", "--agent", "a b"], "an agent id is 1 to 128 of A-Z a-z 0-9 . _ @ + = - and starts with no dot"),
        (["generate", "--agent", "", "Hello"], "an agent id is 1 to 128"),
        (["generate", "--temperature", "-1", "Hello"], "expected a number, 0 or more, got '-1'"),
        (["chat", "--temperature", "nan"], "expected a number, 0 or more, got 'nan'"),
        (["chat", "--top-p", "1.5"], "expected a number, 0 to 1, got '1.5'"),
        (["chat", "--transcript", "no/such/folder/t.json"], "cannot write the transcript: no/such/folder is no"),
        (["chat", "--memory", "0"], "a size is a number of bytes"),
        (["chat", "--cold", "/dev/null"], "is a directory, which is made if it is missing: /dev/null: File exists"),
        (["chat", "--kv-quantised-from", "64"], "without --kv-bits"),
        (["chat", "--cold-code"], "--cold-code needs --cold"),
        (["chat", "--page-code", "always"], "--page-code always needs --store"),
        (["serve", "--max-body", "1000"], "expected at least 1024 bytes, got '1000'"),
        (["serve", "--port", "65536"], "a port is 0 to 65535"),
        (["serve", "--token-file", ""], "argument --token-file: must not be empty"),
        (["serve", "--model", ""], "argument --model: must not be empty"),
        (["serve", "--model", "small=", "--port", "0"], "small= names no directory"),
        (["chat", "--cold", ""], "argument --cold: must not be empty"),
        (["agents", "list", "--url", ""], "argument --url: must not be empty"),
        (["doctor", "--tokens", "1"], "expected a number, 2 or more, got '1'"),
        (["serve", "--port", "0", "--kv-events", ""], "--kv-events: an address is tcp://HOST:PORT"),
        (
            ["serve", "--port", "0", "--kv-events", "tcp://127.0.0.1:99999"],
            "--kv-events: an address is tcp://HOST:PORT",
        ),
        (["chat", "--model", "/nowhere"], "/nowhere is neither a directory nor the id of a model"),
        (["serve", "--store", "http://127.0.0.1:9221"], "a store's URL begins with redis://"),
        (["serve", "--store", "redis://127.0.0.1:99221"], "Port out of range"),
        (["serve", "--store", "redis://a:9221,redis://a:9221"], "redis://a:9221 is named 2 times"),
        (["serve", "--store", "valkey-cluster://a:7000?nodes=3"], "nodes"),
        (["run", "graph", "--instance", "a", "--url", "redis://a:9221,b:9221"], "redis://host:port,redis://host:port"),
    ],
)
def test_an_invalid_argument_is_refused_before_loading_a_model(
    tiny: Path, words: list[str], complaint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> None:
        pytest.fail("a model was loaded")

    monkeypatch.setattr("engine.startup.load", load)
    command, *rest = words
    model = ["--model", str(tiny)] if command != "run" and "--model" not in rest else []
    try:
        assert cli.main([command, *model, *rest]) == 1
    except SystemExit as refused:
        assert refused.code == 2  # noqa: PT017 - argparse has printed the error
    assert complaint in capsys.readouterr().err.splitlines()[-1]


def test_imports_of_mlx_lm_keep_the_limit_of_the_tests() -> None:
    importlib.import_module("mlx_lm.utils")
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == OPEN_FILES


def test_the_limit_of_open_files_is_kept() -> None:
    """mlx_lm would set it, and lower the hard one for good."""
    program = (
        "import resource\nfiles = resource.RLIMIT_NOFILE\nresource.setrlimit(files, (1000, 1001))\n"
        "from engine.platform import import_mlx_lm\nimport_mlx_lm()\nimport engine.startup\n"
        "print(resource.getrlimit(files))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, encoding="utf-8", timeout=60, check=True
    )
    assert done.stdout == "(1000, 1001)\n"
