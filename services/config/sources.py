"""Sources of settings: a TOML file, the environment, the command line; and messages about settings that are wrong.

Each source yields flat, named settings.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from services.config.options import (
    FILE_SUFFIX,
    Option,
    OptionSchema,
    called_elsewhere,
    environment_name_of,
    flag_of,
    models_in,
    nearest,
    plain_reason,
)
from services.config.run_paths import placed, run_name
from services.rotating_secrets import RotatingSecret
from services.secret_files import SecretFileError

PROCESSES = ("learner", "generator", "reward-service", "env-service")
TABLES = ("run", *PROCESSES)
_NAMED = re.compile(r"""^[ \t]*(\w+)[ \t]*=[ \t]*(["'])(\w+)\2[ \t]*(?:#.*)?$""", re.MULTILINE)
_HEADER = re.compile(r"^[ \t]*\[[ \t]*([\w.-]+)[ \t]*\][ \t]*(?:#.*)?$", re.MULTILINE)


class ConfigError(Exception):
    """The configuration cannot be used; each problem says where it is, what was given and what is expected."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True)
class SourcedSetting:
    """A value for one key; `origin` names it as the user wrote it, for messages."""

    key: str
    value: object
    origin: str


@dataclass(frozen=True)
class SourceContent:
    """The content of one source: settings for known keys, and a complaint for each unknown one."""

    settings: tuple[SourcedSetting, ...]
    problems: tuple[str, ...]


def from_file(path: Path, schema: OptionSchema, *, process: str) -> SourceContent:
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
            problems.append(f"{path.name}: unknown key {name}" + _hint_for(key, schema, process))
        else:
            settings.append(SourcedSetting(target, value, f"{path.name} {name}"))
    return SourceContent(tuple(settings), tuple(problems))


def from_environment(environ: Mapping[str, str], schema: OptionSchema, *, process: str) -> SourceContent:
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
            settings.append(SourcedSetting(target, value, f"environment {name}"))
    return SourceContent(tuple(settings), tuple(problems))


def from_command_line(arguments: Sequence[str], schema: OptionSchema, *, process: str = "") -> SourceContent:
    """The settings in flags like `--algo.clip-low 0.3`; a repeated flag of a list option adds to the list.

    `--learner.algo.clip-low`, as `headway up` has it, is understood by the learner, too.
    """
    targets = {flag_of(key): key for key in [*schema.options, *schema.choices]}
    given: dict[str, SourcedSetting] = {}
    problems: list[str] = []
    for written, text in _flags(arguments):
        flag = _without_process(written, targets, process)
        negated = targets.get("--" + flag.removeprefix("--no-")) if text is None and flag.startswith("--no-") else None
        key = targets.get(flag) or (negated if negated in schema.options else None)
        target = None if key is None else _target(key, text, schema)
        if target is None:
            problems.append(_unknown_flag(written, targets, schema, process))
            continue
        option = schema.options[target]
        if option.is_secret:
            problems.append(
                f"command line: {flag} would show the secret to everybody who lists this machine's processes; expected "
                f"{flag}-file with a file that only you can read, or the variable "
                f"{environment_name_of(target, process=process)}"
            )
            continue
        if text is None and not option.is_bool:
            problems.append(f"command line: {flag} needs a value")
            continue
        value = flag == flag_of(target) if text is None else parse_text(text, option)
        given[target] = SourcedSetting(target, _joined(given.get(target), value, option), f"command line {flag}")
    return SourceContent(tuple(given.values()), tuple(problems))


def of_place(path: Path) -> SourceContent:
    """Defaults from the place of a run.toml, where nobody says otherwise: its name, and where its files are."""
    folder = path.absolute().parent
    given = {"run.directory": str(folder / "runs"), "run.name": run_name(folder)}
    return SourceContent(tuple(SourcedSetting(key, value, "default") for key, value in given.items() if value), ())


def with_paths(found: SourceContent, schema: OptionSchema, beside: Path | None) -> SourceContent:
    """The same, with paths as the process finds them; `beside` is the folder of the file that was read, if one was."""

    def found_at(each: SourcedSetting) -> SourcedSetting:
        option = schema.options[each.key]
        return replace(each, value=placed(each.value, option.annotation, written=option.is_written, beside=beside))

    return replace(found, settings=tuple(map(found_at, found.settings)))


def with_secrets_read(found: SourceContent, schema: OptionSchema) -> SourceContent:
    """The same, with each setting of a secret's file exchanged for what the file holds, now and later."""
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
                settings.append(SourcedSetting(secret, RotatingSecret(Path(str(setting.value))), setting.origin))
            except SecretFileError as error:
                problems.append(f"{setting.origin}: {error}")
    return SourceContent(tuple(settings), tuple(problems))


def parse_text(text: str, option: Option) -> object:
    """A value written as text: JSON for lists and tables, `none` where the option may be empty, else the text."""
    if option.is_optional and text == "none":
        return None
    if text in option.literals:
        return option.literals[text]
    if text[:1] in ("[", "{") and not option.is_text:
        try:
            parsed: object = json.loads(text)
        except (ValueError, RecursionError):
            return text
        return parsed
    return [text] if option.is_list else text


def read_tables(path: Path) -> dict[str, dict[str, object]]:
    """The tables of a run.toml, unchecked. Raises ConfigError if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError([f"cannot read {path}: {reason}{_instead_of(path)}"]) from error
    try:
        tables = _parsed(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f"{path} is not TOML: {error}{_line_of(text, error)}"]) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets within brackets
        raise ConfigError([f"{path} cannot be read: {error}; expected the settings of a run"]) from error
    stray = [name for name, table in tables.items() if not isinstance(table, dict)]
    if stray:
        raise ConfigError([f"{path.name}: {name} is outside of a table; tables are {_tables()}" for name in stray])
    return tables


def in_toml(text: str) -> str:
    """A text as a string of TOML, whose escapes are those of JSON."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _line_of(text: str, error: tomllib.TOMLDecodeError) -> str:
    """The line that a complaint names, as it is written."""
    number = re.search(r"at line (\d+)", str(error))
    lines = text.splitlines()
    return f": {lines[int(number[1]) - 1].strip()}" if number and int(number[1]) <= len(lines) else ""


def _instead_of(path: Path) -> str:
    """The files that may be meant by a path that is none: those in a folder, or beside what is not there."""
    try:
        folder = path if path.is_dir() else path.parent
        names = sorted(file.name for file in folder.glob("*.toml")) if folder.is_dir() else []
    except OSError:  # a name that is too long, a folder that may not be looked into
        return ""
    guess = "run.toml" if "run.toml" in names else nearest(path.name, names) or (names[0] if len(names) == 1 else None)
    return f"; did you mean {folder / guess}?" if guess else ""


def _parsed(text: str) -> dict[str, dict[str, object]]:
    """TOML, but `algo = "grpo"` in [learner] may stand beside a table [learner.algo], as whose `type` it counts."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        short, picked = _without_short_forms(text)
        if not picked:
            raise
        try:
            tables = tomllib.loads(short)
        except tomllib.TOMLDecodeError:
            raise error from None
    for (table, key), name in picked.items():
        group = tables[table][key]
        assert isinstance(group, dict), "a header made it"
        if group.setdefault("type", name) != name:
            raise ConfigError(
                [f"[{table}] {key} is {name!r}, and [{table}.{key}] type {group['type']!r}: leave one out"]
            )
    return tables


def _without_short_forms(text: str) -> tuple[str, dict[tuple[str, str], str]]:
    """The text, in as many lines, without keys of one word in tables that have a table of that name, too."""
    headers = [(found.start(), found[1]) for found in _HEADER.finditer(text)]
    names = {name for _, name in headers}
    picked: dict[tuple[str, str], str] = {}

    def blank(found: re.Match[str]) -> str:
        table = next((name for start, name in reversed(headers) if start < found.start()), "")
        if f"{table}.{found[1]}" not in names or "." in table:
            return found[0]
        picked[table, found[1]] = found[3]
        return ""

    return _NAMED.sub(blank, text), picked


def _leaves(table: Mapping[str, object], prefix: str, schema: OptionSchema) -> Iterator[tuple[str, object]]:
    """The keys below `prefix` in a table, nested groups flattened; a table of an unknown name is one leaf."""
    for name, value in table.items():
        if isinstance(value, dict) and f"{prefix}{name}" in schema.groups:
            yield from ((f"{name}.{inner}", leaf) for inner, leaf in _leaves(value, f"{prefix}{name}.", schema))
        else:
            yield name, value


def _target(key: str, value: object, schema: OptionSchema) -> str | None:
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


def _without_process(flag: str, known: Mapping[str, str], process: str) -> str:
    prefix = f"--{process}."
    return f"--{flag.removeprefix(prefix)}" if process and flag.startswith(prefix) and flag not in known else flag


def _joined(before: SourcedSetting | None, value: object, option: Option) -> object:
    if before is not None and option.is_list and isinstance(before.value, list) and isinstance(value, list):
        return [*before.value, *value]
    return value


def _unknown_flag(flag: str, targets: Mapping[str, str], schema: OptionSchema, process: str) -> str:
    key = flag.removeprefix("--").removeprefix(f"{process}.").replace("-", "_")
    hint = called_elsewhere(key, schema) or _hint(nearest(flag, [*targets, "--config", "--help"]))
    return f"command line: unknown flag {flag}{hint}"


def _hint_for(key: str, schema: OptionSchema, process: str) -> str:
    """A guess at what an unknown key means: what other trainers call so, or what is spelled nearly so."""
    if (known := called_elsewhere(key, schema)) is not None:
        return known
    guess = nearest(key, schema.options)
    return f"; did you mean {guess}?" if guess else f"; `{process} --help` lists all keys"


def _hint(name: str | None, form: str = "{}") -> str:
    return "; see --help for all of them" if name is None else f"; did you mean {form.format(name)}?"


def _tables() -> str:
    return ", ".join(f"[{name}]" for name in TABLES)


def explained(
    error: ValidationError, settings: Mapping[str, SourcedSetting], schema: OptionSchema, process: str, *, known: bool
) -> list[str]:
    """If problems are known already, without those that follow from them: what is missing may be what is misspelled."""
    follow = ("missing", "union_tag_not_found", "extra_forbidden") if known else ()
    items = error.errors(include_url=False, include_context=False)
    broken = {item["loc"]: item["type"] for item in items}
    found = (
        _explained_one(item, settings, schema, process)
        for item in items
        if item["type"] not in follow and not _follows(item, broken)
    )
    return list(dict.fromkeys(found))  # a seed of the run is one of several keys


def _follows(item: ErrorDetails, broken: Mapping[tuple[str | int, ...], str]) -> bool:
    """True if a complaint comes of another one: of a misspelled key, or of entries that are wrong."""
    loc = item["loc"]
    if item["type"] == "missing" and any(isinstance(part, int) for part in loc):
        return any(kind == "extra_forbidden" and other[:-1] == loc[:-1] for other, kind in broken.items())
    return item["type"] == "too_short" and any(len(other) > len(loc) and other[: len(loc)] == loc for other in broken)


def _explained_one(
    item: ErrorDetails, settings: Mapping[str, SourcedSetting], schema: OptionSchema, process: str
) -> str:
    key = _key_of(item["loc"], schema)
    setting = _setting_at(key, settings)
    entry = _entry_of(item["loc"], setting, process)
    if entry is not None and setting is not None:
        return _in_entry(item, entry, schema.options[setting.key].annotation)
    if item["type"] in ("missing", "union_tag_not_found"):
        return _missing(key, schema, process)
    choice = schema.choices.get(key.rpartition(".")[0])
    if item["type"] == "union_tag_invalid" and setting is not None and choice is not None:
        guess = nearest(str(setting.value), choice.variants)
        hint = f"did you mean {guess}? Expected " if guess else "expected "
        return f"{setting.origin}: got {setting.value!r}: {hint}one of {', '.join(choice.variants)}"
    reason = _reason(item)
    named = settings.get(f"{key.rpartition('.')[0]}.{reason.partition(' ')[0]}")
    # What it complains of, and its place.
    if item["type"] == "value_error" and choice is not None and named is not None:
        return f"{named.origin}{reason.removeprefix(reason.partition(' ')[0])}"
    where = f"[{process}] {key}" if setting is None else setting.origin
    got = "" if item["type"] == "value_error" else f": got {_shown(item['input'], key, schema)}"
    return f"{where}{got}: {reason}" if key else f"{where}{reason}"


def _reason(item: ErrorDetails) -> str:
    return plain_reason(item["type"], item["msg"])


@dataclass(frozen=True)
class _Entry:
    """An entry of a list of tables: how a user calls it, and what is below it in the path of an error."""

    place: str
    rest: tuple[str | int, ...]


def _entry_of(loc: Sequence[str | int], setting: SourcedSetting | None, process: str) -> _Entry | None:
    number = next((index for index, part in enumerate(loc) if isinstance(part, int)), None)
    if setting is None or number is None or not isinstance(setting.value, list):
        return None
    at = loc[number]
    entry = setting.value[at] if isinstance(at, int) and at < len(setting.value) else None
    if not isinstance(entry, dict):
        return None
    name = entry.get("name", f"entry {at}")
    file, _, key = setting.origin.rpartition(" ")
    place = (
        f"{file.rpartition(' ')[0]} [[{process}.{key}]] {name}" if file.endswith("]") else f"{setting.origin} {name}"
    )
    return _Entry(place, tuple(loc[number + 1 :]))


def _in_entry(item: ErrorDetails, entry: _Entry, annotation: object) -> str:
    tags = dict(models_in(annotation))
    model = tags.get(str(entry.rest[0])) if entry.rest else None
    rest = entry.rest[1:] if model is not None else entry.rest
    key = ".".join(map(str, rest))
    fields = (
        [*model.model_fields] if model is not None else [name for one in tags.values() for name in one.model_fields]
    )
    if item["type"] == "extra_forbidden":
        guess = nearest(str(rest[-1]), fields) if len(rest) == 1 else None
        hint = f"did you mean {guess}?" if guess else f"expected {', '.join(fields)}" if len(rest) == 1 else "remove it"
        return f"{entry.place}: unknown key {key}; {hint}"
    if item["type"] == "missing":
        meaning = model.model_fields[key].description if model is not None and key in model.model_fields else ""
        return f"{entry.place}: {key} is required" + (f" ({meaning})" if meaning else "")
    got = "" if item["type"] == "value_error" or not key else f" {key}: got {item['input']!r:.80}"
    return f"{entry.place}:{got}{':' if got else ''} {_reason(item)}".replace("::", ":")


def _key_of(loc: Sequence[str | int], schema: OptionSchema) -> str:
    """The dotted key of an error; the tag of a choice, which pydantic puts into the path, is left out."""
    parts: list[str] = []
    for part in loc:
        choice = schema.choices.get(".".join(parts))
        if choice is None or part not in choice.variants:
            parts.append(str(part))
    key = ".".join(parts)
    return schema.choices[key].type_key if key in schema.choices else key


def _setting_at(key: str, settings: Mapping[str, SourcedSetting]) -> SourcedSetting | None:
    """The setting for `key`, or for the list or table that it is in."""
    while key and key not in settings:
        key = key.rpartition(".")[0]
    return settings.get(key)


def _missing(key: str, schema: OptionSchema, process: str) -> str:
    table, _, name = f"{'' if key.startswith('run.') else process + '.'}{key}".rpartition(".")
    option = schema.options.get(key)
    meaning = f" ({option.description})" if option is not None and option.description else ""
    return (
        f"{key} is required{meaning}: set {name} in [{table}], "
        f"{environment_name_of(key, process=process)}, or {flag_of(key)}"
    )


def _shown(value: object, key: str, schema: OptionSchema) -> str:
    option = schema.options.get(key)
    if option is not None and "Secret" in str(option.annotation):
        return "a secret"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
