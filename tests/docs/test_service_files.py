"""The files in conf/ for systemd, launchd, containers and Kubernetes: valid commands, and equal paths in all parts."""

from __future__ import annotations

import json
import plistlib
import re
import shlex
import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from documents import entry_point, run

from kvpage_server.monitor.app import HEALTH

CONF = Path(__file__).parents[2] / "conf"
UNITS = ("kvpage-server.service", "kvpage-engine.service")


def unit_of(name: str) -> dict[str, str]:
    parser = ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(CONF / "systemd" / name, encoding="utf-8")
    return dict(parser["Service"])


def documents(*path: str) -> list[Any]:
    return [*yaml.safe_load_all(CONF.joinpath(*path).read_text(encoding="utf-8"))]


def check_server_command(command: list[str], tmp_path: Path) -> None:
    """Let the server check its options, with a directory of this test in place of theirs."""
    program, *words = command
    assert Path(program).name == "kvpage-server"
    text = re.sub(r"\$[({]\w+[^)}]*[)}]", "a-secret-of-this-test", shlex.join(words))
    options = [word for word in shlex.split(text) if not word.startswith("/") and word != "--dir"]
    tried = [*entry_point("kvpage-server"), "--check-config", str(CONF / "kvpage.conf"), *options]
    assert run([*tried, "--dir", str(tmp_path)]) == "the configuration is valid"


def check_engine_command(command: list[str]) -> None:
    program, action, *words = command
    assert (Path(program).name, action) == ("kvpage-engine", "serve")
    help = run([*entry_point("kvpage-engine"), "serve", "--help"])
    assert all(re.search(rf"^  {word}\b", help, re.MULTILINE) for word in words if word.startswith("--"))


def test_the_unit_of_the_server_is_valid(tmp_path: Path) -> None:
    service = unit_of("kvpage-server.service")
    command = shlex.split(service["ExecStart"])
    assert command[1:] == ["/etc/kvpage/kvpage.conf", "--dir", "/var/lib/" + service["StateDirectory"]]
    check_server_command(command, tmp_path)
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"
    writable = {"/var/lib/" + service["StateDirectory"], "/run/" + service["RuntimeDirectory"]}
    writable |= {"/var/log/" + service["LogsDirectory"], service["ReadWritePaths"]}
    configuration = (CONF / "kvpage.conf").read_text(encoding="utf-8")
    named = re.findall(r"^# ?(?:pidfile|logfile|unixsocket) (/.*)/", configuration, re.MULTILINE)
    assert len(named) >= 3
    assert writable >= {*named, str(Path(command[1]).parent)}


def test_the_unit_of_the_engine_is_valid() -> None:
    check_engine_command(shlex.split(unit_of("kvpage-engine.service")["ExecStart"]))


@pytest.mark.parametrize("name", UNITS)
def test_systemd_accepts_the_units(name: str, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if not analyze:
        pytest.skip("systemd-analyze is missing")
    text = (CONF / "systemd" / name).read_text(encoding="utf-8")
    (program,) = re.findall(r"^ExecStart=(\S+)", text, re.MULTILINE)
    unit = tmp_path / name
    unit.write_text(text.replace(program, f'"{entry_point(Path(program).name)[0]}"'), encoding="utf-8")
    verified = subprocess.run([analyze, "verify", str(unit)], capture_output=True, encoding="utf-8", timeout=60)
    assert name not in verified.stderr


def test_the_launch_daemon_is_valid(tmp_path: Path) -> None:
    job = plistlib.loads((CONF / "launchd" / "kvpage-server.plist").read_bytes())
    check_server_command(job["ProgramArguments"], tmp_path)
    assert job["Umask"] == 0o77


def test_the_images_start_server_and_engine(tmp_path: Path) -> None:
    text = (CONF / "container" / "Containerfile").read_text(encoding="utf-8")
    of_server, of_engine = (json.loads(found) for found in re.findall(r"^CMD (.*)$", text, re.MULTILINE))
    check_server_command(of_server, tmp_path)
    check_engine_command(of_engine)
    for health in re.findall(r"^HEALTHCHECK CMD (.*)$", text, re.MULTILINE):
        program, option, code = json.loads(health)
        assert (program, option) == ("python", "-c")
        assert HEALTH in code
        compile(code, "HEALTHCHECK", "exec")
    assert text.count("USER kvpage\n") == 2, "no image runs its program as root"


def test_the_services_of_compose_are_valid(tmp_path: Path) -> None:
    (found,) = documents("container", "compose.yaml")
    services = found["services"]
    check_server_command(services["store"]["command"], tmp_path)
    for name in ("engine-a", "engine-b"):
        check_engine_command(services[name]["command"])
        assert services[name]["environment"]["KVPAGE_URL"] == "redis://store:9221"
    for name in services["engine-a"]["depends_on"]:
        assert HEALTH in services[name]["healthcheck"]["test"][-1]
    for service in services.values():
        assert {*service.get("secrets", ())} <= found["secrets"].keys()
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), "no port is open to other machines"
        for volume in service.get("volumes", ()):
            where = volume.split(":")[0]
            assert where in found["volumes"] or where.startswith("$") or (CONF / "container" / where).exists()
    (scrapes,) = documents("container", "prometheus.yml")
    targets = [
        target for job in scrapes["scrape_configs"] for each in job["static_configs"] for target in each["targets"]
    ]
    assert {target.split(":")[0] for target in targets} == {"store", "engine-a", "engine-b"}
    files = {job["authorization"]["credentials_file"] for job in scrapes["scrape_configs"]}
    assert files == {f"/run/secrets/{name}" for name in services["prometheus"]["secrets"]}


def test_the_manifests_of_kubernetes_agree(tmp_path: Path) -> None:
    service, stateful = documents("kubernetes", "kvpage-server.yaml")
    (monitor,) = documents("kubernetes", "service-monitor.yaml")
    pod = stateful["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    check_server_command(container["args"], tmp_path)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {port["name"]: port["port"] for port in service["spec"]["ports"]}
    assert container["readinessProbe"]["httpGet"] == {"path": HEALTH, "port": "metrics"}
    for selector in (
        service["spec"]["selector"],
        *(each["spec"]["selector"]["matchLabels"] for each in (stateful, monitor)),
    ):
        assert selector.items() <= pod["metadata"]["labels"].items()
    named = {variable["name"] for variable in container["env"]}
    assert {*re.findall(r"\$\((\w+)\)", " ".join(container["args"]))} == named
    volumes = {each["name"] for each in pod["spec"]["volumes"]}
    volumes |= {each["metadata"]["name"] for each in stateful["spec"]["volumeClaimTemplates"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
