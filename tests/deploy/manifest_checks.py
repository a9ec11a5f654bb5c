"""Checks of rendered manifests beyond the schemas of Kubernetes: the objects fit together, and are safe."""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]

PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
_WORKLOADS = ("Pod", "Job", "Deployment", "StatefulSet", "DaemonSet")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_TAGGED = re.compile(r".+(:(?!latest$)[A-Za-z0-9_][\w.-]{0,127}|@sha256:[0-9a-f]{64})")
_SECRET = re.compile(r'(?mi)^\s*\w*(token|password|secret|api_key)\s*=\s*"[^"]+"|BEGIN [A-Z ]*PRIVATE KEY')
_SECRET_NAME = re.compile(r"(TOKEN|PASSWORD|SECRET|API_KEY)$")
_FOUR_WALLS = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True}
MADE_BY_ENV_SERVICES = {"matchExpressions": [{"key": "headway.dev/runtime-of", "operator": "Exists"}]}
"""Selector of pods that no manifest has."""

_JOBS = ("learner", "generator", "reward-service", "env-service")
"""Names of the jobs in deploy/prometheus/rules.yml."""


@dataclass(frozen=True)
class PodMaker:
    """An object that makes pods, and the pods that it makes."""

    object: Object
    template: Object

    @property
    def spec(self) -> Object:
        spec: Object = self.template["spec"]
        return spec

    @property
    def labels(self) -> Object:
        labels: Object = self.template.get("metadata", {}).get("labels", {})
        return labels

    @property
    def serving(self) -> list[Object]:
        """The containers that are to run on."""
        containers: list[Object] = self.spec["containers"]
        return containers

    @property
    def containers(self) -> list[Object]:
        return [*self.spec.get("initContainers", []), *self.serving]


class Manifests:
    """Rendered objects. `given` names what somebody else makes, by kind: Secrets, claims."""

    def __init__(self, objects: Sequence[Object], *, given: Mapping[str, Sequence[str]] | None = None) -> None:
        self.objects = [one for one in objects if one]
        self.given = given or {}

    def of(self, *kinds: str) -> list[Object]:
        return [one for one in self.objects if one["kind"] in kinds]

    def workloads(self) -> list[PodMaker]:
        makers = [*self.of(*_WORKLOADS), *(job for one in self.of("JobSet") for job in jobs_of(one))]
        return [PodMaker(one, one if one["kind"] == "Pod" else one["spec"]["template"]) for one in makers]

    def has(self, kind: str, name: str) -> bool:
        return name in self.given.get(kind, ()) or any(one["metadata"]["name"] == name for one in self.of(kind))

    def find(self, kind: str, name: str) -> Object | None:
        return next((one for one in self.of(kind) if one["metadata"]["name"] == name), None)

    def chosen(self, selector: Mapping[str, Any] | None) -> list[PodMaker]:
        """Workloads whose pods a selector finds; one that selects all finds none here, as nobody here means that."""
        wanted = (selector or {}).get("matchLabels", selector) or {}
        return [one for one in self.workloads() if wanted and wanted.items() <= one.labels.items()]


def jobs_of(job_set: Object) -> list[Object]:
    """The Jobs that a JobSet makes: the first of each kind."""
    return [
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {**one["template"]["metadata"], "name": f"{job_set['metadata']['name']}-{one['name']}-0"},
            "spec": one["template"]["spec"],
        }
        for one in job_set["spec"]["replicatedJobs"]
    ]


def faults(manifests: Manifests) -> list[str]:
    """A line for each fault."""
    checks = (
        _names,
        _selectors,
        _pods,
        _containers,
        _probes,
        _volumes,
        _services,
        _budgets,
        _scaling,
        _monitors,
        _open,
        _texts,
    )
    return [fault for check in checks for fault in check(manifests)]


def _name(one: Object) -> str:
    return f"{one['kind']}/{one['metadata']['name']}"


def _names(manifests: Manifests) -> Iterator[str]:
    seen = set()
    for one in manifests.objects:
        if not _NAME.fullmatch(one["metadata"]["name"]):
            yield f"{_name(one)}: is no name for an object"
        if _name(one) in seen:
            yield f"{_name(one)}: is there twice"
        seen.add(_name(one))


def _selectors(manifests: Manifests) -> Iterator[str]:
    claimed: dict[tuple[tuple[str, str], ...], str] = {}
    for load in manifests.workloads():
        selector = load.object["spec"].get("selector")
        if selector is not None:
            wanted = selector["matchLabels"]
            if not wanted.items() <= load.labels.items():
                yield f"{_name(load.object)}: its selector {wanted} does not match its pods' labels {load.labels}"
            other = claimed.setdefault(tuple(sorted(wanted.items())), _name(load.object))
            if other != _name(load.object):
                yield f"{_name(load.object)}: selects the same pods as {other}"
        for spread in load.spec.get("topologySpreadConstraints", []):
            if not spread["labelSelector"]["matchLabels"].items() <= load.labels.items():
                yield f"{_name(load.object)}: spreads other pods than its own"
        if load.object["kind"] == "StatefulSet":
            yield from _headless(load, manifests)


def _headless(load: PodMaker, manifests: Manifests) -> Iterator[str]:
    name = load.object["spec"]["serviceName"]
    service = manifests.find("Service", name)
    if service is None or service["spec"].get("clusterIP") != "None":
        yield f"{_name(load.object)}: {name} is no headless Service"
    elif load not in manifests.chosen(service["spec"]["selector"]):
        yield f"{_name(load.object)}: its Service {name} finds other pods"
    elif not service["spec"].get("publishNotReadyAddresses"):
        yield f"Service/{name}: hides pods that wait for those that look for them: publishNotReadyAddresses"


def _pods(manifests: Manifests) -> Iterator[str]:
    for load in manifests.workloads():
        where, spec = _name(load.object), load.spec
        if spec.get("automountServiceAccountToken") is not False:
            yield f"{where}: mounts the service account's token"
        account = spec.get("serviceAccountName", "default")
        if account == "default" or not manifests.has("ServiceAccount", account):
            yield f"{where}: runs as service account {account}"
        if spec.get("enableServiceLinks") is not False:
            yield f"{where}: variables of Services may be taken for settings: enableServiceLinks"
        if not spec.get("securityContext", {}).get("runAsNonRoot"):
            yield f"{where}: may run as root"
        if "terminationGracePeriodSeconds" not in spec:
            yield f"{where}: no terminationGracePeriodSeconds"
        priority = spec.get("priorityClassName")
        if priority is not None and not manifests.has("PriorityClass", priority):
            yield f"{where}: no PriorityClass {priority}"


def _containers(manifests: Manifests) -> Iterator[str]:
    for load in manifests.workloads():
        for one in load.containers:
            where = f"{_name(load.object)}: {one['name']}"
            if not _TAGGED.fullmatch(one["image"].rpartition("/")[2]):
                yield f"{where}: image {one['image']} has no tag"
            walls = one.get("securityContext", {})
            if not _FOUR_WALLS.items() <= walls.items() or walls.get("capabilities", {}).get("drop") != ["ALL"]:
                yield f"{where}: wants a read-only root, no more privileges, and no capabilities"
            if walls.get("privileged"):
                yield f"{where}: is privileged"
            yield from _amounts(where, one.get("resources", {}))


def _amounts(where: str, resources: Object) -> Iterator[str]:
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    if "memory" not in limits or not {"cpu", "memory"} <= requests.keys():
        yield f"{where}: wants requests of cpu and memory, and a limit of memory"
    for device in (limits.keys() | requests.keys()) - {"cpu", "memory", "ephemeral-storage"}:
        if requests.get(device) != limits.get(device):
            yield f"{where}: {device}: request and limit have to be the same"


def _ports(container: Object) -> dict[object, int]:
    """By number and by name."""
    ports = container.get("ports", [])
    return {key: port["containerPort"] for port in ports for key in (port["containerPort"], port.get("name"))}


def _probes(manifests: Manifests) -> Iterator[str]:
    for load in manifests.workloads():
        if load.object["kind"] == "Job":
            continue
        for one in load.serving:
            for which in PROBES:
                where = f"{_name(load.object)}: {one['name']}: {which}"
                if which not in one:
                    yield f"{where}: there is none"
                    continue
                asked = one[which].get("httpGet") or one[which].get("tcpSocket")
                if asked and asked["port"] not in _ports(one):
                    yield f"{where}: asks port {asked['port']}, which is none of {sorted(map(str, _ports(one)))}"
            if {**one.get("livenessProbe", {})}.get("httpGet", {}).get("path") == "/readyz":
                yield f"{_name(load.object)}: {one['name']}: is killed for waiting: livenessProbe asks /readyz"


def _volumes(manifests: Manifests) -> Iterator[str]:
    for load in manifests.workloads():
        where = _name(load.object)
        there = {one["name"] for one in load.spec.get("volumes", [])}
        there |= {one["metadata"]["name"] for one in load.object["spec"].get("volumeClaimTemplates", [])}
        used = set()
        for one in load.containers:
            mounts = one.get("volumeMounts", [])
            used |= {mount["name"] for mount in mounts}
            yield from (f"{where}: {one['name']}: mounts {mount['name']}, which is no volume" for mount in mounts
                        if mount["name"] not in there)  # fmt: skip
        yield from (f"{where}: volume {name} is mounted nowhere" for name in sorted(there - used))
        for volume in load.spec.get("volumes", []):
            yield from _sources(where, volume, manifests)


def _sources(where: str, volume: Object, manifests: Manifests) -> Iterator[str]:
    named = {
        "ConfigMap": volume.get("configMap", {}).get("name"),
        "Secret": volume.get("secret", {}).get("secretName"),
        "PersistentVolumeClaim": volume.get("persistentVolumeClaim", {}).get("claimName"),
    }
    for kind, name in named.items():
        if name is not None and not manifests.has(kind, name):
            yield f"{where}: volume {volume['name']}: there is no {kind} {name}"
    secret = volume.get("secret")
    is_whole = volume["name"].startswith("secret-")  # of the user's values, who means all that is in it
    if secret is not None and (secret.get("defaultMode", 0o644) & 0o077 or not (secret.get("items") or is_whole)):
        yield f"{where}: volume {volume['name']}: name its keys, and let the owner alone read them (defaultMode: 0400)"


def _services(manifests: Manifests) -> Iterator[str]:
    for service in manifests.of("Service"):
        found = manifests.chosen(service["spec"].get("selector"))
        if not found:
            yield f"{_name(service)}: finds no pod"
        for port in service["spec"]["ports"]:
            target = port.get("targetPort", port["port"])
            for number in (port["port"], target):
                if isinstance(number, int) and not 0 < number < 65536:
                    yield f"{_name(service)}: {number} is no port"
            for load in found:
                ports = {key: value for one in load.serving for key, value in _ports(one).items()}
                if target not in ports:
                    yield f"{_name(service)}: {target} is no port of {_name(load.object)}"
                elif service["spec"].get("clusterIP") == "None" and ports[target] != port["port"]:
                    yield f"{_name(service)}: without an address of its own it maps no port: {port['port']}, {target}"


def _budgets(manifests: Manifests) -> Iterator[str]:
    for one in manifests.of("PodDisruptionBudget"):
        if not manifests.chosen(one["spec"].get("selector")):
            yield f"{_name(one)}: finds no pod"
    for one in manifests.of("NetworkPolicy"):
        yield from _policy(one, manifests)


def _policy(policy: Object, manifests: Manifests) -> Iterator[str]:
    spec = policy["spec"]
    own = manifests.chosen(spec["podSelector"])
    if not own and spec["podSelector"] != MADE_BY_ENV_SERVICES:
        yield f"{_name(policy)}: finds no pod"
    for direction, far in (("ingress", "from"), ("egress", "to")):
        for rule in spec.get(direction) or []:
            peers = [peer for peer in rule.get(far, []) if "namespaceSelector" not in peer and "podSelector" in peer]
            others = [load for peer in peers for load in manifests.chosen(peer["podSelector"])]
            yield from (f"{_name(policy)}: {direction}: {peer['podSelector']} finds no pod" for peer in peers
                        if not manifests.chosen(peer["podSelector"]))  # fmt: skip
            listening = own if direction == "ingress" else others
            ports = {key for load in listening for one in load.serving for key in _ports(one)}
            for port in rule.get("ports", []):
                chosen = "endPort" in port  # by the system, and so in no pod's list
                if port["port"] != 53 and not chosen and listening and port["port"] not in ports:
                    yield f"{_name(policy)}: {direction}: no pod has port {port['port']}"


def _scaling(manifests: Manifests) -> Iterator[str]:
    for one in manifests.of("HorizontalPodAutoscaler"):
        target = one["spec"]["scaleTargetRef"]
        found = manifests.find(target["kind"], target["name"])
        if found is None:
            yield f"{_name(one)}: there is no {target['kind']} {target['name']}"
        elif "replicas" in found["spec"]:
            yield f"{_name(found)}: sets replicas, so every apply undoes what {_name(one)} did"
        if one["spec"]["minReplicas"] > one["spec"]["maxReplicas"]:
            yield f"{_name(one)}: minReplicas is above maxReplicas"


def _monitors(manifests: Manifests) -> Iterator[str]:
    for one in manifests.of("ServiceMonitor"):
        wanted = one["spec"]["selector"]["matchLabels"]
        found = [s for s in manifests.of("Service") if wanted.items() <= s["metadata"].get("labels", {}).items()]
        if not found:
            yield f"{_name(one)}: finds no Service"
        label = one["spec"].get("jobLabel")
        yield from (f"{_name(one)}: no alert knows the job of {_name(service)}, by label {label}" for service in found
                    if service["metadata"]["labels"].get(label) not in _JOBS)  # fmt: skip
        names = {port.get("name") for service in found for port in service["spec"]["ports"]}
        yield from (f"{_name(one)}: no Service has port {end['port']}" for end in one["spec"]["endpoints"]
                    if found and end["port"] not in names)  # fmt: skip


def _open(manifests: Manifests) -> Iterator[str]:
    """Secrets where everybody reads them."""
    if manifests.of("Secret"):
        yield "a Secret is among the manifests: everybody who can read them knows it"
    for load in manifests.workloads():
        for one in load.containers:
            for env in one.get("env", []):
                if "value" in env and _SECRET_NAME.search(env["name"]):
                    yield f"{_name(load.object)}: {one['name']}: {env['name']} is in the open"


def _texts(manifests: Manifests) -> Iterator[str]:
    for one in manifests.of("ConfigMap"):
        for name, text in one.get("data", {}).items():
            if _SECRET.search(text):
                yield f"{_name(one)}: {name} holds a secret"
            if name.endswith(".toml"):
                try:
                    tomllib.loads(text)
                except tomllib.TOMLDecodeError as error:
                    yield f"{_name(one)}: {name} is not TOML: {error}"
