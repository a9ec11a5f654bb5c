"""Agreements that the configs of different processes must keep, declared where the fields are, and checked together.

    learner: Annotated[str, Reaches("learner", "leases.address")] = Field("tcp://127.0.0.1:7301", ...)

A process alone cannot check these: only a file with a table for both sides shows that they differ.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, JsonValue, SecretStr

from protocol.fleet import TOLD_ALIKE, Fingerprints
from services.config.models import HttpConfig, ProcessConfig
from services.config.run_paths import is_hub_name
from services.model_folder import fingerprint_directory, template_in
from services.network import is_loopback
from services.rotating_secrets import is_shown
from services.zmq.keys import AuthorizedBy, KeyFile, PublicKeyOf, unlike_keys, unreadable_key

_EVERY_ADDRESS = ("0.0.0.0", "::")
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Listens:
    """Marks an address, scheme://host:port, that the process listens on, or a port of its own (0: any), which is at the
    `host` of the same group. Groups of HttpConfig need no mark.
    """


@dataclass(frozen=True)
class Reaches:
    """Marks an address, or several to be tried, at which `process` listens; `key` is where that one's config has it."""

    process: str
    key: str = "http"


@dataclass(frozen=True)
class EqualTo:
    """Marks a value that must be the same as `key` of `process`."""

    process: str
    key: str


@dataclass(frozen=True)
class ModelFolder:
    """Marks a Hugging Face model directory; `agrees_in` says which fingerprints must equal the other processes'."""

    agrees_in: tuple[Literal["model", "tokenizer", "chat_template"], ...]


@dataclass(frozen=True)
class FieldPlace:
    """A field of a process's config, its value and its marks."""

    process: str
    key: str
    value: object
    marks: tuple[object, ...]

    def __str__(self) -> str:
        return f"[{self.process}] {self.key}"


@dataclass(frozen=True)
class _Address:
    """Address of a listener, or of an expected one; an ipc address has its path for a host, and no port."""

    host: str
    port: int | None


Configs = Mapping[str, ProcessConfig]


def disagreements(configs: Configs) -> list[str]:
    """Every problem between `configs`, which are by process and each good by itself; reads the model folders."""
    places = places_of(configs)
    return [
        *_port_clashes(places),
        *(
            problem
            for place in places
            if place.key not in configs[place.process].alone_in
            for mark in place.marks
            for problem in _unmet(place, mark, configs)
        ),
        *_model_problems(places),
    ]


def places_of(configs: Configs) -> list[FieldPlace]:
    """Every field of every config with its marks, groups included."""
    return [
        _deaf(place) if place.key in config.unheard else place
        for process, config in configs.items()
        for place in _places(process, config, "")
    ]


def _deaf(place: FieldPlace) -> FieldPlace:
    return replace(place, marks=tuple(mark for mark in place.marks if not isinstance(mark, Listens)))


def on_one_machine(configs: Configs) -> bool:
    """True if no address of a process leads to another machine."""
    marked = [place.value for place in places_of(configs) if any(isinstance(mark, Reaches) for mark in place.marks)]
    addresses = [one for value in marked for one in (value if isinstance(value, tuple) else (value,))]
    return all(is_loopback(urlsplit(one).hostname or "localhost") for one in addresses if isinstance(one, str))


def listened_on(places: Sequence[FieldPlace]) -> Iterator[tuple[str, str, int]]:
    """Tells what listens, where, and on which port."""
    at = {(place.process, place.key): place.value for place in places}
    for place in places:
        if isinstance(place.value, HttpConfig):
            yield str(place), place.value.host, place.value.port
        elif any(isinstance(mark, Listens) for mark in place.marks) and isinstance(place.value, int):
            host = at.get((place.process, f"{place.key.rpartition('.')[0]}.host"))
            if place.value:
                yield str(place), host if isinstance(host, str) and host != "auto" else "0.0.0.0", place.value
        elif any(isinstance(mark, Listens) for mark in place.marks) and isinstance(place.value, str):
            parts = urlsplit(place.value)
            if parts.scheme == "tcp" and parts.hostname and parts.port:
                yield str(place), "0.0.0.0" if parts.hostname == "*" else parts.hostname, parts.port


def _places(process: str, group: BaseModel, prefix: str) -> Iterator[FieldPlace]:
    for name, info in type(group).model_fields.items():
        value, key = getattr(group, name), f"{prefix}{name}"
        yield FieldPlace(process, key, value, tuple(info.metadata))
        if isinstance(value, BaseModel):
            yield from _places(process, value, f"{key}.")


def _port_clashes(places: list[FieldPlace]) -> Iterator[str]:
    taken: dict[int, FieldPlace] = {}
    for place in places:
        if not isinstance(place.value, HttpConfig) and not any(isinstance(mark, Listens) for mark in place.marks):
            continue
        address = _address(place.value)
        if address is None or not address.port:
            continue
        if address.port in taken:
            yield f"{taken[address.port]} and {place} both listen on port {address.port}: give each its own"
        taken.setdefault(address.port, place)


def _unmet(place: FieldPlace, mark: object, configs: Configs) -> Iterator[str]:
    match mark:
        case Reaches(process, key) if process in configs:
            yield from _unreached(place, f"[{process}] {key}", _at(configs[process], key))
        case EqualTo(process, key) if process in configs:
            other = _at(configs[process], key)
            if not _agree(place.value, other):
                yield f"{place} {_shown(place.value)}, but [{process}] {key} {_shown(other)}: make them the same"
        case KeyFile() | PublicKeyOf() | AuthorizedBy():
            yield from _key_problems(place, mark, configs)
        case _:
            pass


def _agree(value: object, other: object) -> bool:
    """True for equal values, and for a secret that is one of those that the other process accepts."""
    if isinstance(value, SecretStr) and isinstance(other, SecretStr):
        return is_shown(value.get_secret_value(), other)
    return value == other


def _key_problems(place: FieldPlace, mark: KeyFile | PublicKeyOf | AuthorizedBy, configs: Configs) -> Iterator[str]:
    path = place.value if isinstance(place.value, Path) else None
    if isinstance(mark, KeyFile):
        yield from unreadable_key(str(place), path, mark)
    elif mark.process in configs:
        theirs = _at(configs[mark.process], mark.key)
        other = theirs if isinstance(theirs, Path) else None
        yield from unlike_keys(str(place), path, f"[{mark.process}] {mark.key}", other, mark)


def _unreached(place: FieldPlace, other: str, target: object) -> Iterator[str]:
    given = place.value if isinstance(place.value, tuple) else (place.value,)
    wanted = _address(target)
    if wanted is None:
        yield f"{other} is {target!r}: expected scheme://host:port"
        return
    for one in given:
        if one is not None and _address(one) is None:
            yield f"{place} is {one!r}: expected scheme://host:port"
    yield from _other_scheme(place, given, other, target)
    found = [address for address in map(_address, given) if address is not None]
    if found and any(_leads_to(address, wanted) for address in found):
        return
    if found or given == (None,):
        shown = ", ".join(map(str, given)) if found else "none"
        yield f"{place} is {shown}, but {other} listens on {_written(wanted)}: make them agree"


def _other_scheme(place: FieldPlace, given: Iterable[object], other: str, target: object) -> Iterator[str]:
    """HTTPS is spoken with by an https:// address, and plain HTTP by an http:// one."""
    if not isinstance(target, HttpConfig):
        return
    scheme = "http" if target.tls_cert_file is None else "https"
    for one in given:
        found = one.partition("://")[0] if isinstance(one, str) else scheme
        if found != scheme and found in _DEFAULT_PORTS and _leads_there(one, target):
            has = "has a certificate" if scheme == "https" else "has no tls_cert_file"
            yield f"{place} is {one}, but {other} {has}: begin the address with {scheme}://"


def _leads_there(one: object, target: HttpConfig) -> bool:
    address, wanted = _address(one), _address(target)
    # Behind another port or name there may be a proxy that speaks TLS in its place.
    return address is not None and wanted is not None and address.port == wanted.port and _leads_to(address, wanted)


def _leads_to(address: _Address, target: _Address) -> bool:
    """True if a caller of `address` can be meant to find `target`. Names of other machines may be mapped: they may."""
    if address.port is None or target.port is None:
        return address == target
    if is_loopback(address.host) or address.host == target.host:
        heard = is_loopback(target.host) or target.host in (*_EVERY_ADDRESS, address.host)
        return heard and address.port == target.port
    return not is_loopback(target.host)


def _address(value: object) -> _Address | None:
    """None if it is none."""
    if isinstance(value, HttpConfig):
        return _Address(value.host, value.port)
    if isinstance(value, int):
        return _Address("", value)
    if not isinstance(value, str):
        return None
    try:
        parts = urlsplit(value)
        if parts.scheme == "ipc":
            return _Address(value.removeprefix("ipc://"), None)
        port = parts.port or _DEFAULT_PORTS.get(parts.scheme)
    except ValueError:
        return None
    return _Address(parts.hostname, port) if parts.hostname and port is not None else None


def _written(address: _Address) -> str:
    return address.host if address.port is None else f"{address.host}:{address.port}"


def _model_problems(places: list[FieldPlace]) -> Iterator[str]:
    """Folders that are missing or incomplete, then what differs between those that are there."""
    templates = {place.process: place.value for place in places if place.key == "run.chat_template"}
    told = {
        place.process: place.value
        for place in places
        if place.key == "run.chat_template_kwargs" and isinstance(place.value, dict)
    }
    fault = {given: _template_fault(given) for given in templates.values() if isinstance(given, Path)}
    yield from (f"[run] chat_template: {said}" for said in fault.values() if said)
    first: dict[str, tuple[FieldPlace, str]] = {}
    for place in places:
        for mark in place.marks:
            if not isinstance(mark, ModelFolder) or not isinstance(place.value, Path):
                continue
            given = templates.get(place.process)
            template = given if isinstance(given, Path) and not fault[given] else None
            read = _fingerprints(place.value, template, told.get(place.process, {}))
            if isinstance(read, str):
                yield f"{place}: {read}"
                continue
            for what in mark.agrees_in:
                digest: str = getattr(read, what)
                one, known = first.setdefault(what, (place, digest))
                if digest != known:
                    name = what.replace("_", " ")
                    yield (
                        f"{one} {one.value} and {place} {place.value} differ in their {name}: "
                        f"fingerprints {known} and {digest}; use the same model directory"
                        f"{TOLD_ALIKE if what == 'chat_template' else ''}"
                    )


def _template_fault(file: Path) -> str:
    try:
        return template_in(file) and ""
    except (OSError, ValueError) as error:
        return str(error)


def _fingerprints(folder: Path, template: Path | None, told: Mapping[str, JsonValue]) -> Fingerprints | str:
    """The fingerprints, or what keeps them from being read."""
    if not folder.is_dir():
        return f"{folder} is not a folder; expected a Hugging Face model directory{_or_fetched(folder)}"
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        return (
            f"{folder} is a LoRA adapter, without the model that it belongs to: merge the two first (headway export "
            "--merged of a run, merge_and_unload of peft)"
        )
    try:
        return fingerprint_directory(folder, template, told)
    except (OSError, ValueError) as error:
        return f"{folder} cannot be used: {error}"


def _or_fetched(folder: Path) -> str:
    """Adds what a name on the hub would need, if it is one."""
    name = "/".join(folder.parts[-2:])
    # Where the folder that holds it is there, a folder was meant.
    is_name = is_hub_name(name) and not folder.parent.is_dir() and folder.parts[-2] != "models"
    return f"; if it is meant as a name on the hub: headway fetch {name}" if is_name else ""


def _at(config: BaseModel, key: str) -> object:
    value: object = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _shown(value: object) -> str:
    if value is None:
        return "is not set"
    return "is another secret" if isinstance(value, SecretStr) else f"is {value}"
