"""The files of deploy/ and what docs/deployment.md tells of them: the command line takes what they give, and a server
has the routes that they ask."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from graphllm.cli.app import command_line
from graphllm.version import __version__
from tests.server.live import Served

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted(DEPLOY.glob("Dockerfile.*"))


def _parse(words: list[str]) -> dict[str, Any]:
    """The values that the command line makes of `graphllm WORDS`; raises for options and values it does not know."""
    group: Any = command_line()
    command = group.commands[words[0]]
    with command.make_context(words[0], [word for word in words[1:] if not word.startswith("$")]) as context:
        return context.params


def _dockerfile(file: Path) -> list[tuple[str, str]]:
    """Instructions and what they say, in order."""
    text = re.sub(r"\\\n\s*", " ", file.read_text())
    return [tuple(line.split(" ", 1)) for line in text.splitlines() if line and line[0] != "#"]  # type: ignore[misc]


def _unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(DEPLOY / "graphllm.service")
    return parser["Service"]


def _kubernetes() -> dict[str, dict[str, Any]]:
    return {found["kind"]: found for found in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}


def _entrypoint(file: Path) -> list[str]:
    words = json.loads(dict(_dockerfile(file))["ENTRYPOINT"])
    assert words[0] == "graphllm"
    return words[1:]


def _commands_of_the_guide() -> list[list[str]]:
    """What docs/deployment.md gives graphllm: behind an image, and in GRAPHLLM_ARGS."""
    text = (ROOT / "docs/deployment.md").read_text()
    found = [shlex.split(arguments) for arguments in re.findall(r"GRAPHLLM_ARGS=([^']*)'", text)]
    for line in re.findall(r"^docker run .*", text, re.MULTILINE):
        words = shlex.split(line)
        image = next(i for i, word in enumerate(words) if re.fullmatch(rf"graphllm:{__version__}-(cpu|cuda)", word))
        found.append(words[image + 1 :])
    return [words if words[0] == "compile" else ["serve", *words] for words in found]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.suffix[1:])
def test_dockerfile(file: Path) -> None:
    instructions = _dockerfile(file)
    assert [name for name, _ in instructions].count("FROM") == 2, "the image has no more than what runs"
    last = dict(instructions)  # of a name, the last one counts
    assert last["USER"].split(":")[0] not in ("root", "0")
    assert last["VOLUME"] == "/cache"
    assert "GRAPHLLM_CACHE=/cache/" in str([said for name, said in instructions if name == "ENV"])
    for name, said in instructions:
        if name == "COPY" and not said.startswith("--from"):
            assert all((ROOT / source).exists() for source in said.split()[:-1]), said
    given = _parse(_entrypoint(file))
    assert given["host"] == "0.0.0.0"
    assert str(given["port"]) == last["EXPOSE"]
    assert f":{given['port']}/health'" in last["HEALTHCHECK"]


def test_images_differ_in_what_they_must() -> None:
    cpu, cuda = ([line for line in _dockerfile(file) if line[0] not in ("RUN", "ENV")] for file in DOCKERFILES)
    assert cpu == cuda
    copied = {name for what, said in cpu if what == "COPY" and "--from" not in said for name in said.split()[:-1]}
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == kept, "what .dockerignore leaves is what the images copy"
    assert {"setup.py", "pyproject.toml"} <= copied, "both build the package"


def test_images_are_built_for_every_dockerfile() -> None:
    script = DEPLOY / "build_images.sh"
    subprocess.run(["sh", "-n", script], check=True)
    kinds = re.search(r"set -- (.*)$", script.read_text(), re.MULTILINE)
    assert kinds
    assert set(kinds[1].split()) == {file.suffix[1:] for file in DOCKERFILES}
    refused = subprocess.run([script, "tpu"], capture_output=True, text=True)
    assert (refused.returncode, refused.stderr) == (2, "no such image: tpu; there are cpu and cuda\n")


def test_unit() -> None:
    unit = _unit()
    program, *words = shlex.split(unit["ExecStart"])
    assert program == "/opt/graphllm/bin/graphllm"
    given = _parse(words)
    assert given["host"] == "127.0.0.1"
    assert float(unit["TimeoutStopSec"]) > given["shutdown_timeout"] + 5
    assert unit["KillMode"] == "mixed", "SIGTERM for the engine's process too would cut requests off"
    assert unit["DynamicUser"] == unit["NoNewPrivileges"] == "yes"
    assert unit["ProtectSystem"] == "strict"
    for folder in re.findall(r"=%([CS])/(\w+)", unit["Environment"]):
        assert folder[1] == unit[{"C": "CacheDirectory", "S": "StateDirectory"}[folder[0]]]


def test_kubernetes() -> None:
    found = _kubernetes()
    pod = found["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    given = _parse([*_entrypoint(DOCKERFILES[0]), *container["args"]])
    waits = int(container["lifecycle"]["preStop"]["exec"]["command"][1]) + given["shutdown_timeout"]
    assert pod["spec"]["terminationGracePeriodSeconds"] > waits + 5
    assert container["image"] == f"graphllm:{__version__}-cpu"
    assert [port["containerPort"] for port in container["ports"]] == [given["port"]]
    assert pod["metadata"]["labels"] == found["Service"]["spec"]["selector"]
    assert found["Deployment"]["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    assert found["Service"]["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]
    claims = {volume.get("persistentVolumeClaim", {}).get("claimName") for volume in pod["spec"]["volumes"]}
    assert found["PersistentVolumeClaim"]["metadata"]["name"] in claims
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/cache", "/tmp"}
    user = dict(_dockerfile(DOCKERFILES[0]))["USER"]
    assert user == f"{pod['spec']['securityContext']['runAsUser']}:{pod['spec']['securityContext']['runAsGroup']}"


@pytest.mark.parametrize("words", _commands_of_the_guide(), ids=" ".join)
def test_commands_of_the_guide(words: list[str]) -> None:
    assert _parse(words)["model"]


def test_probes_are_routes(served: Served) -> None:
    (container,) = _kubernetes()["Deployment"]["spec"]["template"]["spec"]["containers"]
    paths = [container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")]
    for file in DOCKERFILES:
        paths += re.findall(r":\d+(/[\w/]+)'", dict(_dockerfile(file))["HEALTHCHECK"])
    assert len(paths) == 5
    for path in paths:
        status, body = served.get(path)
        assert (status, json.loads(body)["status"]) == (200, "ready"), path
