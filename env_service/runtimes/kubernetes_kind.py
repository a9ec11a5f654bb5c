"""Makes runtimes that are pods of a cluster.

A pod ends with this process, since its stdin does; what an unlucky instant leaves has the label of this service, which
deletes it when it starts again, or is deleted by the cluster with the service's own pod.
"""

import logging
import socket
import uuid
from collections.abc import Mapping, Set
from urllib.parse import urlsplit

from env_service.runtimes.config import RuntimesConfig
from env_service.runtimes.engine_commands import TRY_GROUP
from env_service.runtimes.images import HOME, HOST, ImageFault
from env_service.runtimes.interface import RuntimeCommand, RuntimeLost, RuntimeSnapshot
from env_service.runtimes.kinds import WITHOUT, Ended
from env_service.runtimes.kubernetes_api import ClusterError, ClusterRefused, KubernetesApi
from env_service.runtimes.kubernetes_runtime import FIRST, KubernetesRuntime, PodLaunch
from services.isolation.faults import CannotIsolate

logger = logging.getLogger(__name__)

LABEL = "headway.dev/runtime-of"
"""Label of every runtime; its value names the service that it is of. The policy without network selects by it."""

_OF_ALL = frozenset({401, 403, 429, 503, 504})
"""Statuses of refusals that are of no single pod: without rights, or of an API server that is busy or not there."""
# The cluster ends what the service did not: start, warm, and a task's time.
_LATER_S = 3600
_TRY = """
status() { while read -r name value; do [ "$name" = "$1" ] && echo "$value"; done </proc/self/status; }
case "$(status Uid:)" in USER[!0-9]*) ;; *) echo "it runs as user $(status Uid:)";; esac
case "$(status CapEff:)$(status CapBnd:)" in *[1-9a-f]*) echo "it has capabilities";; esac
case "$(status NoNewPrivs:)" in 1) ;; *) echo "programs can give it privileges";; esac
case "$(status Seccomp:)" in FILTER) ;; *) echo "there is no filter of system calls";; esac
if (echo x >/proc/sys/kernel/core_pattern) 2>/dev/null; then echo "settings of the kernel are writable"; fi
if [ -e /var/run/secrets/kubernetes.io ]; then echo "a token of the cluster is within reach"; fi
if ! (echo x >/work/.try && rm /work/.try); then echo "/work cannot be written: make it in the image"; fi
for each in tar find readlink; do command -v $each >/dev/null || echo "the image has no $each"; done
host=${KUBERNETES_SERVICE_HOST:-HOSTNAME} port=${KUBERNETES_SERVICE_PORT:-PORT}  # an address: there are no names
reach="import socket,sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3)"
if command -v python3 >/dev/null; then python3 -c "$reach" $host $port 2>/dev/null; reached=$?
elif command -v bash >/dev/null; then timeout 3 bash -c 'exec 3<>/dev/tcp/$0/$1' $host $port 2>/dev/null; reached=$?
else echo "the image has neither python3 nor bash to try the network with"; reached=1; fi
if [ $reached = 0 ]; then echo "the network is open ($host:$port): no NetworkPolicy holds in this namespace"; fi
"""


class KubernetesKind:
    """Implements `RuntimeKind`."""

    def __init__(self, config: RuntimesConfig) -> None:
        self._config = config
        kubernetes = config.kubernetes
        user, _, group = kubernetes.user.partition(":")
        self.trial = RuntimeCommand(argv=("/bin/sh", "-c", self._script(user)), cwd="/")
        self.remedy = f"See docs/runtimes.md for what a cluster needs; {WITHOUT}"
        self.memory_mib = config.limits.memory_mib
        self._service = kubernetes.service or socket.gethostname()[:63]
        self._api = KubernetesApi(
            kubernetes.api,
            namespace=kubernetes.namespace,
            account=kubernetes.account,
        )
        self._launch = PodLaunch(
            api=self._api, limits=config.limits, user=int(user), group=int(group), start_s=kubernetes.start_s,
            left=self._leave,
        )  # fmt: skip
        self._left: set[str] = set()

    def check(self, image: str) -> None:
        """Raises ImageFault for the image of this machine, which no pod has."""
        if image == HOST and HOST not in self._config.kubernetes.images:
            raise ImageFault(
                f"the image {HOST!r} is this machine's own programs, which no pod has: name another one, or say which "
                f'one is meant: env-service.runtimes.kubernetes.images.{HOST} = "IMAGE"'
            )

    async def open(self, images: Set[str]) -> None:
        """Reach the API server, and delete what this service left. Raises CannotIsolate."""
        await self._api.__aenter__()
        try:
            for pod in await self._api.pods(f"{LABEL}={self._service}"):
                await self._delete(pod.metadata.name)
        except ClusterError as error:
            raise CannotIsolate(
                f"env-service.runtimes.kind is 'kubernetes', and pods cannot be had: {error}; see "
                "env-service.runtimes.kubernetes: api, account and namespace, and the rights of the "
                "service's account (pods, pods/exec, pods/attach)"
            ) from error

    async def launch(
        self, image: str, snapshot: RuntimeSnapshot | None, *, name: str, ended: Ended
    ) -> KubernetesRuntime:
        """Raises RuntimeLost and ImageFault."""
        self.check(image)
        try:
            for left in list(self._left):
                await self._delete(left)
                self._left.discard(left)
        except ClusterError as error:
            raise RuntimeLost(f"a runtime of image {image} cannot be started: {error}") from error
        pod = f"headway-{uuid.uuid4().hex[:20]}"
        runtime = KubernetesRuntime(self._launch, image, name=pod, ended=ended)
        await runtime.start(self.pod(pod, image), snapshot)
        return runtime

    async def close(self) -> None:
        """Let go of the API server."""
        await self._api.__aexit__()

    def pod(self, name: str, image: str) -> Mapping[str, object]:
        """The manifest of a runtime."""
        kubernetes, limits = self._config.kubernetes, self._config.limits
        owner = {"apiVersion": "v1", "kind": "Pod", "name": self._service, "uid": kubernetes.owner_uid}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "labels": {LABEL: self._service},
                **({"ownerReferences": [owner]} if kubernetes.owner_uid else {}),
            },
            "spec": {
                "restartPolicy": "Never",
                "activeDeadlineSeconds": int(limits.lifetime_s) + _LATER_S,
                "terminationGracePeriodSeconds": 0,
                "serviceAccountName": kubernetes.service_account,
                "automountServiceAccountToken": False,
                "enableServiceLinks": False,
                "dnsPolicy": "None",
                "dnsConfig": {"nameservers": ["127.0.0.1"]},
                "hostname": "runtime",
                **({"runtimeClassName": kubernetes.runtime_class} if kubernetes.runtime_class else {}),
                "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
                "containers": [self._container(image)],
            },
        }

    def _container(self, image: str) -> Mapping[str, object]:
        kubernetes, limits = self._config.kubernetes, self._config.limits
        resources = {
            "memory": f"{limits.memory_mib}Mi",
            "cpu": f"{int(kubernetes.cpus * 1000)}m",
            "ephemeral-storage": f"{limits.disk_mib}Mi",
        }
        return {
            "name": "runtime",
            "image": kubernetes.images.get(image, image),
            "command": ["/bin/sh", "-c", FIRST],
            "env": [{"name": "HOME", "value": HOME}, {"name": "LANG", "value": "C.UTF-8"}],
            "workingDir": "/",
            "stdin": True,
            "stdinOnce": True,
            "resources": {"limits": resources, "requests": {**resources, "cpu": "10m"}},
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "privileged": False,
                "capabilities": {"drop": ["ALL"]},
                "runAsUser": self._launch.user,
                "runAsGroup": self._launch.group,
                "runAsNonRoot": self._launch.user != 0,
            },
        }

    def _script(self, user: str) -> str:
        kubernetes = self._config.kubernetes
        found = urlsplit(kubernetes.api)
        port = found.port or (443 if found.scheme == "https" else 80)
        script = _TRY.replace("USER", user).replace("FILTER", "*" if kubernetes.runtime_class else "2")
        return TRY_GROUP + script.replace("HOSTNAME", found.hostname or "localhost").replace("PORT", str(port))

    async def _delete(self, pod: str) -> None:
        """Deletes a pod. A refusal keeps nobody from a runtime: the pod's deadline ends it. Raises ClusterError, also
        where this service lacks the right.
        """
        try:
            await self._api.delete(pod)
        except ClusterRefused as error:
            if error.status in _OF_ALL:
                raise
            logger.warning("the pod %s cannot be deleted, and ends by its deadline: %s", pod, error)

    def _leave(self, pod: str) -> None:
        """Remember one that could not be deleted, as while the API server is away."""
        self._left.add(pod)
