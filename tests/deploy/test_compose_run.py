"""The addition demo in real containers: what a user gets of `docker compose up`, and of processes that die under it.

One run is trained from start to end, in the order of the tests, and each looks at it or disturbs it. The images are
built as `make images` builds them, but that the learner's and the generator's packages are mounted, not downloaded.
"""

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.containers import (
    IMAGES,
    PROCESSES,
    ROOT,
    CommandFailed,
    ContainerEngine,
    Project,
    free_port,
    git_commit,
    installed_packages,
    run,
    until,
)

pytestmark = [pytest.mark.compose, pytest.mark.timeout(900)]

HEAVY = ("learner", "generator", "model")
STEPS = 200
SMALL_BYTES = 400_000_000
PROCESS_USERS = """
import pathlib

for process in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        print(process.name, (process / "status").read_text().split("Uid:")[1].split()[0], sep=":")
    except (FileNotFoundError, ProcessLookupError):
        pass  # it has ended since
"""


@pytest.fixture(scope="module")
def override(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run, with packages that are mounted."""
    packages = {
        "volumes": [f"{installed_packages()}:/deps:ro"],
        "environment": {"PYTHONPATH": "/deps", "OMP_NUM_THREADS": "2"},
    }
    shares = int(os.environ.get("HEADWAY_TEST_CPU_SHARES", "1024"))
    services: dict[str, Any] = {name: {"cpu_shares": shares} for name in (*PROCESSES, "keys", "model")}
    for name in HEAVY:
        services[name].update(packages)
    services["learner"]["command"] = [
        "--config", "/headway/run.toml", "--steps", str(STEPS), "--training.optimizer.total-updates", str(4 * STEPS),
        "--checkpoint.every-steps", "20", "--evaluation.every-steps", str(STEPS), "--evaluation.final-tasks", "500",
    ]  # fmt: skip
    path = tmp_path_factory.mktemp("compose") / "override.yml"
    path.write_text(yaml.safe_dump({"services": services}), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def project(engine: ContainerEngine, images: dict[str, Any], override: Path, port: int) -> Iterator[Project]:
    """The demo, which has begun to train."""
    made = Project(
        engine=engine,
        name=f"hwcompose-{uuid.uuid4().hex[:8]}",
        files=(ROOT / "docker-compose.yml", override),
        environment={"HEADWAY_IMAGES": IMAGES, "HEADWAY_PORT": str(port)},
    )
    try:
        made("up", "--detach", "--no-build", timeout_s=600)
        yield made
    finally:
        print(made("logs", "--no-color", "--tail", "60"))
        made("down", "--volumes", "--timeout", "10")


def test_the_small_images_are_small_and_every_image_says_what_it_is_of(images: dict[str, Any]) -> None:
    sizes = {process: images[process]["Size"] for process in ("reward-service", "env-service")}
    print(sizes)
    assert all(size < SMALL_BYTES for size in sizes.values()), sizes
    for image in images.values():
        labels = image["Config"]["Labels"]
        assert labels["org.opencontainers.image.revision"] == git_commit()
        assert re.fullmatch(r"\d+\.\d+\.\d+.*", labels["org.opencontainers.image.version"])
        assert image["Config"]["User"] == "10001:10001"


def test_runs_and_models_that_were_made_here_are_in_no_image(engine: ContainerEngine, images: dict[str, Any]) -> None:
    assert (ROOT / "examples/addition/runs").is_dir(), "making the model leaves a run there"
    words = ["find", "/headway/examples", "-name", "runs", "-o", "-name", "models"]
    assert engine("run", "--rm", "--entrypoint", words[0], images["learner"]["Id"], *words[1:]) == ""


def test_what_is_in_an_image_is_listed_for_those_who_audit_it(engine: ContainerEngine, images: dict[str, Any]) -> None:
    make = ["make", "sbom", f"DOCKER={engine.client}", f"IMAGES={IMAGES}"]
    run(make, environment=engine.environment, timeout_s=600)
    listed = json.loads((ROOT / "build/sbom/reward-service.cdx.json").read_text(encoding="utf-8"))
    assert listed["bomFormat"] == "CycloneDX"
    locked = (ROOT / "requirements/cpu.lock").read_text(encoding="utf-8")
    versions = {one["name"].lower(): one["version"] for one in listed["components"]}
    assert f"pydantic=={versions['pydantic']}\n" in locked
    assert {"headway", "fastapi", "reasoning-gym"} <= {name.replace("_", "-") for name in versions}


def test_an_image_for_another_architecture_is_named_before_it_ends_with_an_error_that_does_not(
    engine: ContainerEngine, tmp_path: Path
) -> None:
    """An image's own file says its architecture: an empty image will do."""
    own = engine("version", "--format", "{{.Server.Arch}}").strip()
    other, image = ("arm64" if own == "amd64" else "amd64"), f"{IMAGES}/of-another-architecture"
    # Of an ELF file the machine that it is for: no engine here knows it.
    (tmp_path / "program").write_bytes(b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\0\xff\xfe" + bytes(44))
    (tmp_path / "program").chmod(0o755)
    (tmp_path / "Dockerfile").write_text('FROM scratch\nCOPY program /program\nENTRYPOINT ["/program"]\n')
    built = {**engine.environment, "DOCKER_BUILDKIT": "1"}
    run(
        [engine.client, "build", "-q", "--platform", f"linux/{other}", "-t", image, str(tmp_path)],
        environment=built,
        timeout_s=240,
    )
    try:
        with pytest.raises(CommandFailed, match="exec format error"):
            engine("run", "--rm", "--platform", f"linux/{other}", image)

        check = [sys.executable, "deploy/docker/platforms.py", image]
        done = subprocess.run(
            check, cwd=ROOT, capture_output=True, text=True, timeout=60,
            env={**os.environ, **engine.environment, "DOCKER": engine.client},
        )  # fmt: skip
    finally:
        engine("image", "rm", "--force", image)

    assert done.returncode == 1
    assert done.stdout.startswith(f"{image} is for linux/{other}, and this engine runs linux/{own}: ")


def test_it_trains(project: Project, port: int) -> None:
    _trained_to(port, 5)


def test_no_process_is_root_and_no_root_file_system_can_be_written(project: Project) -> None:
    for process in PROCESSES:
        (container,) = project.containers(process)
        users = _users(project.engine, container["Id"])
        assert users == {"10001"}, (process, users)
        assert container["HostConfig"]["ReadonlyRootfs"], process
        assert container["HostConfig"]["CapDrop"] == ["ALL"], process
        with pytest.raises(CommandFailed, match="Read-only file system"):
            project.engine("exec", container["Id"], "touch", "/opt/venv/written")


def test_no_port_is_open_but_the_learners_pages_on_loopback(project: Project, port: int) -> None:
    bound = {
        (one["HostIp"], one["HostPort"])
        for container in project.containers()
        for ports in (container["NetworkSettings"]["Ports"] or {}).values()
        for one in ports or ()
    }
    assert bound == {("127.0.0.1", str(port))}
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/status", timeout=30)


def test_a_generator_that_is_killed_comes_back_and_training_goes_on(project: Project, port: int) -> None:
    _killed_and_back(project, "generator", port)


def test_a_second_generator_joins_the_run(project: Project, port: int) -> None:
    project("up", "--detach", "--no-build", "--no-recreate", "--scale", "generator=2", timeout_s=300)
    (_, second) = project.containers("generator")
    until(
        lambda: _version_of(project.engine, second["Id"]) > 0 or None,
        timeout_s=800,
        what="the second generator has weights of the run",
    )


def test_a_learner_that_is_killed_comes_back_and_training_goes_on(project: Project, port: int) -> None:
    _killed_and_back(project, "learner", port)


def test_the_reward_rises_to_the_end_of_the_run(project: Project, tmp_path: Path) -> None:
    (learner,) = project.containers("learner")
    assert project.engine("wait", learner["Id"], timeout_s=600).strip() == "0", project("logs", "--tail", "40")
    project("cp", "learner:/headway/runs/addition/metrics.jsonl", str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rewards = {line["step"]: line["reward_mean"] for line in lines if line["kind"] == "step"}
    assert max(rewards) == STEPS
    first = [rewards[step] for step in sorted(rewards)[:20]]
    last = [rewards[step] for step in sorted(rewards)[-20:]]
    print(f"mean reward of the first 20 steps {sum(first) / 20:.3f}, of the last 20 {sum(last) / 20:.3f}")
    assert sum(last) > 1.1 * sum(first)
    project("cp", "learner:/headway/runs/addition/model", str(tmp_path))
    assert (tmp_path / "model" / "model.safetensors").stat().st_size > 1_000_000


def test_when_the_run_is_over_everybody_ends_with_0(project: Project) -> None:
    (learner,) = project.containers("learner")
    assert project.engine("wait", learner["Id"], timeout_s=600).strip() == "0"

    def ended(process: str) -> list[int] | None:
        states = [one["State"] for one in project.containers(process)]
        return None if any(state["Running"] for state in states) else [state["ExitCode"] for state in states]

    for process in PROCESSES:
        codes = until(lambda: ended(process), timeout_s=120, what=f"the end of {process}")  # noqa: B023 - called at once
        assert set(codes) == {0}, project("logs", "--tail", "20", process)


def test_down_leaves_nothing_behind(project: Project) -> None:
    label = f"com.docker.compose.project={project.name}"
    assert all(project.engine.names(kind, label=label) for kind in ("container", "volume", "network"))

    project("down", "--volumes", "--timeout", "10", timeout_s=120)

    left = {kind: project.engine.names(kind, label=label) for kind in ("container", "volume", "network")}
    assert left == {"container": [], "volume": [], "network": []}


def _killed_and_back(project: Project, process: str, port: int) -> None:
    """Kills the main process as the kernel would, which a restart policy answers, as it does not answer a stop."""
    (before,) = project.containers(process)
    step = _step(port)
    words = [
        "--cap-drop",
        "ALL",
        "--cap-add",
        "KILL",
        "--pid",
        "host",
        "--user",
        "0",
        "--network",
        "none",
        "--entrypoint",
        "python3",
    ]
    kill = f"import os; os.kill({before['State']['Pid']}, 9)"
    project.engine("run", "--rm", *words, f"{IMAGES}/env-service", "-c", kill)

    def back() -> bool | None:
        (now,) = project.containers(process)
        return True if now["RestartCount"] > before["RestartCount"] and now["State"]["Running"] else None

    until(back, timeout_s=120, what=f"the {process} is started again")
    _trained_to(port, (step or 0) + 5)


def _trained_to(port: int, least: int) -> int:
    def there() -> int | None:
        step = _step(port)
        return step if step is not None and step >= least else None

    return until(there, timeout_s=400, what=f"step {least}")


def _step(port: int) -> int | None:
    """The newest step, by the learner's metrics; none if it does not answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    except OSError:
        return None
    found = re.search(r"^headway_learner_policy_version (\S+)$", text, re.MULTILINE)
    return None if found is None else int(float(found[1]))


def _users(engine: ContainerEngine, container: str) -> set[str]:
    """The users of the processes that stand in a container.

    For some milliseconds an engine lets a health check in as root, before it becomes the container's user: a process
    that a second look no longer finds as it was is not counted.
    """
    first, second = (set(engine("exec", container, "python3", "-c", PROCESS_USERS).split()) for _ in range(2))
    return {one.partition(":")[2] for one in first & second}


def _version_of(engine: ContainerEngine, container: str) -> int:
    """The version that a generator serves, by its metrics; -1 if it does not answer yet."""
    look = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:7310/metrics').read().decode())"
    try:
        text = engine("exec", container, "python3", "-c", look)
    except CommandFailed:
        return -1
    found = re.search(r"^headway_generator_policy_version (\S+)$", text, re.MULTILINE)
    return -1 if found is None else int(float(found[1]))
