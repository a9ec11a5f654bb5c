"""The committed manifests really run: a training run in pods, to its end, with two processes killed on the way.

On the engine and with the images of the other tests of containers. As root, who alone gives files to the pods' users.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.chart import RENDER
from tests.deploy.containers import IMAGES, ContainerEngine
from tests.deploy.hosts import MODEL
from tests.deploy.manifest_checks import Manifests
from tests.deploy.pods import PodCluster, docker
from tests.e2e.run_files import RunFolder

ROOT = Path(__file__).resolve().parents[2]
STEPS = 40

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def pod_images(engine: ContainerEngine, images: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Local images that stand for those of the manifests."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to give files to the pods' users")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in engine.environment.items():
            patch.setenv(name, value)
        yield {f"localhost/headway/{name}:0.1.0": f"{IMAGES}/{name}" for name in images}


@pytest.mark.compose
def test_a_run_in_pods_goes_to_its_end_through_the_deaths_of_generator_and_learner(
    pod_images: dict[str, str], tmp_path: Path
) -> None:
    """The committed manifests, as they are applied."""
    cluster = _cluster((ROOT / "deploy/k8s/cpu.yaml").read_text(encoding="utf-8"), pod_images, tmp_path)
    run = RunFolder(tmp_path / "claims/headway-runs/addition")
    with cluster:
        learner, generator = cluster.pod("headway-learner-0"), cluster.pod("headway-generator-0")
        _until(cluster, lambda: len(run.steps()) >= 5, "step 5")
        generator.kill("generator")
        _until(cluster, lambda: generator.running["generator"].restarts == 1, "another start of the generator")
        _until(cluster, lambda: len(run.steps()) >= 20, "step 20")
        learner.kill("learner")
        _until(cluster, lambda: learner.running["learner"].restarts == 1, "another start of the learner")
        _goes_to_its_end(cluster, run)
    assert _restarts(cluster) == {
        "headway-learner-0": 1, "headway-generator-0": 1, "headway-reward-service-0": 0, "headway-env-service-0": 0,
    }, cluster.events  # fmt: skip


@pytest.mark.machines
def test_a_learner_of_two_pods_goes_on_with_certificates_when_one_of_them_has_died(
    pod_images: dict[str, str], helm: Path, tmp_path: Path
) -> None:
    """Rendered with `values/tls.yaml`; the ranks meet by torchrun, and end together."""
    shared = ",".join(f"storage.{name}.accessModes={{ReadWriteMany}}" for name in ("runs", "models"))
    values = f"learner.pods=2,run.demo=false,{shared}"
    cluster = _cluster(RENDER.template("tls.yaml", words=("--set", values)), pod_images, tmp_path)
    run = RunFolder(tmp_path / "claims/headway-runs/addition")
    with cluster:
        first, second = cluster.pod("headway-learner-0"), cluster.pod("headway-learner-ranks-1")
        _until(cluster, lambda: len(run.steps()) >= 5, "step 5")
        second.kill("learner")
        _until(cluster, lambda: second.running["learner"].restarts >= 1, "another start of the pod that died")
        _until(cluster, lambda: first.running["learner"].restarts >= 1, "another start of the one that lost it")
        _goes_to_its_end(cluster, run)
    others = {name: times for name, times in _restarts(cluster).items() if "learner" not in name}
    assert set(others.values()) == {0}, cluster.events


def _goes_to_its_end(cluster: PodCluster, run: RunFolder) -> None:
    learner = cluster.pod("headway-learner-0")
    _until(cluster, lambda: "the run is over" in learner.log("learner"), "the end of the run")
    _until(cluster, lambda: not learner.running["learner"].ready, "an end that is said")
    assert run.steps()[-1] == STEPS
    assert run.summary()["steps"] == STEPS
    assert (run.path / "model/model.safetensors").exists()


def _restarts(cluster: PodCluster) -> dict[str, int]:
    return {pod.name: one.restarts for pod in cluster.pods for one in pod.running.values()}


def _cluster(text: str, images: dict[str, str], folder: Path) -> PodCluster:
    """Manifests with fewer steps, with the Secrets that a person makes; the model is in its claim already."""
    model = folder / "claims/headway-models/addition"
    shutil.copytree(MODEL, model)
    for path in (model, *model.iterdir()):
        os.chown(path, 0, 10001)
        path.chmod(0o775 if path.is_dir() else 0o664)
    return PodCluster(
        _shortened(Manifests(list(yaml.safe_load_all(text)))),
        folder=folder,
        name=f"hwpods-{uuid.uuid4().hex[:6]}",
        secrets=_secrets(folder),
        images=images,
        on_top={
            f"localhost/headway/{name}:0.1.0": _dependencies(f"{IMAGES}/{name}") for name in ("learner", "generator")
        },
    )


def _shortened(manifests: Manifests) -> Manifests:
    run_file = manifests.find("ConfigMap", "headway-run")
    assert run_file is not None
    text = run_file["data"]["run.toml"].replace("steps = 500", f"steps = {STEPS}", 1)
    for many, few in (("final_tasks = 2000", "final_tasks = 0"), ("tasks = 200", "tasks = 0")):
        assert many in text
        text = text.replace(many, few)
    run_file["data"]["run.toml"] = f"{text}\n[learner.checkpoint]\nevery_steps = 5\n"
    return manifests


def _secrets(folder: Path) -> dict[str, dict[str, bytes]]:
    """Keys, tokens and certificates, made as the chart's notes say."""
    headway = str(Path(sys.executable).with_name("headway"))
    hosts = ["headway-learner", "headway-reward-service", "headway-env-service", "*.headway-generator.default.svc"]
    words = [headway, "keys", "keys", "--env-service", "environments", "--host", *hosts]
    subprocess.run(words, cwd=folder, check=True, capture_output=True, timeout=120)
    keys = {path.name: path.read_bytes() for path in (folder / "keys").iterdir() if path.is_file()}
    keys["authorized-environments.pub"] = (folder / "keys/authorized/environments.pub").read_bytes()
    certificates = {path.name: path.read_bytes() for path in (folder / "keys/tls").iterdir()}
    return {"headway-keys": keys, "headway-tls": certificates}


def _dependencies(image: str) -> list[str]:
    """Mounts of this installation's packages, for an image that was built without torch and vLLM."""
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is not None)"
    run = ["run", "--rm", "--no-healthcheck", "--entrypoint", "sh", image]
    if docker(*run, "-c", f'python3 -c "{look}" && echo without') != "without":
        return []
    packages = sysconfig.get_paths()["purelib"]
    return [f"--mount=type=bind,src={packages},dst=/deps,readonly", "-e", "PYTHONPATH=/deps", "-e", "OMP_NUM_THREADS=1"]


def _until(cluster: PodCluster, condition: Callable[[], bool], what: str, *, timeout_s: float = 400) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}: {cluster.events}"
        cluster.tick()
        time.sleep(0.5)
