"""What is deployed agrees with the repository. The image is built where Docker runs; here its parts are checked."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from mia_serve.cli.app import app
from mia_serve.http.config import ServerConfig

ROOT = Path(__file__).parents[2]


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, continued lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    whole = re.sub(r"\\\n", " ", "\n".join(lines))
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in whole.splitlines() if line.strip()]


def sent(path: str) -> bool:
    """Whether .dockerignore lets a path through to the builder: the last pattern that fits it or its folder decides."""
    kept = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.strip().lstrip("!")
        if not pattern or pattern.startswith("#"):
            continue
        folders = [path, *(str(parent) for parent in Path(path).parents)][:-1]
        if any(fnmatch.fnmatch(place, pattern.removeprefix("**/")) for place in folders):
            kept = line.startswith("!")
    return kept


def command_of(words: list[str]) -> Any:
    """The click command that `mia-serve WORDS` runs; its options must exist."""
    command: Any = typer.main.get_command(app)
    while words and hasattr(command, "commands"):
        assert words[0] in command.commands, f"mia-serve has no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    known = {name for parameter in command.params for name in parameter.opts}
    unknown = [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]
    assert not unknown, f"{command.name} has no {unknown}"
    return command


def test_the_dockerfile_copies_what_there_is_and_runs_as_nobody_special() -> None:
    steps = instructions()
    copied = [part for name, rest in steps if name == "COPY" and "--from" not in rest for part in rest.split()[:-1]]
    assert copied and all((ROOT / path).exists() and sent(path) for path in copied)
    for secret in ("data/keys.json", ".git/config", "runs/x", "tests/conftest.py", "mia_serve/__pycache__/a.pyc"):
        assert not sent(secret), f"{secret} would go into the image"
    last = max(i for i, (name, _) in enumerate(steps) if name == "FROM")
    final = dict(steps[last:])
    assert final["USER"] == "10001" and final["VOLUME"] == "/data"
    assert "/health" in final["HEALTHCHECK"] and final["STOPSIGNAL"] == "SIGTERM"
    assert json.loads(final["ENTRYPOINT"]) == ["mia-serve"]
    assert command_of(json.loads(final["CMD"])).name == "serve"
    probe = json.loads(final["HEALTHCHECK"].partition("CMD")[2])
    compile(probe[2], "probe", "exec")
    text = (ROOT / "Dockerfile").read_text()
    assert not re.search(r"(?i)(api_?key|token|password|secret)\s*=", text)


def test_installs_keep_to_the_constraints_and_are_valid_shell() -> None:
    runs = [rest for name, rest in instructions() if name == "RUN"]
    installs = [run for run in runs if "pip install" in run]
    assert len(installs) == 2 and all("--constraint scripts/constraints.txt" in run for run in installs)
    for run in runs:
        assert subprocess.run(["sh", "-n", "-c", run], capture_output=True).returncode == 0, run
    extras = re.search(r"ARG EXTRAS=(\S+)", (ROOT / "Dockerfile").read_text())
    import tomllib

    offered = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras is not None and set(extras[1].split(",")) <= set(offered)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_containers_listen_to_others_only_with_keys(device: str) -> None:
    config = ServerConfig.load(ROOT / f"recipes/serve_container_{device}.yaml")
    assert config.host == "0.0.0.0" and config.keys == Path("/data/keys.json") and not config.open
    assert config.data.is_relative_to("/data") and config.port == 8100
    assert config.e1.device == {"cpu": "cpu", "gpu": "cuda"}[device]


def test_compose_names_what_there_is() -> None:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())
    services = compose["services"]
    assert {name: service["profiles"] for name, service in services.items()} == {
        "mia": ["cpu"], "mia-gpu": ["gpu"], "vllm": ["gpu"],
    }  # fmt: skip
    for name, device in (("mia", "cpu"), ("mia-gpu", "cuda")):
        service = services[name]
        assert service["build"] == {"context": ".", "args": {"DEVICE": device}}
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        assert command_of(service["command"]).name == "serve"
        assert (ROOT / "recipes" / Path(service["command"][1]).name).is_file()
        config = ServerConfig.load(ROOT / "recipes" / Path(service["command"][1]).name)
        assert float(service["stop_grace_period"].rstrip("s")) > config.drain_s
    gpu = ServerConfig.load(ROOT / "recipes/serve_container_gpu.yaml")
    assert gpu.llm is not None and gpu.llm.url == "http://vllm:8000/v1"
    assert f"--served-model-name={gpu.llm.model}" in services["vllm"]["command"]
    used = {volume.partition(":")[0] for service in services.values() for volume in service["volumes"]}
    assert used == set(compose["volumes"])
    for name in ("mia-gpu", "vllm"):
        devices = services[name]["deploy"]["resources"]["reservations"]["devices"]
        assert devices[0]["capabilities"] == ["gpu"]


def test_commands_of_the_guide_exist() -> None:
    text = (ROOT / "docs/deploy.md").read_text()
    lines = [line for line in text.splitlines() if re.match(r"(CUDA\S+ )?mia-serve ", line)]
    assert len(lines) >= 4
    for line in lines:
        words = shlex.split(line, comments=True)
        command_of(words[words.index("mia-serve") + 1 :])
    assert "key add --keys /data/keys.json --name me --role admin" in text
    command_of(shlex.split("key add --keys x --name me --role admin"))
