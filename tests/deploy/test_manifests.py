"""The Kubernetes manifests: what is committed is what the chart renders, is valid, and fits together."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from learner.config import LearnerConfig
from services.process import FINISH_S
from tests.deploy.chart import RENDER
from tests.deploy.manifest_checks import Manifests, faults, jobs_of
from tests.deploy.pod_settings import check_settings, run_at

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "deploy/k8s"
VALUES = sorted(path.name for path in (K8S / "values").glob("*.yaml"))
ON_TOP_OF_GPU = {"rdma.yaml", "host-network.yaml", "jobs.yaml", "jobset.yaml"}
CUSTOM = ("ServiceMonitor", "PrometheusRule", "JobSet")
"""Kinds that are not Kubernetes' own, and whose schemas the validator has not."""
GIVEN = {"Secret": ("headway-keys", "headway-tls", "headway-tinker-keys"), "PersistentVolumeClaim": ("runs", "models")}
"""Objects that a person makes before."""
OLDEST, NEWEST = "1.28", "1.37"
VALIDATOR = "kubernetes-validate==1.37.0"


def _read(text: str) -> Manifests:
    return Manifests(list(yaml.safe_load_all(text)), given=GIVEN)


def _files(values: str) -> tuple[str, ...]:
    return ("gpu.yaml", values) if values in ON_TOP_OF_GPU else (values,)


@pytest.fixture(scope="module")
def rendered(helm: Path) -> dict[str, str]:
    """By the set of values."""
    sets = {"": (), **{values: _files(values) for values in VALUES}}
    return {name: RENDER.template(*files) for name, files in sets.items()}


@pytest.fixture(scope="module", params=["cpu", "gpu"])
def committed(request: pytest.FixtureRequest) -> Manifests:
    return _read((K8S / f"{request.param}.yaml").read_text(encoding="utf-8"))


def test_what_is_committed_is_what_the_chart_renders(helm: Path, tmp_path: Path) -> None:
    RENDER.write(tmp_path)
    for name in ("cpu.yaml", "gpu.yaml", "values.yaml", *RENDER.copies()):
        ours = (K8S if name in ("cpu.yaml", "gpu.yaml") else RENDER.CHART) / name
        assert ours.read_text() == (tmp_path / name).read_text(), f"{name} is old: make manifests"
    copied = {f"files/dashboards/{path.name}" for path in (RENDER.CHART / "files/dashboards").iterdir()}
    assert copied | {"files/rules.yml"} == RENDER.copies().keys()


def test_the_chart_has_nothing_for_its_linter_to_say(helm: Path) -> None:
    done = subprocess.run([helm, "lint", "--strict", RENDER.CHART], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_every_documented_set_of_values_renders_without_faults(rendered: dict[str, str]) -> None:
    for name, text in rendered.items():
        assert faults(_read(text)) == [], name


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_the_manifests_are_valid_in_the_oldest_and_the_newest_kubernetes(
    rendered: dict[str, str], tmp_path: Path, version: str
) -> None:
    folder = validator()
    documents = {part for text in rendered.values() for part in text.split("\n---\n") if "kind: " in part}
    known = [part for part in documents if not any(f"kind: {kind}\n" in part for kind in CUSTOM)]
    sets = [yaml.safe_load(part) for part in documents if "\nkind: JobSet\n" in part]
    known += [yaml.safe_dump(job) for one in sets for job in jobs_of(one)]
    (tmp_path / "all.yaml").write_text("\n---\n".join(known))
    (tmp_path / "wrong.yaml").write_text("apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: x, colour: red}\n")
    validate = [sys.executable, "-m", "kubernetes_validate", "--strict", "-k", version]

    done = run_at(tmp_path, [*validate, "all.yaml"], PYTHONPATH=str(folder))
    wrong = run_at(tmp_path, [*validate, "wrong.yaml"], PYTHONPATH=str(folder))

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed") == len(known) > 50
    assert wrong.returncode == 1


def validator() -> Path:
    """The schemas, 110 MB, in the cache that helm is in."""
    folder: Path = RENDER.CACHE / VALIDATOR.replace("==", "-")
    if not folder.exists():
        words = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--target"]
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        try:
            got = subprocess.run([*words, partial, VALIDATOR], capture_output=True, text=True, timeout=200)
        except subprocess.TimeoutExpired:
            pytest.skip(f"needs {VALIDATOR}, which pip did not fetch in time")
        if got.returncode:
            pytest.skip(f"needs {VALIDATOR}, which pip cannot fetch")
        partial.rename(folder)
    return folder


def test_the_committed_manifests_fit_together(committed: Manifests) -> None:
    assert faults(committed) == []


def test_every_process_has_pods_a_service_a_budget_and_a_policy(committed: Manifests) -> None:
    names = {"headway-learner", "headway-generator", "headway-reward-service", "headway-env-service"}
    for kinds in (("StatefulSet", "Deployment"), ("Service",), ("PodDisruptionBudget",), ("NetworkPolicy",)):
        assert names <= {one["metadata"]["name"] for one in committed.of(*kinds)}, kinds


def test_pods_scale_by_metrics_that_their_process_exports(rendered: dict[str, str]) -> None:
    page = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    scaled = {}
    for one in _read(rendered["scaling.yaml"]).of("HorizontalPodAutoscaler"):
        process = one["metadata"]["name"].removeprefix("headway-")
        (metric,) = one["spec"]["metrics"]
        scaled[process] = metric["pods"]["metric"]["name"]
    for process, metric in scaled.items():
        section = page.partition(f"\n## {process}\n")[2].partition("\n## ")[0]
        assert f"| `{metric}` | gauge |" in section, f"{process} has no gauge {metric}"
    assert scaled.keys() == {"generator", "reward-service", "env-service"}


def test_leases_are_for_environments_and_weights_for_generators_alone(committed: Manifests) -> None:
    (policy,) = (one for one in committed.of("NetworkPolicy") if one["metadata"]["name"] == "headway-learner")
    peers: dict[str, list[Any]] = {}
    for rule in policy["spec"]["ingress"]:
        for peer in rule["from"]:
            who = peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
            peers.setdefault(who, []).append([port["port"] for port in rule.get("ports", [])])
    peers.pop("learner-ranks", None)
    # What gloo and NCCL open themselves is of those that the system chooses.
    assert peers == {"generator": [["http", "weights", 32768]], "env-service": [["leases"]]}


def test_the_learner_listens_where_its_pod_its_service_and_its_policy_say(committed: Manifests) -> None:
    """Of every address that its settings fix: HTTP, leases, and the meetings before broadcasts of weights."""
    (load,) = (one for one in committed.workloads() if one.object["metadata"]["name"] == "headway-learner")
    (container,) = load.serving
    given = {env["name"].removeprefix("HEADWAY_LEARNER__"): env.get("value") for env in container["env"]}
    listens = {
        "http": 7300,  # not set by the chart: the default
        "leases": int(given["LEASES__ADDRESS"].rpartition(":")[2]),
        "weights": int(given["WEIGHTS__PORT"]),
    }
    assert "HTTP__PORT" not in given
    assert LearnerConfig(model=Path("model")).http.port == 7300
    assert len(set(listens.values())) == 3

    opened = {port["name"]: port["containerPort"] for port in container["ports"] if port["name"] != "ranks"}
    (service,) = (one for one in committed.of("Service") if one["metadata"]["name"] == "headway-learner")
    reached = {port["targetPort"]: port["port"] for port in service["spec"]["ports"] if port["name"] != "ranks"}
    (policy,) = (one for one in committed.of("NetworkPolicy") if one["metadata"]["name"] == "headway-learner")
    let_in = {port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", [])}
    assert opened == reached == listens
    assert let_in - {32768} == listens.keys()


def test_each_process_gets_its_own_secrets_alone(committed: Manifests) -> None:
    seen = {}
    for load in committed.workloads():
        (volume,) = (one for one in load.spec["volumes"] if one["name"] == "keys")
        seen[load.object["metadata"]["name"]] = {item["path"] for item in volume["secret"]["items"]}
    ranks = seen.pop("headway-learner-ranks", None)
    assert ranks in (None, seen["headway-learner"])
    assert seen == {
        "headway-learner": {"learner.key", "learner.token", "generator.token", "authorized/environments.pub"},
        "headway-generator": {"generator.token", "learner.token"},
        "headway-reward-service": {"reward-service.token"},
        "headway-env-service": {
            "environments.key", "learner.pub", "env-service.token", "generator.token", "reward-service.token",
        },
    }  # fmt: skip


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_the_processes_accept_the_settings_that_their_pods_give_them(name: str, tmp_path: Path) -> None:
    manifests = _read((K8S / f"{name}.yaml").read_text(encoding="utf-8"))
    check = check_settings(manifests, tmp_path, hosts=())
    if name == "gpu":
        mistaken = check(HEADWAY_GENERATOR__ENGINE__MAX_MODEL_LEN="6145", HEADWAY_LEARNER__WEIGHTS__PORT="7300")
        assert mistaken.returncode == 2
        assert "[generator] engine.max_model_len is 6145" in mistaken.stderr
        assert "both listen on port 7300" in mistaken.stderr


def test_the_processes_accept_the_settings_of_pods_with_certificates(rendered: dict[str, str], tmp_path: Path) -> None:
    hosts = ("headway-learner", "headway-reward-service", "*.headway-generator.default.svc")
    check_settings(_read(rendered["tls.yaml"]), tmp_path, hosts=hosts)


def test_the_processes_accept_the_settings_of_a_server_of_the_tinker_api(
    rendered: dict[str, str], tmp_path: Path
) -> None:
    served = ("learner", "generator")
    (tmp_path / "tenants").mkdir()
    (tmp_path / "tenants/tinker-keys.json").write_text('{"keys": []}')
    (tmp_path / "tenants/tinker-keys.json").chmod(0o600)
    check = check_settings(_read(rendered["tinker.yaml"]), tmp_path, hosts=(), processes=served)
    mistaken = check(HEADWAY_LEARNER__TINKER__CONTEXT_TOKENS="129")
    assert mistaken.returncode == 2
    assert "tinker.context_tokens is 129, and [generator] engine.max_model_len is 128" in mistaken.stderr


def test_a_pod_has_more_time_to_end_than_its_process_takes(committed: Manifests) -> None:
    for load in committed.workloads():
        (one,) = load.serving
        drain = [float(env["value"]) for env in one["env"] if env["name"].endswith("__DRAIN_S")]
        assert load.spec["terminationGracePeriodSeconds"] >= sum(drain) + 5 + 8 + 3, load.object["metadata"]["name"]
        if one["name"] == "learner":
            assert load.spec["terminationGracePeriodSeconds"] >= FINISH_S + 8


def test_composes_learner_has_more_time_to_end_than_it_takes() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    assert float(services["learner"]["stop_grace_period"].removesuffix("s")) >= FINISH_S + 8


def test_what_may_be_called_outside_may_be_so_by_every_process_that_calls(helm: Path) -> None:
    """The learner calls teachers, trackers and webhooks, all of them traces."""
    rule = {"to": [{"ipBlock": {"cidr": "192.0.2.0/24"}}], "ports": [{"protocol": "TCP", "port": 443}]}
    manifests = _read(RENDER.template("gpu.yaml", words=("--set-json", f"network.egress=[{json.dumps(rule)}]")))
    free = {one["metadata"]["name"] for one in manifests.of("NetworkPolicy") if rule in one["spec"].get("egress", [])}
    assert free == {f"headway-{name}" for name in ("learner", "generator", "reward-service", "env-service")}
    assert faults(manifests) == []


def test_the_documented_certificates_are_for_the_names_that_prometheus_expects(helm: Path) -> None:
    (hosts,) = re.findall(r"headway keys keys --host ([^`]*)`", (ROOT / "docs/deploy.md").read_text(encoding="utf-8"))
    monitors = _read(RENDER.template("tls.yaml", "monitoring.yaml")).of("ServiceMonitor")
    expected = {end["tlsConfig"]["serverName"] for one in monitors for end in one["spec"]["endpoints"]}
    assert len(expected) == 4
    assert expected <= set(hosts.split())


def test_what_the_demos_pods_train_is_what_compose_trains() -> None:
    """But for addresses and secrets, which are the chart's."""
    import tomllib

    ours = tomllib.loads((K8S / "chart/files/run.toml").read_text(encoding="utf-8"))
    demo = tomllib.loads((ROOT / "examples/addition/run.toml").read_text(encoding="utf-8"))
    assert ours["learner"] == demo["learner"]
    assert ours["generator"] == demo["generator"]
    assert ours["env-service"]["environments"] == demo["env-service"]["environments"]
    assert (K8S / "chart/files/make-model.sh").read_bytes() == (ROOT / "deploy/docker/make-model.sh").read_bytes()
