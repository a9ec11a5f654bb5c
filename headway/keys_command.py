"""The command `headway keys`: the secrets of a system on several machines, made in one go.

FOLDER/learner.key            the learner's secret CURVE key
FOLDER/learner.pub            its public key, for every env_service
FOLDER/NAME.key               the secret CURVE key of the env_service NAME
FOLDER/authorized/NAME.pub    its public key, for the learner
FOLDER/PROCESS.token          the bearer token of a process, for it and for those that call it
FOLDER/tls/                   with --host, a CA and each process's certificate for HTTPS; made again, they are renewed

With --force nothing of before is of use any more, as after a leak: keys of env_services that are not named go, too, and
with --host the CA is a new one. Without --host what is in FOLDER/tls stays, and that is said.
"""

import re
import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.config.sources import PROCESSES, ConfigError, in_toml
from services.secret_files import SecretFileError, write_public, write_secret
from services.zmq.keys import CurveKeys

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_HOST = re.compile(r"[A-Za-z0-9*]([A-Za-z0-9.:*-]{0,252}[A-Za-z0-9])?|::[A-Fa-f0-9:]*")
_ALONE = "env-service"
_TLS = "tls"
_TOKEN_BYTES = 32


@dataclass(frozen=True)
class _Request:
    """A request of the command line."""

    folder: Path
    names: tuple[str, ...]
    hosts: tuple[str, ...]
    force: bool


def make_keys(arguments: Sequence[str]) -> int:
    """Makes the files and prints the settings. Raises ConfigError for arguments, and for files, that are in the way."""
    request = _parsed(arguments)
    folder, names = request.folder.absolute(), request.names or (_ALONE,)
    shared = [folder / "learner.key", folder / "learner.pub", *(_token(folder, process) for process in PROCESSES)]
    there = all(path.exists() for path in shared) and not request.force
    if request.hosts and not request.names and there:
        return _renew(folder, request.hosts)
    joins = bool(request.names) and there
    new = [path for name in names for path in _pair(folder, name)] + ([] if joins else shared)
    taken = [str(path) for path in new if path.exists()]
    if taken and not request.force:
        raise ConfigError([f"{', '.join(taken)} would be overwritten: name another folder, or say --force"])
    try:
        gone = _remove_others(folder, names) if request.force else []
        _write(folder, names, joins=joins)
        if request.hosts:
            _write_certificates(folder / _TLS, request.hosts, anew=request.force)
    except OSError as error:
        raise ConfigError([f"cannot write to {folder}: {error.strerror}"]) from error
    if request.force:
        sys.stdout.writelines(f"{line}\n" for line in _of_force(folder, gone, hosts=request.hosts))
    sys.stdout.write("\n".join(_advice(folder, names, joined=joins, tls=bool(request.hosts))) + "\n")
    return 0


def _renew(folder: Path, hosts: Sequence[str]) -> int:
    try:
        _write_certificates(folder / _TLS, hosts)
    except OSError as error:
        raise ConfigError([f"cannot write to {folder}: {error.strerror}"]) from error
    lines = [
        f"# New certificates are in {folder / _TLS}, for {', '.join(hosts)} and this machine, of the CA that is there.",
        "# A process that finds its files changed uses them from its next connection on.",
        *_tls_settings(folder),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _remove_others(folder: Path, names: Sequence[str]) -> list[str]:
    """Removes the keys of env_services that are not among the names, and returns whose they were.

    The public ones go first: they are what lets anybody in.
    """
    others = sorted(path.stem for path in (folder / "authorized").glob("*.pub") if path.stem not in names)
    for public in (True, False):
        for name in others:
            _pair(folder, name)[public].unlink(missing_ok=True)
    return others


def _of_force(folder: Path, gone: Sequence[str], *, hosts: Sequence[str]) -> Iterator[str]:
    """Sentences on what --force has done, and left, beyond what is made."""
    yield "# All keys and tokens are new: processes that have the former ones are let in no more."
    if gone:
        yield f"# Removed: the keys of {', '.join(gone)}. Name them after --env-service, too, to make theirs anew."
    if hosts:
        yield "# The CA is new, too: every process needs the new ca.pem, and believes no certificate of the former one."
    elif (folder / _TLS).exists():
        yield f"# {folder / _TLS} is as it was, its CA, too: with --host HOST ... that is made anew as well."


def _write_certificates(folder: Path, hosts: Sequence[str], *, anew: bool = False) -> None:
    """By the CA in the folder, or by a new one if there is none or all is made anew."""
    from headway.certificates import Authority, CertificateError  # deferred: the command has to be quick without

    folder.mkdir(parents=True, exist_ok=True)
    try:
        if (folder / "ca.pem").exists() and not anew:
            authority = Authority.read(folder)
        else:
            authority = Authority.new()
            authority.write(folder)
    except (CertificateError, SecretFileError) as error:
        raise ConfigError([str(error)]) from error
    for process in PROCESSES:
        authority.issue(folder, process, hosts=hosts)


def _parsed(arguments: Sequence[str]) -> _Request:
    rest = [word for word in arguments if word != "--force"]
    if not rest or rest[0].startswith("-"):
        raise ConfigError(
            ["headway keys needs the path of a folder: headway keys FOLDER [--env-service NAME ...] [--host HOST ...]"]
        )
    folder, *options = rest
    given = _by_option(options)
    names, hosts = given["--env-service"], given["--host"]
    wrong = [name for name in names if not _NAME.fullmatch(name) or name == "learner"]
    if wrong or len(set(names)) < len(names):
        raise ConfigError(
            [
                f"headway keys: {', '.join(wrong or names)}: expected different names of letters, digits, '.', '_' and "
                "'-', none of them learner"
            ]
        )
    if strange := [host for host in hosts if not _HOST.fullmatch(host)]:
        raise ConfigError([f"headway keys: --host {', '.join(strange)}: expected names or addresses, without a port"])
    return _Request(folder=Path(folder), names=tuple(names), hosts=tuple(hosts), force="--force" in arguments)


def _by_option(words: Sequence[str]) -> dict[str, list[str]]:
    given: dict[str, list[str]] = {"--env-service": [], "--host": []}
    empty = set[str]()
    expected = "expected --env-service NAME ..., --host HOST ... or --force after the folder"
    option = None
    for word in words:
        if word in given:
            option = word
            empty.add(word)
        elif option is None or word.startswith("-"):
            raise ConfigError([f"headway keys: {word}: {expected}"])
        else:
            given[option].append(word)
            empty.discard(option)
    if empty:
        raise ConfigError([f"headway keys: {', '.join(sorted(empty))}: {expected}"])
    return given


def _token(folder: Path, process: str) -> Path:
    return folder / f"{process}.token"


def _pair(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}.key", folder / "authorized" / f"{name}.pub"


def _write(folder: Path, names: Sequence[str], *, joins: bool) -> None:
    """Public keys first: a secret one that is there has its public one."""
    (folder / "authorized").mkdir(parents=True, exist_ok=True)
    if not joins:
        learner = CurveKeys.new()
        write_public(folder / "learner.pub", learner.public)
        write_secret(folder / "learner.key", learner.secret)
        for process in PROCESSES:
            write_secret(_token(folder, process), secrets.token_urlsafe(_TOKEN_BYTES))
    for name in names:
        keys, (secret, public) = CurveKeys.new(), _pair(folder, name)
        write_public(public, keys.public)
        write_secret(secret, keys.secret)


def _advice(folder: Path, names: Sequence[str], *, joined: bool, tls: bool) -> Iterator[str]:
    """A part of a run.toml, with what a person has to know as its comments."""
    if joined:
        yield f"# Added to {folder}: {', '.join(names)}. The learner, if it has this folder, lets them in at once."
        yield "# The settings are the same for all, but for one:"
        yield from _one_each(folder, names)
        return
    yield f"# Keys and tokens are in {folder}. To which machine each file has to go:"
    yield "#   learner:         learner.key, authorized/, learner.token, generator.token"
    yield "#   generator:       generator.token, learner.token"
    yield "#   reward-service:  reward-service.token"
    yield "#   env-service:     its own .key, learner.pub, env-service.token, generator.token, reward-service.token"
    yield "# Below, the settings for run.toml. Where it has one of these tables already, add the lines to that one."
    if tls:
        yield f"# Certificates are in {folder / _TLS}: to each machine its process's .pem and .key, and ca.pem."
        yield "# ca.key goes nowhere: it makes new certificates."
        yield "# The addresses of all processes begin with https:// then."
    yield from _settings(folder, names[0], tls=tls)
    if len(names) > 1:
        yield ""
        yield "# Each env-service has a key of its own:"
        yield from _one_each(folder, names)


def _one_each(folder: Path, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        yield f"#   {name}: secret_key_file = {_quoted(_pair(folder, name)[0])}"


def _tls_settings(folder: Path) -> Iterator[str]:
    for process in PROCESSES:
        yield f"\n[{process}.http]"
        yield from (f"{key} = {value}" for key, value in _tls_of(folder, process).items())


def _tls_of(folder: Path, process: str) -> dict[str, str]:
    tls = folder / _TLS
    return {
        "tls_cert_file": _quoted(tls / f"{process}.pem"),
        "tls_key_file": _quoted(tls / f"{process}.key"),
        "tls_ca_file": _quoted(tls / "ca.pem"),
        "tls_client_ca_file": _quoted(tls / "ca.pem"),
    }


def _settings(folder: Path, name: str, *, tls: bool) -> Iterator[str]:
    learner, generator, rewards, env_service = (_quoted(_token(folder, process)) for process in PROCESSES)
    tables = {
        "learner.http": {"token_file": learner},
        "learner.leases": {
            "secret_key_file": _quoted(folder / "learner.key"),
            "authorized_keys": _quoted(folder / "authorized"),
        },
        "learner.weights": {"generator_token_file": generator},
        "generator.http": {"token_file": generator},
        "generator.join": {"token_file": learner},
        "reward-service.http": {"token_file": rewards},
        "env-service": {
            "secret_key_file": _quoted(_pair(folder, name)[0]),
            "learner_key_file": _quoted(folder / "learner.pub"),
            "generator_token_file": generator,
            "reward_token_file": rewards,
        },
        "env-service.http": {"token_file": env_service},
    }
    if tls:
        for process in PROCESSES:
            tables[f"{process}.http"] |= _tls_of(folder, process)
    for table, lines in tables.items():
        yield f"\n[{table}]"
        yield from (f"{key} = {value}" for key, value in lines.items())


def _quoted(path: Path) -> str:
    return in_toml(str(path))
