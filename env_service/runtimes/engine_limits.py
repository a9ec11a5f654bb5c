"""Limits that an engine would leave away without a word: told by what it says of itself, and looked at in a container.

An engine of an ordinary user has no cgroups of version 1. Docker says so, and makes containers all the same; Podman
ignores their limits, says in its API that it has them, and warns in its own log alone. With cgroups of version 2 such a
user has the controllers that were handed on. So the kernel itself is asked, too, within the first container.
"""

from env_service.runtimes.config import RuntimeLimits
from env_service.runtimes.engine_api import EngineInfo

_ROOTLESS = "name=rootless"
_DELEGATE = (
    "let that user's systemd hand on the controllers (Delegate=cpu memory pids for user@.service), and start the "
    "engine as its service"
)
# Of each list, the file that is there is of the version of cgroups that is there; "max" and "-1" are no limits. Numbers
# are compared digit by digit: a shell that counts in 32 bits (mksh) would find 2^63 lower than a limit.
_TRIAL = """
cd CGROUPS 2>/dev/null
told() { value= rest=; for each; do if [ -r "$each" ]; then read -r value rest <"$each"; return 0; fi; done; return 1; }
within() {
  case $1 in ''|*[!0-9]*) return 1;; esac
  left=$1 limit=$2
  [ ${#left} -eq ${#limit} ] || { [ ${#left} -lt ${#limit} ]; return; }
  while [ -n "$left" ]; do
    after=${left#?} after_limit=${limit#?}
    left=${left%"$after"} limit=${limit%"$after_limit"}
    [ "$left" = "$limit" ] || { [ "$left" -lt "$limit" ]; return; }
    left=$after limit=$after_limit
  done
}
unlimited() { echo "its $1 limited to $2 (the kernel says ${3:-nothing})"; }
told memory.max memory/memory.limit_in_bytes
within "$value" MEMORY || unlimited "memory is not" "MEMORY bytes" "$value"
if [ -r memory.max ]; then what="swap is not" most=0; else what="memory with swap is not" most=MEMORY; fi
if told memory.swap.max memory/memory.memsw.limit_in_bytes; then
  within "$value" $most || unlimited "$what" "$most bytes" "$value"
else
  while read -r name value rest; do
    case $name$value in SwapTotal:0) ;; SwapTotal:*) unlimited "swap is not" "0 bytes" "";; esac
  done <MEMINFO
fi
told pids.max pids/pids.max
within "$value" PROCESSES || unlimited "processes are not" PROCESSES "$value"
told cpu.max cpu/cpu.cfs_quota_us
quota=$value; if [ -n "$rest" ]; then period=$rest; else told cpu/cpu.cfs_period_us; period=$value; fi
within "$quota" $(((THOUSANDTHS + 20) * (${period:-0} / 1000))) || unlimited "CPU is not" "CORES s a second" "$quota"
"""


def limits_fault(info: EngineInfo, *, is_podman: bool) -> str:
    """Says why an engine would leave limits of containers away, what it needs, and what to do; empty if it would not.

    What Podman says of single limits is wrong either way: with cgroups of version 2 it denies that of CPU, and has it.
    """
    as_oneself = info.Rootless or any(_ROOTLESS in each for each in info.SecurityOptions or ())
    if as_oneself and info.CgroupVersion == "1":
        return (
            "it ignores the limits of containers (memory, processes, CPU), since it runs as an ordinary user on "
            "cgroups of version 1; these need root, or cgroups of version 2: set the socket of an engine that root "
            "runs, or boot that machine with systemd.unified_cgroup_hierarchy=1"
        )
    if info.CgroupDriver == "none":
        return (
            "it limits nothing of a container (its cgroup driver is 'none'); it needs the driver systemd or cgroupfs: "
            f"{_DELEGATE}"
        )
    has = {"memory": info.MemoryLimit, "processes": info.PidsLimit, "CPU": info.CpuCfsQuota}
    missing = [name for name, is_there in has.items() if not is_there]
    if missing and not is_podman:
        remedy = _DELEGATE if as_oneself else "have that machine mount these controllers"
        return (
            f"it cannot limit {', '.join(missing)} of a container; it needs the controllers memory, pids and cpu of "
            f"cgroups: {remedy}"
        )
    return ""


def limits_trial(
    limits: RuntimeLimits,
    *,
    processes: int,
    cpus: float,
    cgroups: str = "/sys/fs/cgroup",
    meminfo: str = "/proc/meminfo",
) -> str:
    """Lines of shell that print a line for each limit that the kernel does not hold a container to.

    Only what the shell has itself is used. `processes` may be there at once, `cpus` are CPUs, which systemd rounds to
    hundredths. `cgroups` is where the container sees those of its own, of either version.
    """
    words = {
        "CGROUPS": cgroups,
        "MEMINFO": meminfo,
        "MEMORY": str(limits.memory_mib << 20),
        "PROCESSES": str(processes),
        "THOUSANDTHS": str(round(cpus * 1000)),
        "CORES": f"{cpus:g}",
    }
    script = _TRIAL
    for word, value in words.items():
        script = script.replace(word, value)
    return script
