"""The checks of manifests themselves, on faults that are planted into what is committed."""

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.manifest_checks import Manifests, Object, faults

K8S = Path(__file__).resolve().parents[2] / "deploy/k8s"
GIVEN = {"Secret": ("headway-keys",), "PersistentVolumeClaim": ("runs", "models")}
COMPONENT = "app.kubernetes.io/component"

Plant = Callable[[Manifests], None]


def _load(manifests: Manifests, name: str) -> Object:
    return next(one.object for one in manifests.workloads() if one.object["metadata"]["name"] == f"headway-{name}")


def _pod(manifests: Manifests, name: str) -> Object:
    spec: Object = _load(manifests, name)["spec"]["template"]["spec"]
    return spec


def _one(manifests: Manifests, name: str) -> Object:
    container: Object = _pod(manifests, name)["containers"][0]
    return container


def _object(manifests: Manifests, kind: str, name: str) -> Object:
    found = manifests.find(kind, f"headway-{name}")
    assert found is not None
    return found


def _planted() -> Iterator[tuple[str, Plant]]:
    """Messages of the checks, each with a fault that brings it."""
    yield (
        "does not match its pods' labels",
        lambda m: _load(m, "env-service")["spec"]["selector"]["matchLabels"].update({COMPONENT: "env"}),
    )
    yield (
        "selects the same pods as",
        lambda m: _load(m, "env-service")["spec"].update(selector=_load(m, "reward-service")["spec"]["selector"]),
    )
    yield (
        "spreads other pods",
        lambda m: _pod(m, "generator")["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"].update(
            {COMPONENT: "x"}
        ),
    )
    yield "is no headless Service", lambda m: _load(m, "generator")["spec"].update(serviceName="headway-reward-service")
    yield "publishNotReadyAddresses", lambda m: _object(m, "Service", "learner")["spec"].pop("publishNotReadyAddresses")
    yield "mounts the service account's token", lambda m: _pod(m, "learner").pop("automountServiceAccountToken")
    yield "runs as service account", lambda m: _pod(m, "learner").update(serviceAccountName="default")
    yield "enableServiceLinks", lambda m: _pod(m, "learner").pop("enableServiceLinks")
    yield "may run as root", lambda m: _pod(m, "env-service").pop("securityContext")
    yield "no terminationGracePeriodSeconds", lambda m: _pod(m, "env-service").pop("terminationGracePeriodSeconds")
    yield "no PriorityClass", lambda m: _pod(m, "env-service").update(priorityClassName="urgent")
    yield "has no tag", lambda m: _one(m, "generator").update(image="registry:5000/headway/generator")
    yield "has no tag", lambda m: _one(m, "generator").update(image="headway/generator:latest")
    yield (
        "wants a read-only root",
        lambda m: _one(m, "generator")["securityContext"].update(readOnlyRootFilesystem=False),
    )
    yield "wants a read-only root", lambda m: _one(m, "generator")["securityContext"]["capabilities"].update(drop=[])
    yield "is privileged", lambda m: _one(m, "generator")["securityContext"].update(privileged=True)
    yield "a limit of memory", lambda m: _one(m, "generator")["resources"]["limits"].pop("memory")
    yield (
        "have to be the same",
        lambda m: _one(m, "generator")["resources"]["limits"].update({"nvidia.com/gpu": 2, "x/y": 1}),
    )
    yield "livenessProbe: there is none", lambda m: _one(m, "generator").pop("livenessProbe")
    yield "asks port", lambda m: _one(m, "generator")["readinessProbe"]["httpGet"].update(port=7311)
    yield "is killed for waiting", lambda m: _one(m, "generator")["livenessProbe"]["httpGet"].update(path="/readyz")


def _planted_around_pods() -> Iterator[tuple[str, Plant]]:
    """The same, for what pods use and what finds them."""
    yield "which is no volume", lambda m: _one(m, "generator")["volumeMounts"].append({"name": "x", "mountPath": "/x"})
    yield "is mounted nowhere", lambda m: _pod(m, "generator")["volumes"].append({"name": "x", "emptyDir": {}})
    yield "there is no ConfigMap", lambda m: m.objects.remove(_object(m, "ConfigMap", "run"))
    yield "there is no Secret", lambda m: _pod(m, "generator")["volumes"][1]["secret"].update(secretName="x")
    yield "let the owner alone read", lambda m: _pod(m, "generator")["volumes"][1]["secret"].update(defaultMode=0o644)
    yield "let the owner alone read", lambda m: _pod(m, "generator")["volumes"][1]["secret"].pop("items")
    yield (
        "Service/headway-env-service: finds no pod",
        lambda m: _object(m, "Service", "env-service")["spec"]["selector"].update({COMPONENT: "x"}),
    )
    yield (
        "is no port of",
        lambda m: _object(m, "Service", "env-service")["spec"]["ports"][0].update(targetPort="metrics"),
    )
    yield "99999 is no port", lambda m: _object(m, "Service", "env-service")["spec"]["ports"][0].update(port=99999)
    yield "it maps no port", lambda m: _object(m, "Service", "learner")["spec"]["ports"][0].update(port=80)
    yield (
        "PodDisruptionBudget/headway-generator: finds no pod",
        lambda m: _object(m, "PodDisruptionBudget", "generator")["spec"]["selector"]["matchLabels"].update(
            {COMPONENT: "x"}
        ),
    )
    yield (
        "finds no pod",
        lambda m: _object(m, "NetworkPolicy", "generator")["spec"]["ingress"][0]["from"][0]["podSelector"][
            "matchLabels"
        ].update({COMPONENT: "x"}),
    )
    yield (
        "no pod has port lease",
        lambda m: _object(m, "NetworkPolicy", "learner")["spec"]["ingress"][1]["ports"][0].update(port="lease"),
    )
    yield "is no name", lambda m: _object(m, "Service", "generator")["metadata"].update(name="Generator")
    yield "is there twice", lambda m: m.objects.append(copy.deepcopy(_object(m, "Service", "generator")))
    yield "a Secret is among", lambda m: m.objects.append({"kind": "Secret", "metadata": {"name": "x"}, "data": {}})
    yield (
        "holds a secret",
        lambda m: _object(m, "ConfigMap", "run")["data"].update({"run.toml": '[learner.http]\ntoken = "abc"\n'}),
    )
    yield "is not TOML", lambda m: _object(m, "ConfigMap", "run")["data"].update({"run.toml": "[learner"})
    yield (
        "is in the open",
        lambda m: _one(m, "learner")["env"].append({"name": "HEADWAY_LEARNER__HTTP__TOKEN", "value": "abc"}),
    )


@pytest.mark.parametrize(
    ("said", "plant"),
    [*_planted(), *_planted_around_pods()],
    ids=lambda one: re.sub(r"\W+", "-", one) if isinstance(one, str) else "",
)
def test_a_planted_fault_is_found(said: str, plant: Plant) -> None:
    manifests = _read()
    plant(manifests)
    found = faults(manifests)
    assert any(said in fault for fault in found), found


def _scaling_fault(change: dict[str, Any]) -> list[str]:
    manifests = _read("gpu")
    _object(manifests, "HorizontalPodAutoscaler", "env-service")["spec"].update(change)
    return faults(manifests)


def test_a_planted_fault_in_what_scales_pods_is_found() -> None:
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "headway-environments"}
    assert any("there is no Deployment" in fault for fault in _scaling_fault({"scaleTargetRef": target}))
    assert any("above maxReplicas" in fault for fault in _scaling_fault({"minReplicas": 100}))
    manifests = _read("gpu")
    _load(manifests, "env-service")["spec"]["replicas"] = 3
    assert any("undoes" in fault for fault in faults(manifests))


MONITOR: Object = {
    "kind": "ServiceMonitor",
    "metadata": {"name": "headway-learner"},
    "spec": {
        "jobLabel": COMPONENT,
        "selector": {"matchLabels": {COMPONENT: "learner"}},
        "endpoints": [{"port": "http"}],
    },
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"selector": {"matchLabels": {COMPONENT: "x"}}}, "finds no Service"),
        ({"endpoints": [{"port": "web"}]}, "has port"),
        ({"jobLabel": None}, "no alert knows the job"),
        ({"jobLabel": "app.kubernetes.io/name"}, "no alert knows the job"),
    ],
)
def test_a_planted_fault_in_what_prometheus_looks_for_is_found(change: dict[str, Any], said: str | None) -> None:
    manifests = _read()
    manifests.objects.append({**MONITOR, "spec": {**MONITOR["spec"], **change}})
    found = faults(manifests)
    assert found == [] if said is None else any(said in fault for fault in found)


def _read(name: str = "cpu") -> Manifests:
    text = (K8S / f"{name}.yaml").read_text(encoding="utf-8")
    return Manifests(list(yaml.safe_load_all(text)), given=GIVEN)
