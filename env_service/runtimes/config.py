"""Settings of runtimes: [env-service.runtimes]."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from services.config.models import ConfigModel

PODMAN_SECCOMP = Path(__file__).resolve().with_name("podman_seccomp.json")
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class RuntimeLimits(ConfigModel):
    """Limits of each runtime: memory and processes of all that runs in it together."""

    memory_mib: int = Field(512, ge=16, le=1 << 20, description="memory, in MiB")
    disk_mib: int = Field(
        128, ge=1, le=1 << 16, description="files that it writes, in MiB; bubblewrap holds them in memory"
    )
    files: int = Field(50_000, ge=100, le=10_000_000, description="files and folders that it makes")
    processes: int = Field(64, ge=4, le=4096, description="processes and threads at once")
    open_files: int = Field(512, ge=16, le=1 << 16, description="files that a process has open")
    cpu_s: int = Field(300, ge=1, description="CPU seconds of each process")
    command_s: float = Field(60.0, gt=0, le=86_400, description="longest time of a command, in seconds")
    output_bytes: int = Field(1 << 16, ge=1024, le=1 << 24, description="bytes kept of what a command prints")
    lifetime_s: float = Field(3600.0, gt=0, description="a runtime ends after so long in any case, in seconds")


class ContainerEngineConfig(ConfigModel):
    """Of the kind `engine`: containers of Docker or Podman."""

    socket: Path = Field(
        Path("/var/run/docker.sock"), description="unix socket of the engine; of Podman as oneself, in /run/user/UID"
    )
    images: dict[str, str] = Field(
        {}, description="images of the engine by the names that environments use; other names are the engine's own"
    )
    user: str = Field(
        "1000:1000",
        pattern=r"^\d{1,9}:\d{1,9}$",
        description="user and group ids of commands; 0:0 where tasks change files that the image gives to root",
    )
    cpus: float = Field(1.0, gt=0, le=1024, description="CPUs that each runtime may use")
    podman_seccomp: Path | None = Field(
        None,
        description="filter of system calls for containers of Podman, whose own lets programs make user namespaces: a "
        "seccomp profile by its absolute path on Podman's machine; that of this package if not given",
    )
    oci_runtime: str = Field(
        "", description="what the engine runs containers with, such as runsc, gVisor's; its own choice if empty"
    )


class KubernetesConfig(ConfigModel):
    """Of the kind `kubernetes`: pods of a cluster, 1.30 or later, in a namespace without network."""

    api: str = Field("https://kubernetes.default.svc", description="address of the API server")
    account: Path | None = Field(
        _SERVICE_ACCOUNT,
        description="folder with `token` and, for an API server that the system does not trust, `ca.crt`, as pods have "
        "it; none to show no token",
    )
    namespace: str = Field("default", min_length=1, description="namespace of the pods")
    service: str = Field(
        "",
        pattern=r"^([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?$",
        description="label by which the pods of this service are known, and those of its last life removed; the name "
        "of its host if empty",
    )
    owner_uid: str = Field("", description="uid of the service's own pod, whose name is `service`: pods go with it")
    service_account: str = Field("default", description="service account of the pods, whose token they do not get")
    images: dict[str, str] = Field(
        {}, description="images by the names that environments use; other names are images themselves"
    )
    user: str = Field("1000:1000", pattern=r"^\d{1,9}:\d{1,9}$", description="user and group ids of all that runs")
    cpus: float = Field(1.0, gt=0, le=1024, description="CPUs that each runtime may use")
    runtime_class: str = Field("", description="RuntimeClass of the pods, such as gvisor; the cluster's own if empty")
    start_s: float = Field(180.0, gt=0, le=3600, description="longest time until a pod runs, in seconds")


class RuntimesConfig(ConfigModel):
    """Runtimes: computers of their own for tasks, of images that `env-service runtime build` or an engine makes."""

    kind: Literal["bubblewrap", "engine", "kubernetes", "off"] = Field(
        "bubblewrap",
        description="bubblewrap: on this machine, without a daemon and without root; engine: containers of Docker or "
        "Podman; kubernetes: pods of a cluster; off: there are none",
    )
    folder: Path = Field(Path("runtimes"), description="folder of the images of bubblewrap")
    network: Literal["none"] = Field("none", description="none: a runtime reaches nobody, itself apart")
    memory_mib: int | None = Field(
        None,
        ge=64,
        description="memory and disk of all runtimes together, in MiB, which bounds how many there are at once; half "
        "of the machine's, or of the container's, if not given",
    )
    max_runtimes: int = Field(256, ge=1, le=1 << 16, description="runtimes at once, those that stand ready included")
    spare: int = Field(1, ge=0, le=1024, description="runtimes that stand ready for the next task of their image")
    patience_s: float = Field(
        120.0, gt=0, le=86_400, description="how long a task waits for room before it is tried elsewhere, in seconds"
    )
    uid: int = Field(
        64000, ge=1000, le=4_000_000_000, description="as root, runtimes run under this user id, which owns the images"
    )
    cgroup: str = Field(
        "auto", description="folder below which cgroups are made; auto: the service's own cgroup; off: none are made"
    )
    limits: RuntimeLimits = RuntimeLimits()
    engine: ContainerEngineConfig = ContainerEngineConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()
