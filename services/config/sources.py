"""Where settings come from: a TOML file, the environment, the command line. Each yields flat, named settings."""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from services.config.options import FILE_SUFFIX, Option, Schema, environment_name_of, flag_of, nearest
from services.config.run_paths import placed
from services.secret_files import SecretFileError, read_secret

PROCESSES = ("learner", "generator", "reward-service", "env-service")
TABLES = ("run", *PROCESSES)


class ConfigError(Exception):
    """The configuration cannot be used; each problem says where it is, what was given and what is expected."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True)
class Setting:
    """A value for one key; `origin` names it as the user wrote it, for messages."""

    key: str
    value: object
    origin: str


@dataclass(frozen=True)
class Found:
    """What one source holds: settings for known keys, and a complaint for each unknown one."""

    settings: tuple[Setting, ...]
    problems: tuple[str, ...]


def from_file(path: Path, schema: Schema, *, process: str) -> Found:
    """The settings in the tables `[run]` and `[<process>]`; other processes' tables are left to them."""
    tables = read_tables(path)
    problems = [
        f"{path.name}: unknown table [{name}]" + _hint(nearest(name, TABLES), "[{}]")
        for name in tables
        if name not in TABLES
    ]
    leaves = [(f"run.{key}", f"[run] {key}", value) for key, value in _leaves(tables.get("run", {}), "run.", schema)]
    leaves += [
        (key if not key.startswith("run.") else f"{process}.{key}", f"[{process}] {key}", value)
        for key, value in _leaves(tables.get(process, {}), "", schema)
    ]
    settings = []
    for key, name, value in leaves:
        target = _target(key, value, schema)
        if target is None:
            problems.append(f"{path.name}: unknown key {name}" + _hint(_nearest_key(key, schema)))
        else:
            settings.append(Setting(target, value, f"{path.name} {name}"))
    return Found(tuple(settings), tuple(problems))


def from_environment(environ: Mapping[str, str], schema: Schema, *, process: str) -> Found:
    """The settings in variables like HEADWAY_LEARNER__ALGO__CLIP_LOW and HEADWAY_RUN__NAME."""
    targets = {environment_name_of(key, process=process): key for key in [*schema.options, *schema.choices]}
    prefixes = (environment_name_of("", process=process), "HEADWAY_RUN__")
    settings, problems = [], []
    for name in sorted(environ):
        if not name.startswith(prefixes):
            continue
        key = targets.get(name)
        target = None if key is None else _target(key, environ[name], schema)
        if target is None:
            problems.append(f"environment: unknown variable {name}" + _hint(nearest(name, targets)))
        else:
            value = parse_text(environ[name], schema.options[target])
            settings.append(Setting(target, value, f"environment {name}"))
    return Found(tuple(settings), tuple(problems))


def from_command_line(arguments: Sequence[str], schema: Schema) -> Found:
    """The settings in flags like `--algo.clip-low 0.3`; a repeated flag of a list option adds to the list."""
    targets = {flag_of(key): key for key in [*schema.options, *schema.choices]}
    given: dict[str, Setting] = {}
    problems: list[str] = []
    for flag, text in _flags(arguments):
        negated = targets.get("--" + flag.removeprefix("--no-")) if text is None and flag.startswith("--no-") else None
        key = targets.get(flag) or (negated if negated in schema.options else None)
        target = None if key is None else _target(key, text, schema)
        if target is None:
            problems.append(_unknown_flag(flag, targets))
            continue
        option = schema.options[target]
        if text is None and not option.is_bool:
            problems.append(f"command line: {flag} needs a value")
            continue
        value = flag == flag_of(target) if text is None else parse_text(text, option)
        given[target] = Setting(target, _joined(given.get(target), value, option), f"command line {flag}")
    return Found(tuple(given.values()), tuple(problems))


def with_paths(found: Found, schema: Schema, beside: Path | None) -> Found:
    """The same, with paths as the process finds them; `beside` is the folder of the file that was read, if one was."""
    kinds = {key: option.annotation for key, option in schema.options.items()}
    settings = (replace(each, value=placed(each.value, kinds[each.key], beside=beside)) for each in found.settings)
    return replace(found, settings=tuple(settings))


def with_secrets_read(found: Found, schema: Schema) -> Found:
    """The same, with each setting of a secret's file exchanged for the secret that the file holds."""
    given = {setting.key: setting for setting in found.settings}
    settings, problems = [], list(found.problems)
    for setting in found.settings:
        secret = setting.key.removesuffix(FILE_SUFFIX)
        if secret == setting.key or not (option := schema.options.get(secret)) or not option.is_secret:
            settings.append(setting)
        elif secret in given:
            problems.append(f"{setting.origin}: {given[secret].origin} is set, too; set one of them")
        else:
            try:
                settings.append(Setting(secret, read_secret(Path(str(setting.value))), setting.origin))
            except SecretFileError as error:
                problems.append(f"{setting.origin}: {error}")
    return Found(tuple(settings), tuple(problems))


def parse_text(text: str, option: Option) -> object:
    """A value written as text: JSON for lists and tables, `none` where the option may be empty, else the text."""
    if option.is_optional and text == "none":
        return None
    if text in option.literals:
        return option.literals[text]
    if text[:1] in ("[", "{") and not option.is_text:
        try:
            parsed: object = json.loads(text)
        except ValueError:
            return text
        return parsed
    return [text] if option.is_list else text


def read_tables(path: Path) -> dict[str, dict[str, object]]:
    """The tables of a run.toml, unchecked. Raises ConfigError if it cannot be read."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"cannot read {path}: {getattr(error, 'strerror', None) or error}"]) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f"{path} is not TOML: {error}"]) from error
    stray = [name for name, table in tables.items() if not isinstance(table, dict)]
    if stray:
        raise ConfigError([f"{path.name}: {name} is outside of a table; tables are {_tables()}" for name in stray])
    return tables


def _leaves(table: Mapping[str, object], prefix: str, schema: Schema) -> Iterator[tuple[str, object]]:
    """The keys below `prefix` in a table, nested groups flattened; a table of an unknown name is one leaf."""
    for name, value in table.items():
        if isinstance(value, dict) and f"{prefix}{name}" in schema.groups:
            yield from ((f"{name}.{inner}", leaf) for inner, leaf in _leaves(value, f"{prefix}{name}.", schema))
        else:
            yield name, value


def _target(key: str, value: object, schema: Schema) -> str | None:
    """The option that `key` sets; the name of a choice alone (`--algo grpo`) sets its type."""
    choice = schema.choices.get(key)
    if choice is not None and isinstance(value, str):
        return choice.type_key
    return key if key in schema.options else None


def _flags(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Pairs of flag and value; the value is None if the next argument is another flag or there is none."""
    rest = list(arguments)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--"):
            raise ConfigError([f"command line: {flag!r} is not a flag; every option is written as --name value"])
        name, equals, value = flag.partition("=")
        if equals:
            yield name, value
        elif rest and not rest[0].startswith("--"):
            yield name, rest.pop(0)
        else:
            yield name, None


def _joined(before: Setting | None, value: object, option: Option) -> object:
    if before is not None and option.is_list and isinstance(before.value, list) and isinstance(value, list):
        return [*before.value, *value]
    return value


def _unknown_flag(flag: str, targets: Mapping[str, str]) -> str:
    return f"command line: unknown flag {flag}" + _hint(nearest(flag, [*targets, "--config", "--help"]))


def _nearest_key(key: str, schema: Schema) -> str | None:
    return nearest(key, schema.options)


def _hint(name: str | None, form: str = "{}") -> str:
    return "; see --help for all of them" if name is None else f"; did you mean {form.format(name)}?"


def _tables() -> str:
    return ", ".join(f"[{name}]" for name in TABLES)
