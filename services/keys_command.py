"""The command `headway keys`: the secrets of a system on several machines, made in one go.

FOLDER/learner.key            the learner's secret CURVE key
FOLDER/learner.pub            its public key, for every env_service
FOLDER/NAME.key               the secret CURVE key of the env_service NAME
FOLDER/authorized/NAME.pub    its public key, for the learner
FOLDER/PROCESS.token          the bearer token of a process, for it and for those that call it
"""

import json
import re
import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.config_sources import PROCESSES, ConfigError
from services.keys import CurveKeys
from services.secret_files import write_public, write_secret

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ALONE = "env-service"
_TOKEN_BYTES = 32


@dataclass(frozen=True)
class _Request:
    """What the command line asks for."""

    folder: Path
    names: tuple[str, ...]
    force: bool


def make_keys(arguments: Sequence[str]) -> int:
    """Makes the files and prints the settings. Raises ConfigError for arguments, and for files, that are in the way."""
    request = _parsed(arguments)
    folder, names = request.folder.absolute(), request.names or (_ALONE,)
    shared = [folder / "learner.key", folder / "learner.pub", *(_token(folder, process) for process in PROCESSES)]
    joins = bool(request.names) and all(path.exists() for path in shared) and not request.force
    new = [path for name in names for path in _pair(folder, name)] + ([] if joins else shared)
    taken = [str(path) for path in new if path.exists()]
    if taken and not request.force:
        raise ConfigError([f"{', '.join(taken)} would be overwritten: name another folder, or say --force"])
    try:
        _write(folder, names, joins=joins)
    except OSError as error:
        raise ConfigError([f"cannot write to {folder}: {error.strerror}"]) from error
    sys.stdout.write("\n".join(_advice(folder, names, joined=joins)) + "\n")
    return 0


def _parsed(arguments: Sequence[str]) -> _Request:
    rest = [word for word in arguments if word != "--force"]
    if not rest or rest[0].startswith("-"):
        raise ConfigError(["headway keys needs the path of a folder: headway keys FOLDER [--env-service NAME ...]"])
    folder, *options = rest
    names = [word for word in options if word != "--env-service"]
    if options and (options[0] != "--env-service" or not names):
        raise ConfigError([f"headway keys: {options[0]}: expected --env-service NAME ... or --force after the folder"])
    wrong = [name for name in names if not _NAME.fullmatch(name) or name == "learner"]
    if wrong or len(set(names)) < len(names):
        raise ConfigError(
            [
                f"headway keys: {', '.join(wrong or names)}: expected different names of letters, digits, '.', '_' and "
                "'-', none of them learner"
            ]
        )
    return _Request(folder=Path(folder), names=tuple(names), force="--force" in arguments)


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


def _advice(folder: Path, names: Sequence[str], *, joined: bool) -> Iterator[str]:
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
    yield from _settings(folder, names[0])
    if len(names) > 1:
        yield ""
        yield "# Each env-service has a key of its own:"
        yield from _one_each(folder, names)


def _one_each(folder: Path, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        yield f"#   {name}: secret_key_file = {_quoted(_pair(folder, name)[0])}"


def _settings(folder: Path, name: str) -> Iterator[str]:
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
    for table, lines in tables.items():
        yield f"\n[{table}]"
        yield from (f"{key} = {value}" for key, value in lines.items())


def _quoted(path: Path) -> str:
    """As a string of TOML, whose escapes are those of JSON."""
    return json.dumps(str(path), ensure_ascii=False)
