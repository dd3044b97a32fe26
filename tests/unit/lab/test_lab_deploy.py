"""What deploy/ holds starts a lab: its commands parse, what it asks for is there, and nothing runs as root."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.attacks.wire import list_routes

from fulltilt.cli import build_parser
from fulltilt.lab.server.app import build_app

DEPLOY = Path(__file__).parents[3] / "deploy"
UNIT, CONTAINER = DEPLOY / "fulltilt-lab.service", DEPLOY / "Containerfile"


def read_unit() -> configparser.SectionProxy:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str
    unit.read(UNIT)
    return unit["Service"]


def parse(words: list[str]):
    assert Path(words[0]).name == "fulltilt"
    return build_parser(words[1]).parse_args(words[1:])


def test_the_unit_serves_from_its_own_folder_alone_and_trainings_outlive_a_restart():
    service = read_unit()
    args = parse(shlex.split(service["ExecStart"]))
    assert (args.command, args.action, args.host) == ("lab", "serve", "127.0.0.1")
    assert args.lab == service["WorkingDirectory"] == f"/var/lib/{service['StateDirectory']}"
    assert service["Environment"].partition("=")[2].startswith(args.lab)
    assert service["KillMode"] == "process"
    assert service["OOMPolicy"] == "continue"
    assert service["ProtectSystem"] == "strict"
    assert service["NoNewPrivileges"] == "yes"
    assert "PrivateTmp" not in service, "it would go away under the trainings"
    assert "PrivateDevices" not in service, "it would hide GPUs"


def test_systemd_takes_the_unit(tmp_path):
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd is not installed")
    text = re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", UNIT.read_text())
    (tmp_path / UNIT.name).write_text(text)
    done = subprocess.run([program, "verify", tmp_path / UNIT.name], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def read_container() -> dict[str, list[str]]:
    lines = re.sub(r"\\\n\s*", "", CONTAINER.read_text()).splitlines()
    found: dict[str, list[str]] = {}
    for line in (line for line in lines if line and not line.startswith("#")):
        name, _, rest = line.partition(" ")
        found.setdefault(name, []).append(rest)
    return found


def test_the_image_serves_without_devices_as_nobody_special_and_asks_whether_it_is_well():
    found = read_container()
    args = parse([*json.loads(found["ENTRYPOINT"][0]), *json.loads(found["CMD"][0])])
    assert (args.action, args.devices, args.lab, str(args.port)) == (
        "serve",
        "none",
        *found["VOLUME"],
        *found["EXPOSE"],
    )
    assert found["USER"] == ["fulltilt"]
    (path,) = re.findall(r"127\.0\.0\.1:8000(/\w+)", found["HEALTHCHECK"][0])
    assert path in {path for _, path, _ in list_routes(build_app(None, token=""))}  # type: ignore
    assert all((DEPLOY.parent / name).exists() for line in found["COPY"] for name in line.split()[:-1])
