"""Options that `headway doctor` and `headway status` share, and the processes that they ask."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

from headway.doctor.asking import targets_of
from headway.own_options import own_options
from headway.served_folder import noted_targets
from protocol.status import Kind, ProgressStatus
from services.config.models import ProcessConfig
from services.config.sources import ConfigError
from services.diagnosis.asked import AskedProcess, Target
from services.http.tls import TlsFiles
from services.network import is_http_address

Progress = dict[str, ProgressStatus]


@dataclass(frozen=True)
class DoctorOptions:
    """`before`: examine the machine, whatever runs. `more` are processes that the config file does not name."""

    before: bool = False
    as_json: bool = False
    more: Sequence[Target] = field(default_factory=tuple)


def options_of(words: Sequence[str]) -> tuple[DoctorOptions, list[str]]:
    """The doctor's own options, and the words that are for the processes' configs. Raises ConfigError."""
    own, others = own_options(words, {"--before": False, "--json": False, "--url": True})
    more = tuple(map(_target, own.get("--url", [])))
    return DoctorOptions(before="--before" in own, as_json="--json" in own, more=more), others


def targets(configs: Mapping[str, ProcessConfig], options: DoctorOptions) -> list[Target]:
    """The processes of the config file, and those that `--url` names."""
    known = targets_of(configs)
    tokens = {target.kind: target.token for target in known}
    trust = next((target.tls for target in known if target.tls.ca is not None), TlsFiles())
    more = (
        replace(one, token=one.token or tokens.get(one.kind), tls=trust if one.tls.ca is None else one.tls)
        for one in options.more
    )
    return [*known, *more]


def of_folder(folder: Path, options: DoctorOptions) -> DoctorOptions:
    """The options for a server that `headway serve` has started. Raises ConfigError."""
    if options.before:
        raise ConfigError(
            ["command line: --before looks at a RUN.toml; before a start of headway serve, it does itself"]
        )
    return replace(options, more=(*noted_targets(folder), *options.more))


def _target(text: str) -> Target:
    """`generator=http://host:7310`."""
    name, _, url = text.partition("=")
    kind = next((kind for kind in get_args(Kind) if kind == name), None)
    if kind is None or not is_http_address(url):
        expected = f"PROCESS=http://HOST:PORT, PROCESS one of {', '.join(get_args(Kind))}"
        raise ConfigError([f"command line: --url: got {text!r}: expected {expected}"])
    return Target(kind=kind, url=url.rstrip("/"))


def progress_of(procs: Sequence[AskedProcess]) -> Progress:
    """By name of the process, of those that answered and have a progress."""
    return {
        proc.name: proc.status.progress
        for proc in procs
        if proc.status is not None and proc.status.progress is not None
    }
