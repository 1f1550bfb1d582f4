"""The lines of docs/frameworks.md connect each framework to the engine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from recorder import Recorder

DOCUMENT = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text(encoding="utf-8")
SECTIONS = {
    "OpenAI's Python client": "openai",
    "OpenAI Agents SDK": "agents",
    "Pydantic AI": "pydantic_ai",
    "LangChain": "langchain_openai",
}


@pytest.mark.model
@pytest.mark.parametrize("section", SECTIONS)
def test_the_lines_print_an_answer(
    url: str, recorder: Recorder, section: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(SECTIONS[section], reason="`make test-frameworks` runs it")
    found = re.search(rf"## {section}\n\n```text\n(.*?)```", DOCUMENT, re.DOTALL)
    assert found
    exec(found[1].replace("http://127.0.0.1:8000/v1", url), {})
    assert capsys.readouterr().out.strip()
    assert len(recorder.requests) == 1
