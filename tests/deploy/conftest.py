"""The container engine and the images that the tests of containers share: built once, taken away at the end."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from env_service.runtimes.engine_limits import limits_fault
from tests.deploy.chart import RENDER
from tests.deploy.containers import (
    FOLDER,
    IMAGES,
    PROCESSES,
    CommandFailed,
    ContainerEngine,
    EngineImpossible,
    check_containers,
    end_engine,
    find_engine,
    pip_configuration,
    run,
    script,
)
from tests.deploy.daemons import CrunPodmanDaemon, Daemon, DockerDaemon, PodmanDaemon, RootlessPodmanDaemon, started
from tests.deploy.on_engines import TriedEngine, info_of, refusal_of, small_image


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContainerEngine]:
    try:
        found = find_engine(tmp_path_factory.mktemp("engine"))
    except EngineImpossible as error:
        pytest.skip(f"no containers here: {error}")
    try:
        yield found
    finally:
        end_engine(found)


@pytest.fixture(scope="session")
def images(engine: ContainerEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The engine's descriptions of the four images, by process."""
    try:
        base = script("base", FOLDER) if engine.ours else _base(engine)
        engine("run", "--rm", "--network", "host", base, "apt-get", "update", "-qq", timeout_s=240)
        check_containers(engine, base)
        secret = tmp_path_factory.mktemp("pip") / "pip.conf"
        secret.write_text(pip_configuration(), encoding="utf-8")
        fetch = ("python3", "-m", "pip", "download", "-q", "--no-deps", "-d", "/tmp/packages", "pyzmq")
        engine("run", "--rm", "--network", "host", "-v", f"{secret}:/etc/pip.conf:ro", base, *fetch, timeout_s=240)
    except (EngineImpossible, CommandFailed) as error:
        pytest.skip(f"images cannot be built here: {error}")
    options = [
        "-q --network host",
        f"--secret id=pip,src={secret}",
        f"--build-arg BASE={base}",
        "--build-arg DEPENDENCIES=mounted",
        "--build-arg BUILD_PACKAGES='gcc g++ libc6-dev python3-dev python3-venv'",
        "--build-arg RUNTIME_PACKAGES='g++ libc6-dev python3-dev libnuma1 libgomp1'",
    ]
    make = ["make", "images", "SBOM=no", f"DOCKER={engine.client}", f"IMAGES={IMAGES}"]
    run([*make, f"IMAGE_OPTIONS={' '.join(options)}"], environment=engine.environment, timeout_s=880)
    try:
        yield {process: engine.json("image", "inspect", f"{IMAGES}/{process}")[0] for process in PROCESSES}
    finally:
        engine("image", "rm", "--force", *engine("images", "--quiet", "--filter", f"reference={IMAGES}/*").split())


def _base(engine: ContainerEngine) -> str:
    """Of an engine that is not ours."""
    for name in ("headway/test-base", "python:3.11-slim"):
        try:
            engine("image", "inspect", name)
        except CommandFailed:
            continue
        return name
    engine("pull", "--quiet", "python:3.11-slim", timeout_s=240)
    return "python:3.11-slim"


@pytest.fixture(scope="session")
def helm() -> Path:
    try:
        path: Path = RENDER.helm()
    except RENDER.NoHelm as error:
        pytest.skip(f"needs helm, which cannot be had: {error}")
    return path


@pytest.fixture(scope="session")
def docker(engine: ContainerEngine) -> TriedEngine:
    address = {**os.environ, **engine.environment}.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if not address.startswith("unix://"):
        pytest.skip(f"the engine is not at a unix socket: {address}")
    try:
        image = script("base", FOLDER) if engine.ours else "headway/test-base"
    except EngineImpossible as error:
        pytest.skip(f"there is no image: {error}")
    return TriedEngine(Path(address.removeprefix("unix://")), image, engine)


@pytest.fixture(scope="session")
def podman(docker: TriedEngine, engine: ContainerEngine) -> Iterator[TriedEngine]:
    with _with_image(PodmanDaemon, docker, engine) as tried:
        yield tried


@pytest.fixture(scope="session")
def podman_crun(docker: TriedEngine, engine: ContainerEngine) -> Iterator[TriedEngine]:
    with _with_image(CrunPodmanDaemon, docker, engine) as tried:
        yield tried


@pytest.fixture(scope="session")
def podman_rootless(docker: TriedEngine, engine: ContainerEngine) -> Iterator[TriedEngine]:
    with _with_image(RootlessPodmanDaemon, docker, engine) as tried:
        # With cgroups of version 2 it has the controllers that were handed on to the user whom the tests make.
        if fault := asyncio.run(refusal_of(tried)):
            pytest.skip(f"not on RootlessPodmanDaemon: {fault}")
        yield tried


@contextmanager
def _with_image(kind: type[Daemon], docker: TriedEngine, engine: ContainerEngine) -> Iterator[TriedEngine]:
    """An engine that has docker's image, too; skips where there is none whose limits hold."""
    try:
        with started(kind) as daemon:
            if fault := limits_fault(info_of(daemon.socket), is_podman=True):
                pytest.skip(f"not on {kind.__name__}: {fault}")
            packed = daemon.folder / "image.tar"
            engine("save", "--output", str(packed), docker.image)
            loaded = daemon("load", "--input", str(packed))
            assert loaded.returncode == 0, loaded
            packed.unlink()
            yield TriedEngine(daemon.socket, docker.image, daemon)
    except EngineImpossible as error:
        pytest.skip(f"no {kind.__name__} here: {error}")


@pytest.fixture(scope="session", params=["docker", "podman", "podman_crun", "podman_rootless"])
def tried(request: pytest.FixtureRequest) -> TriedEngine:
    """Each kind of engine in turn."""
    found = request.getfixturevalue(request.param)
    assert isinstance(found, TriedEngine)
    return found


@pytest.fixture(params=[DockerDaemon, PodmanDaemon, CrunPodmanDaemon])
def mortal(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """An engine of its own, which may die, with the image `small`."""
    try:
        with started(request.param) as daemon:
            imported = daemon("import", "-", "small", stdin=small_image())
            assert imported.returncode == 0, imported
            yield daemon
    except EngineImpossible as error:
        pytest.skip(f"no engine that may die: {error}")
