"""Runs rendered manifests as pods on a docker engine, as a kubelet would: mounts, users, variables, probes, restarts.

One container holds a pod's address, the others share it. Known gaps: a pod that is not ready stays in DNS, a Service
maps no ports, a memory volume is each container's own, and nothing schedules, scales, evicts or filters the network.
"""

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.deploy.manifest_checks import Manifests, Object, PodMaker

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_NAMESPACE = "default"


def docker(*words: object, timeout_s: float = 120, allow_failure: bool = False) -> str:
    """Runs the client; returns both of its streams. DOCKER_HOST names the engine."""
    done = _client(*words, timeout_s=timeout_s)
    assert allow_failure or done.returncode == 0, f"docker {' '.join(map(str, words))}: {done.stderr[-2000:]}"
    return (done.stdout + done.stderr).strip()


def _client(*words: object, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    client = "/usr/bin/docker" if Path("/usr/bin/docker").exists() else "docker"
    return subprocess.run(
        [client, *map(str, words)], capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL
    )


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """With the values of $(NAME), as the kubelet puts them in; unknown ones stay."""
    return re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), text)


def amount(quantity: str) -> int:
    """Bytes."""
    number, unit = re.fullmatch(r"([\d.]+)([A-Za-z]*)", quantity).groups()  # type: ignore[union-attr]
    return int(float(number) * _UNITS[unit])


@dataclass
class PodContainer:
    """A container of a pod that is to run on."""

    started: bool = False
    ready: bool = False
    restarts: int = 0
    born: float = field(default_factory=time.monotonic)
    due: dict[str, float] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)


class PodCluster:
    """The pods of some manifests. `secrets` are those that a person makes; `images` what stands for an image's name;
    `mounts` and `variables` come on top, for containers of the images that need them.
    """

    def __init__(
        self,
        manifests: Manifests,
        *,
        folder: Path,
        name: str,
        secrets: Mapping[str, Mapping[str, bytes]],
        images: Mapping[str, str],
        on_top: Mapping[str, Sequence[str]],
    ) -> None:
        self.manifests, self.folder, self.name = manifests, folder, name
        self.secrets, self.images, self.on_top = secrets, images, on_top
        self.pods = [pod for load in manifests.workloads() for pod in self._pods_of(load)]
        self.events: list[str] = []

    def _pods_of(self, load: PodMaker) -> Iterator["Pod"]:
        spec = load.object["spec"]
        first = spec.get("ordinals", {}).get("start", 0)
        for number in range(first, first + spec.get("replicas", 1)):
            yield Pod(self, load, f"{load.object['metadata']['name']}-{number}", number)

    def __enter__(self) -> "PodCluster":
        docker("network", "create", self.name)
        for pod in self.pods:
            pod.begin()
        return self

    def __exit__(self, *_: object) -> None:
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        for found in docker("ps", "-aq", "--filter", f"label={self.name}").split():
            name = docker("inspect", "-f", "{{.Name}}", found).strip("/")
            (logs / f"{name}.log").write_text(docker("logs", found, allow_failure=True))
            docker("rm", "-f", found, allow_failure=True)
        docker("network", "rm", self.name, allow_failure=True)
        shutil.rmtree(self.folder / "volumes", ignore_errors=True)

    def say(self, text: str) -> None:
        self.events.append(text)

    def pod(self, name: str) -> "Pod":
        return next(pod for pod in self.pods if pod.name == name)

    def tick(self) -> None:
        """Looks at all pods once."""
        for pod in self.pods:
            pod.tick()


class Pod:
    """A pod; `running` has its containers by name, once those before them have ended."""

    def __init__(self, cluster: PodCluster, load: PodMaker, name: str, number: int) -> None:
        self.cluster, self.load, self.name, self.spec = cluster, load, name, load.spec
        self.labels = {**load.labels, "apps.kubernetes.io/pod-index": str(number)}
        self.address = ""
        self.running: dict[str, PodContainer] = {}
        self._before = [one["name"] for one in self.spec.get("initContainers", [])]

    def full(self, container: str) -> str:
        return f"{self.cluster.name}-{self.name}.{container}"

    def begin(self) -> None:
        """The container that holds the address, then the first of the others."""
        holder = self.cluster.images[self.load.serving[0]["image"]]
        aliases = [f"--network-alias={name}" for name in self._names()]
        docker(
            "run", "-d", "--name", self.full("pod"), "--hostname", self.name, "--label", self.cluster.name,
            "--network", self.cluster.name, *aliases, "--entrypoint", "sleep", "--init", "--cap-drop", "ALL",
            "--user", "65534", "--no-healthcheck", holder, "infinity",
        )  # fmt: skip
        state = json.loads(docker("inspect", self.full("pod")))[0]
        self.address = state["NetworkSettings"]["Networks"][self.cluster.name]["IPAddress"]
        self._next()

    def _names(self) -> Iterator[str]:
        for service in self.cluster.manifests.of("Service"):
            if self.load in self.cluster.manifests.chosen(service["spec"]["selector"]):
                for name in (service["metadata"]["name"], f"{self.name}.{service['metadata']['name']}"):
                    yield from (name, f"{name}.{_NAMESPACE}.svc", f"{name}.{_NAMESPACE}.svc.cluster.local")

    def _next(self) -> None:
        if self._before:
            (one,) = (one for one in self.spec["initContainers"] if one["name"] == self._before[0])
            docker(*self._command(one))
            return
        for one in self.load.serving:
            self.running[one["name"]] = PodContainer()
            docker(*self._command(one))

    def tick(self) -> None:
        if self._before:
            state = self._state(self._before[0])
            if not state["Running"]:
                assert state["ExitCode"] == 0, f"{self.name}: {self._before[0]}: {self.log(self._before[0])[-3000:]}"
                self._before.pop(0)
                self._next()
            return
        for one in self.load.serving:
            state = self._state(one["name"])
            if not state["Running"]:
                self.cluster.say(f"{self.name} ended with {state['ExitCode']}")
                self._again(one)
            else:
                self._probe(one, self.running[one["name"]])

    def _again(self, one: Object) -> None:
        former = self.running[one["name"]]
        kept = self.cluster.folder / "logs" / f"{self.full(one['name'])}.{former.restarts}.log"
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(self.log(one["name"]))
        docker("rm", "-f", self.full(one["name"]))
        self.running[one["name"]] = PodContainer(restarts=former.restarts + 1)
        docker(*self._command(one))

    def _probe(self, one: Object, running: PodContainer) -> None:
        kinds = ("livenessProbe", "readinessProbe") if running.started else ("startupProbe",)
        for kind in kinds:
            probe = one[kind]
            if time.monotonic() < running.due.get(kind, 0.0):
                continue
            good = self._asked(one, probe)
            running.due[kind] = time.monotonic() + probe.get("periodSeconds", 10)
            running.failed[kind] = 0 if good else running.failed.get(kind, 0) + 1
            bad = running.failed[kind] >= probe.get("failureThreshold", 3)
            if kind == "startupProbe" and good:
                running.started = True
                self.cluster.say(f"{self.name} has started after {time.monotonic() - running.born:.0f} s")
            elif kind == "readinessProbe" and (good or bad) and running.ready != good:
                running.ready = good
                self.cluster.say(f"{self.name} is {'ready' if good else 'not ready'}")
            elif kind != "readinessProbe" and bad:
                self.cluster.say(f"{self.name}: {kind} failed")
                self.stop(one)
                return

    def _asked(self, one: Object, probe: Object) -> bool:
        """From outside of the pod, as a kubelet asks."""
        within = probe.get("timeoutSeconds", 1)
        if "exec" in probe:
            command = ["exec", self.full(one["name"]), "timeout", within, *probe["exec"]["command"]]
            return _client(*command).returncode == 0
        asked = probe.get("httpGet") or probe["tcpSocket"]
        ports = {port.get("name"): port["containerPort"] for port in one["ports"]}
        port = ports.get(asked["port"], asked["port"])
        try:
            if "tcpSocket" in probe:
                socket.create_connection((self.address, port), within).close()
                return True
            url = f"{asked.get('scheme', 'HTTP').lower()}://{self.address}:{port}{asked['path']}"
            # A kubelet looks at no certificate.
            unseen = ssl._create_unverified_context()
            with urllib.request.urlopen(url, timeout=within, context=unseen) as answer:
                return bool(answer.status < 400)
        except (OSError, urllib.error.URLError):
            return False

    def stop(self, one: Object) -> None:
        """As when it is deleted, or sick: the hook, SIGTERM, and SIGKILL after the time of grace."""
        hook = one.get("lifecycle", {}).get("preStop", {}).get("exec")
        if hook:
            docker("exec", self.full(one["name"]), *hook["command"], allow_failure=True)
        grace = self.spec["terminationGracePeriodSeconds"]
        docker("stop", "-t", grace, self.full(one["name"]), timeout_s=grace + 60)

    def kill(self, container: str) -> None:
        """From the host, like the kernel does when memory is out."""
        os.kill(self._state(container)["Pid"], signal.SIGKILL)

    def log(self, container: str) -> str:
        return docker("logs", self.full(container), allow_failure=True)

    def _state(self, container: str) -> Any:
        return json.loads(docker("inspect", self.full(container)))[0]["State"]

    def _command(self, one: Object) -> Iterator[object]:
        """The words of `docker run` for a container."""
        walls = {**self.spec.get("securityContext", {}), **one.get("securityContext", {})}
        variables = dict(self._variables(one))
        yield from ("run", "-d", "--name", self.full(one["name"]), "--label", self.cluster.name)
        yield from ("--network", f"container:{self.full('pod')}", "--no-healthcheck")
        yield from ("--user", f"{walls['runAsUser']}:{walls['runAsGroup']}", f"--group-add={walls['fsGroup']}")
        yield from (f"--cap-drop={name}" for name in walls["capabilities"]["drop"])
        if walls.get("readOnlyRootFilesystem"):
            yield "--read-only"
        if walls.get("allowPrivilegeEscalation") is False:
            yield "--security-opt=no-new-privileges"
        yield f"--memory={amount(one['resources']['limits']['memory'])}"
        yield from (self._mount(mount) for mount in one.get("volumeMounts", []))
        yield from (word for name, value in variables.items() for word in ("-e", f"{name}={value}"))
        yield from self.cluster.on_top.get(one["image"], ())
        words = [expanded(word, variables) for word in (*one.get("command", ()), *one.get("args", ()))]
        if one.get("command"):
            yield from ("--entrypoint", words.pop(0))
        yield from (self.cluster.images[one["image"]], *words)

    def _variables(self, one: Object) -> Iterator[tuple[str, str]]:
        fields = {"metadata.name": self.name, "metadata.namespace": _NAMESPACE, "status.podIP": self.address}
        fields |= {f"metadata.labels['{name}']": value for name, value in self.labels.items()}
        known: dict[str, str] = {}
        for variable in one.get("env", []):
            if "valueFrom" in variable:
                known[variable["name"]] = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
            else:
                known[variable["name"]] = expanded(variable["value"], known)
        yield from known.items()

    def _mount(self, mount: Object) -> str:
        (volume,) = (volume for volume in self.spec["volumes"] if volume["name"] == mount["name"])
        if volume.get("emptyDir", {}).get("medium") == "Memory":
            size = amount(volume["emptyDir"]["sizeLimit"])
            return f"--mount=type=tmpfs,dst={mount['mountPath']},tmpfs-size={size},tmpfs-mode=1777"
        source = self._volume(volume)
        readonly = ",readonly" if mount.get("readOnly") else ""
        return f"--mount=type=bind,src={source},dst={mount['mountPath']}{readonly}"

    def _volume(self, volume: Object) -> Path:
        """A folder of this machine with what is in it, and the modes that a kubelet gives it."""
        group = self.spec["securityContext"]["fsGroup"]
        if "persistentVolumeClaim" in volume:
            return _folder(self.cluster.folder / "claims" / volume["persistentVolumeClaim"]["claimName"], group)
        path = _folder(self.cluster.folder / "volumes" / self.name / volume["name"], group)
        source = volume.get("configMap") or volume.get("secret")
        if source is None:
            return path
        for key, name in self._files(source):
            file = path / name
            file.parent.mkdir(exist_ok=True)
            file.unlink(missing_ok=True)
            file.write_bytes(self._content(source, key))
            os.chown(file, 0, group)
            file.chmod(source.get("defaultMode", 0o644) | 0o040)
        return path

    def _files(self, source: Object) -> Iterator[tuple[str, str]]:
        if "items" in source:
            yield from ((item["key"], item["path"]) for item in source["items"])
        else:
            found = self.cluster.manifests.find("ConfigMap", source["name"])
            assert found is not None
            yield from ((key, key) for key in found["data"])

    def _content(self, source: Object, key: str) -> bytes:
        if "secretName" in source:
            return self.cluster.secrets[source["secretName"]][key]
        found = self.cluster.manifests.find("ConfigMap", source["name"])
        assert found is not None
        text: str = found["data"][key]
        return text.encode()


def _folder(path: Path, group: int) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    os.chown(path, 0, group)
    path.chmod(0o2775)
    return path
