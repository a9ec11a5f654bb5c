"""The chart's values: each arrives where it should, and what makes no sense is refused with the reason."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from env_service.runtimes.config import KubernetesConfig, RuntimesConfig
from env_service.runtimes.kubernetes_kind import LABEL, KubernetesKind
from learner.tenants.keys import TenantKeys, new_key
from tests.deploy.chart import RENDER
from tests.deploy.manifest_checks import MADE_BY_ENV_SERVICES, Manifests, Object, PodMaker, faults, jobs_of
from tests.deploy.pod_settings import run_at
from tests.deploy.test_manifests import validator

ROOT = Path(__file__).resolve().parents[2]
COMPONENTS = {
    "learner": "learner", "generator": "generator", "rewardService": "reward-service", "envService": "env-service",
}  # fmt: skip
"""By their keys among the values."""
GIVEN = {
    "Secret": ("headway-keys", "headway-tls", "headway-tinker-keys", "hf"),
    "PersistentVolumeClaim": ("runs", "models"),
    "PriorityClass": ("cluster-high",),
}
DIGEST = f"sha256:{'0123456789abcdef' * 4}"
RULE = {"to": [{"ipBlock": {"cidr": "192.0.2.0/24"}}], "ports": [{"protocol": "TCP", "port": 443}]}
AFFINITY: dict[str, Any] = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
POD = {
    "env": {"HF_ENDPOINT": "https://hub.example", "OMP_NUM_THREADS": 4},
    "envFrom": [{"secretRef": {"name": "trackers"}}],
    "secrets": ["hf"],
    "volumes": [{"name": "scratch", "emptyDir": {}}],
    "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
    "labels": {"team": "rl"},
    "annotations": {"note": "yes"},
    "nodeSelector": {"pool": "a"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "affinity": AFFINITY,
    "schedulerName": "volcano",
    "priorityClassName": "cluster-high",
    "gracePeriodSeconds": 321,
}
"""Values that each of the four takes."""
OF_THE_OPERATOR = {"namespace", "service", "pod", "container", "endpoint", "job", "instance"}
"""Labels that the Prometheus Operator gives the targets of a ServiceMonitor."""


def _rendered(folder: Path, values: object, *files: str) -> Manifests:
    (folder / "values.yaml").write_text(json.dumps(values), encoding="utf-8")
    text = RENDER.template(*files, words=("-f", str(folder / "values.yaml")))
    return Manifests(list(yaml.safe_load_all(text)), given=GIVEN)


def _load(manifests: Manifests, name: str) -> PodMaker:
    (found,) = (one for one in manifests.workloads() if one.labels["app.kubernetes.io/component"] == name)
    return found


def _env(load: PodMaker) -> dict[str, str]:
    return {one["name"]: one.get("value", "") for one in load.serving[0]["env"]}


@pytest.mark.parametrize("key", COMPONENTS)
def test_what_is_said_of_a_processs_pods_arrives_at_them_and_at_no_others(helm: Path, tmp_path: Path, key: str) -> None:
    manifests = _rendered(tmp_path, {key: POD})
    load = _load(manifests, COMPONENTS[key])
    (container,) = load.serving
    env = _env(load)
    assert (env["HF_ENDPOINT"], env["OMP_NUM_THREADS"]) == ("https://hub.example", "4")
    assert container["envFrom"] == POD["envFrom"]
    assert load.labels["team"] == "rl"
    assert load.template["metadata"]["annotations"]["note"] == "yes"
    spec = load.spec
    assert {name: spec[name] for name in ("nodeSelector", "tolerations", "affinity", "schedulerName")} == {
        name: POD[name] for name in ("nodeSelector", "tolerations", "affinity", "schedulerName")
    }
    assert (spec["priorityClassName"], spec["terminationGracePeriodSeconds"]) == ("cluster-high", 321)
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert (mounts["secret-hf"], mounts["scratch"]) == ("/headway/secrets/hf", "/scratch")
    assert {"name": "secret-hf", "secret": {"secretName": "hf", "defaultMode": 0o400}} in spec["volumes"]
    assert {"name": "scratch", "emptyDir": {}} in spec["volumes"]
    assert faults(manifests) == []
    for other in set(COMPONENTS.values()) - {COMPONENTS[key]}:
        assert "cluster-high" not in json.dumps(_load(manifests, other).template)
        assert "scratch" not in json.dumps(_load(manifests, other).template)


@pytest.mark.parametrize("key", COMPONENTS)
def test_egress_of_a_process_is_its_own_alone(helm: Path, tmp_path: Path, key: str) -> None:
    manifests = _rendered(tmp_path, {key: {"egress": [RULE]}})
    free = [one["metadata"]["name"] for one in manifests.of("NetworkPolicy") if RULE in one["spec"].get("egress", [])]
    assert free == [f"headway-{COMPONENTS[key]}"]


def test_an_own_variable_goes_before_the_charts_and_stands_once(helm: Path, tmp_path: Path) -> None:
    load = _load(_rendered(tmp_path, {"learner": {"env": {"HEADWAY_LEARNER__RESUME": "false"}}}), "learner")
    given = [one["value"] for one in load.serving[0]["env"] if one["name"] == "HEADWAY_LEARNER__RESUME"]
    assert given == ["false"]


def test_a_digest_names_the_image_of_its_process_alone(helm: Path, tmp_path: Path) -> None:
    image = {"registry": "registry.example/ours", "digests": {"learner": DIGEST}}
    manifests = _rendered(tmp_path, {"image": image})
    images = {name: {one["image"] for one in _load(manifests, name).containers} for name in COMPONENTS.values()}
    assert images["learner"] == {f"registry.example/ours/headway/learner:0.1.0@{DIGEST}"}
    assert images["generator"] == {"registry.example/ours/headway/generator:0.1.0"}
    assert faults(manifests) == []


def test_without_a_registry_no_node_asks_that_of_others_for_an_image(helm: Path) -> None:
    manifests = Manifests(list(yaml.safe_load_all(RENDER.template())))
    assert {one["image"] for load in manifests.workloads() for one in load.containers} == {
        f"localhost/headway/{name}:0.1.0" for name in COMPONENTS.values()
    }


def test_the_user_is_as_said_and_never_root(helm: Path, tmp_path: Path) -> None:
    own = _rendered(tmp_path, {"user": {"uid": 2000, "gid": 3000, "fsGroup": 4000}})
    left = _rendered(tmp_path, {"user": {"uid": None, "gid": None, "fsGroup": None}})
    for load in own.workloads():
        walls = load.spec["securityContext"]
        assert [walls[name] for name in ("runAsUser", "runAsGroup", "fsGroup")] == [2000, 3000, 4000]
    for load in left.workloads():
        assert load.spec["securityContext"].keys() == {"runAsNonRoot", "seccompProfile"}
        assert load.spec["securityContext"]["runAsNonRoot"] is True


def test_priority_classes_are_there_if_wanted_and_evict_nobody(helm: Path, tmp_path: Path) -> None:
    assert not _rendered(tmp_path, {}).of("PriorityClass")
    manifests = _rendered(tmp_path, {"priority": {"create": True}, "envService": {"priorityClassName": "cluster-high"}})
    assert {one["preemptionPolicy"] for one in manifests.of("PriorityClass")} == {"Never"}
    classes = {
        name: _load(manifests, name).spec["priorityClassName"] for name in ("learner", "generator", "env-service")
    }
    assert classes == {
        "learner": "headway-learner", "generator": "headway-others", "env-service": "cluster-high",
    }  # fmt: skip


def test_with_adapters_for_rdma_nccl_fails_without_them_unless_told_otherwise(helm: Path, tmp_path: Path) -> None:
    for said, expected in (({}, "IB"), ({"nccl": {"NCCL_NET": "Socket"}}, "Socket")):
        manifests = _rendered(tmp_path, {"network": said}, "gpu.yaml", "rdma.yaml")
        for name in ("learner", "learner-ranks", "generator"):
            assert _env(_load(manifests, name))["NCCL_NET"] == expected
        assert "NCCL_NET" not in _env(_load(manifests, "reward-service"))
    assert "NCCL_NET" not in _env(_load(_rendered(tmp_path, {}, "gpu.yaml"), "learner"))


def test_pods_of_one_nodes_claim_are_beside_the_learner(helm: Path, tmp_path: Path) -> None:
    """Kubernetes would else spread them over nodes that cannot mount it."""
    manifests = _rendered(tmp_path, {})
    for name in ("generator", "reward-service", "env-service"):
        (term,) = _load(manifests, name).spec["affinity"]["podAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]
        assert term["topologyKey"] == "kubernetes.io/hostname"
        assert manifests.chosen(term["labelSelector"]) == [_load(manifests, "learner")]
    assert "affinity" not in _load(manifests, "learner").spec
    shared = (
        {"accessModes": ["ReadWriteMany"]},
        {"accessModes": ["ReadWriteOnce", "ReadOnlyMany"]},
        {"existingClaim": "models"},
    )
    for models in shared:
        spread = _rendered(tmp_path, {"storage": {"models": models}})
        assert not [load for load in spread.workloads() if "affinity" in load.spec]


def test_another_word_for_the_keys_starts_all_pods_again(helm: Path, tmp_path: Path) -> None:
    manifests = _rendered(tmp_path, {"keys": {"revision": "2026-11"}})
    said = {load.template["metadata"]["annotations"]["headway/keys-revision"] for load in manifests.workloads()}
    assert said == {"2026-11"}


def test_alerts_and_dashboards_are_those_of_compose(helm: Path) -> None:
    manifests = Manifests(list(yaml.safe_load_all(RENDER.template("monitoring.yaml"))))
    (rule,) = manifests.of("PrometheusRule")
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text(encoding="utf-8"))
    assert rule["spec"] == rules
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    shown: dict[str, str] = {}
    for one in manifests.of("ConfigMap"):
        if one["metadata"]["labels"].get("grafana_dashboard") == "1":
            shown |= one["data"]
    folder = ROOT / "deploy/grafana/dashboards"
    assert shown.keys() == {path.name for path in folder.iterdir()}
    for name, text in shown.items():
        assert json.loads(text) == json.loads((folder / name).read_text(encoding="utf-8"))


def test_no_label_of_a_target_takes_the_name_of_a_metrics_own(helm: Path) -> None:
    """Prometheus would call the metric's own exported_NAME, and what asks by it would get the port's name."""
    page = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    own = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| `headway_\w+` \| \w+ \| (.*?) \|", page, re.MULTILINE))))
    manifests = Manifests(list(yaml.safe_load_all(RENDER.template("monitoring.yaml"))))
    monitors = manifests.of("ServiceMonitor")
    assert len(monitors) == 4
    for monitor in monitors:
        (port,) = monitor["spec"]["endpoints"]
        dropped = {one["regex"] for one in port.get("relabelings", ()) if one["action"] == "labeldrop"}
        assert own & OF_THE_OPERATOR <= dropped


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"monitoring": {"serviceMonitors": True}}, "set network.monitoringNamespace"),
        ({"generator": {"replica": 2}}, "additional properties 'replica' not allowed"),
        ({"image": {"tag": "latest"}}, "/image/tag"),
        ({"image": {"digests": {"learner": "0123"}}}, "/image/digests/learner"),
        ({"image": {"digests": {"trainer": DIGEST}}}, "trainer"),
        ({"image": {"registry": "registry.example/"}}, "/image/registry"),
        ({"envService": {"resources": {"limits": {"memory": "much"}}}}, "/envService/resources/limits/memory"),
        ({"learner": {"env": {"WANDB MODE": "x"}}}, "WANDB MODE"),
        ({"learner": {"env": {"WANDB_API_KEY": "x"}}}, "learner.env: WANDB_API_KEY would be in the open"),
        ({"learner": {"envFrom": [{"secret": "x"}]}}, "additional properties 'secret' not allowed"),
        (
            {"learner": {"labels": {"app.kubernetes.io/component": "x"}}},
            "learner.labels: app.kubernetes.io/component is",
        ),
        ({"learner": {"affinity": {"node": {}}}}, "additional properties 'node' not allowed"),
        ({"learner": {"gracePeriodSeconds": 0}}, "/learner/gracePeriodSeconds"),
        ({"learner": {"secrets": ["My_Secret"]}}, "/learner/secrets/0"),
        ({"user": {"uid": 0}}, "/user/uid"),
        ({"workload": {"as": "job"}}, "'sets', 'jobs', 'jobset'"),
        ({"workload": {"queue": "Training Queue"}}, "/workload/queue"),
        ({"tinker": {"slots": 0}}, "/tinker/slots"),
        ({"learner": {"pods": 2}, "run": {"demo": False}}, "storage.runs.accessModes must have ReadWriteMany"),
        ({"tinker": {"enabled": True}, "learner": {"ranksPerPod": 2}}, "gives a server of the Tinker API one rank"),
        ({"tinker": {"enabled": True}, "workload": {"as": "jobs"}}, "set workload.as=sets"),
        ({"tinker": {"enabled": True}, "generator": {"autoscaling": {"enabled": True}}}, "set generator.replicas"),
        ({"workload": {"as": "jobs"}, "envService": {"autoscaling": {"enabled": True}}}, "set envService.replicas"),
    ],
)
def test_values_that_make_no_sense_are_refused(helm: Path, tmp_path: Path, values: object, said: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        _rendered(tmp_path, values)
    assert said in caught.value.stderr


def test_a_server_of_the_tinker_api_is_a_learner_and_generators_that_know_each_other(helm: Path) -> None:
    manifests = Manifests(list(yaml.safe_load_all(RENDER.template("tinker.yaml"))), given=GIVEN)
    assert {load.labels["app.kubernetes.io/component"] for load in manifests.workloads()} == {"learner", "generator"}
    learner, generator = _load(manifests, "learner"), _load(manifests, "generator")
    generators = json.loads(_env(learner)["HEADWAY_LEARNER__TINKER__GENERATORS"])
    name, replicas = generator.object["spec"]["serviceName"], generator.object["spec"]["replicas"]
    assert generators == [f"http://{name}-{number}.{name}:7310" for number in range(replicas)] != []
    assert _env(generator)["HEADWAY_GENERATOR__ADAPTERS__SOURCE"] == "http://headway-learner:7300"
    assert _env(generator)["HEADWAY_GENERATOR__JOIN__LEARNER"] == "none"

    (tenants,) = (one for one in learner.spec["volumes"] if one["name"] == "tenants")
    assert tenants["secret"]["secretName"] == "headway-tinker-keys"
    assert {"name": "tenants", "mountPath": "/headway/tenants", "readOnly": True} in learner.serving[0]["volumeMounts"]
    state = {one["name"]: one["mountPath"] for one in learner.serving[0]["volumeMounts"]}
    assert state["runs"] == _env(learner)["HEADWAY_RUN__DIRECTORY"], "what it has acknowledged outlives its pod"

    (service,) = (one for one in manifests.of("Service") if one["metadata"]["name"] == "headway-tinker")
    assert manifests.chosen(service["spec"]["selector"]) == [learner]
    assert faults(manifests) == []


@pytest.mark.parametrize("path", ["docs/tinker.md", "deploy/k8s/chart/templates/NOTES.txt"])
def test_the_file_of_keys_that_is_made_as_the_page_and_the_notes_say_is_one(path: str, tmp_path: Path) -> None:
    lines = [line.strip() for line in (ROOT / path).read_text(encoding="utf-8").splitlines()]
    made = [line for line in lines if line.startswith(("key=tml-", 'printf \'{"keys"'))]
    assert len(made) == 2
    text = "\n".join([*made, "printf %s $key"])
    done = subprocess.run(["sh", "-c", text], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    (tmp_path / "tinker-keys.json").chmod(0o600)
    tenant = TenantKeys.read(tmp_path / "tinker-keys.json").tenant(done.stdout)
    assert tenant is not None
    assert tenant.name == "first"
    assert len(done.stdout) == len(new_key())


def test_clients_of_the_tinker_api_may_be_few(helm: Path, tmp_path: Path) -> None:
    peer = {"namespaceSelector": {"matchLabels": {"team": "rl"}}}
    for said, expected in (([], None), ([peer], [peer])):
        manifests = _rendered(tmp_path, {"tinker": {"enabled": True, "from": said}})
        (policy,) = (one for one in manifests.of("NetworkPolicy") if one["metadata"]["name"] == "headway-learner")
        (rule,) = (one for one in policy["spec"]["ingress"] if "podSelector" not in str(one))
        assert (rule.get("from"), rule["ports"]) == (expected, [{"protocol": "TCP", "port": "http"}])


def test_without_a_secret_the_server_makes_a_key_of_its_own(helm: Path, tmp_path: Path) -> None:
    learner = _load(_rendered(tmp_path, {"tinker": {"enabled": True, "keysSecret": ""}}), "learner")
    assert "HEADWAY_LEARNER__TINKER__KEYS_FILE" not in _env(learner)
    assert "tenants" not in [one["name"] for one in learner.spec["volumes"]]


def _commands(jobs: list[Object]) -> dict[str, list[str]]:
    return {
        job["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]: job["spec"]["template"]["spec"][
            "containers"
        ][0]["command"]
        for job in jobs
    }


@pytest.mark.parametrize("file", ["jobs.yaml", "jobset.yaml"])
def test_jobs_end_with_the_run(helm: Path, file: str) -> None:
    manifests = Manifests(list(yaml.safe_load_all(RENDER.template("gpu.yaml", file))), given=GIVEN)
    jobs = [*manifests.of("Job"), *(job for one in manifests.of("JobSet") for job in jobs_of(one))]
    assert not manifests.of("StatefulSet", "Deployment", "HorizontalPodAutoscaler")
    assert {job["spec"]["template"]["spec"]["restartPolicy"] for job in jobs} == {"OnFailure"}
    commands = _commands(jobs)
    assert commands["learner"][1:6] == ["/headway/scripts/to_its_end.py", "--answer", "7300", "--for", "30"]
    assert "to_its_end.py" not in " ".join(commands["learner-ranks"]), "ranks end with rank 0"
    for name in ("generator", "reward-service", "env-service"):
        beside = ["--with", "http://headway-learner:7300", "--patience", "3600", name]
        assert commands[name][1:] == ["/headway/scripts/to_its_end.py", *beside]
        (policy,) = (one for one in manifests.of("NetworkPolicy") if one["metadata"]["name"] == "headway-learner")
        let_in = [rule for rule in policy["spec"]["ingress"] if f"component': '{name}'" in str(rule["from"])]
        assert "'http'" in str([rule["ports"] for rule in let_in]), f"{name} asks the learner"
    assert all("minAvailable" in one["spec"] for one in manifests.of("PodDisruptionBudget"))
    assert faults(manifests) == []


def test_a_job_sets_end_is_the_learners_and_kueue_admits_it_as_a_whole(helm: Path) -> None:
    manifests = Manifests(list(yaml.safe_load_all(RENDER.template("gpu.yaml", "jobset.yaml", "tls.yaml"))))
    (one,) = manifests.of("JobSet")
    assert one["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "training"
    assert one["spec"]["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["learner"]}
    (generator,) = (job for job in jobs_of(one) if job["metadata"]["name"] == "headway-run-generator-0")
    env = {each["name"]: each.get("value") for each in generator["spec"]["template"]["spec"]["containers"][0]["env"]}
    name = f"{generator['metadata']['name']}-$(POD_INDEX)"
    assert env["POD_NAME"] == name, "what JobSet calls its pods"
    subdomain = one["spec"]["network"]["subdomain"]
    assert env["HEADWAY_GENERATOR__JOIN__URL"] == f"https://$(POD_NAME).{subdomain}.$(POD_NAMESPACE).svc:7310"


def test_a_pod_of_further_ranks_knows_its_nodes_rank(helm: Path) -> None:
    """By its shell, with a program in torchrun's place."""
    jobs = Manifests(list(yaml.safe_load_all(RENDER.template("gpu.yaml", "jobs.yaml")))).of("Job")
    shell, c, text, word, *_ = _commands(jobs)["learner-ranks"]
    show: list[Any] = [shell, c, text, word, "sh", "-c", "echo $PET_NODE_RANK"]
    done = subprocess.run(
        show, capture_output=True, text=True, timeout=60, env={"POD_INDEX": "2", "PATH": "/usr/bin:/bin"}
    )
    assert done.stdout == "3\n"


def test_env_services_may_make_pods_without_network_if_runtimes_are_wanted_and_nobody_may_else(
    helm: Path, tmp_path: Path
) -> None:
    found = _rendered(tmp_path, {"runtimes": {"enabled": True}})
    (role,) = found.of("Role")
    assert {rule["resources"][0]: rule["verbs"] for rule in role["rules"]} == {
        "pods": ["create", "get", "list", "delete"], "pods/exec": ["get", "create"]
    }  # fmt: skip
    assert [load.labels["app.kubernetes.io/component"] for load in found.workloads()
            if load.spec["serviceAccountName"] == "headway-runtimes"] == ["env-service"]  # fmt: skip
    (policy,) = (one for one in found.of("NetworkPolicy") if one["metadata"]["name"] == "headway-runtimes")
    assert MADE_BY_ENV_SERVICES == {"matchExpressions": [{"key": LABEL, "operator": "Exists"}]}
    assert policy["spec"] == {
        "podSelector": MADE_BY_ENV_SERVICES,
        "policyTypes": ["Ingress", "Egress"],
    }
    env = _env(_load(found, "env-service"))
    prefix = "HEADWAY_ENV_SERVICE__RUNTIMES__"
    told = {name.removeprefix(prefix): value for name, value in env.items() if name.startswith(prefix)}
    assert told == {
        "KIND": "kubernetes", "KUBERNETES__NAMESPACE": "headway", "KUBERNETES__SERVICE": "$(POD_NAME)",
        "KUBERNETES__OWNER_UID": "$(POD_UID)", "KUBERNETES__SERVICE_ACCOUNT": "headway-pods",
    }  # fmt: skip
    without = _rendered(tmp_path, {})
    assert without.of("Role", "RoleBinding") == []
    assert all(load.spec["serviceAccountName"] == "headway-pods" for load in without.workloads())


def test_a_runtimes_pod_is_valid(tmp_path: Path) -> None:
    settings = KubernetesConfig(service="east-0", owner_uid="1-2-3", runtime_class="gvisor", images={"host": "py:1"})
    pod = KubernetesKind(RuntimesConfig(kind="kubernetes", kubernetes=settings)).pod("headway-1", "host")
    (tmp_path / "pod.yaml").write_text(json.dumps(pod))
    command = [sys.executable, "-m", "kubernetes_validate", "--strict", "-k", "1.37", "pod.yaml"]
    done = run_at(tmp_path, command, PYTHONPATH=str(validator()))
    assert done.returncode == 0, done.stdout + done.stderr
