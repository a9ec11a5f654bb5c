"""The text of a process's `--help`: the keys that count in the run that is asked about, the usual ones first.

learner --algo NAME --help           one line for each usual key; what NAME makes no use of is left out
learner --algo NAME --help GROUP     a group of keys, or a key, with all that is said of it
learner --help --all                 every key of every type, with the tables that stand in lists
"""

import inspect
import itertools
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from services.config.options import (
    REQUIRED,
    Choice,
    Option,
    OptionSchema,
    environment_name_of,
    flag_of,
    idle_reason,
    models_in,
    schema_of,
)

ALL = "--all"
_WIDTH = 118
_MAX_LINES = 116
_TAG_FIELDS = ("source", "type", "kind")


@dataclass(frozen=True)
class HelpRequest:
    """A command line's request for help. `picked`: the type of each choice; `whole`: every key, at length."""

    picked: Mapping[str, str]
    named: tuple[str, ...] = ()
    whole: bool = False
    every_type: bool = False

    def of(self, option: Option, schema: OptionSchema) -> tuple[str, ...]:
        """The types whose key it is, of those that are asked about; one without a name for a key of no choice."""
        choice = schema.choice_of(option.key)
        if choice is None or not option.variants:
            return ("",)
        if self.every_type:
            return tuple(option.variants)
        return tuple(name for name in (self.picked.get(choice.key, ""),) if name in option.variants)


def asked_of(schema: OptionSchema, argv: Sequence[str]) -> HelpRequest:
    """By `--algo NAME` or `--algo.type=NAME`, `--all`, and words that are keys or groups of keys."""
    words = [word for argument in argv for word in argument.split("=", 1)]
    named, picked = [], {}
    for choice in schema.choices.values():
        flags = (flag_of(choice.key), flag_of(choice.type_key))
        given = [name for flag, name in itertools.pairwise(words) if flag in flags and name in choice.variants]
        named += given
        if one := given[-1] if given else choice.default:
            picked[choice.key] = one
    keys = (word.replace("-", "_").removesuffix(".") for word in argv if word[:1] != "-" and word not in named)
    whole = ALL in argv
    return HelpRequest(
        picked=picked,
        named=tuple(key for key in keys if key in schema.options or key in schema.groups),
        whole=whole,
        every_type=whole and not named,
    )


def page(
    model: type[BaseModel],
    *,
    process: str,
    description: str,
    argv: Sequence[str],
    usual: Sequence[str] = (),
    idle: Mapping[str, str] | None = None,
) -> str:
    """The help of a process. `usual` are the groups of which each key has a line while there is room, the first ones
    first; `idle` is as `without_effect` of the config says it.
    """
    schema = schema_of(model)
    asked = asked_of(schema, argv)
    options = [
        option
        for option in schema.options.values()
        if asked.of(option, schema) and (asked.every_type or idle_reason(option.key, idle or {}) is None)
    ]
    lines = list(_head(process, description, asked))
    if asked.named:
        wanted = [one for one in options if any(f"{one.key}.".startswith(f"{name}.") for name in asked.named)]
        lines += _at_length(wanted, schema, asked, process)
    elif asked.whole:
        lines += _at_length(options, schema, asked, process)
    else:
        lines += _in_short(options, process, usual, asked, schema, room=_MAX_LINES - len(lines))
    return "\n".join(lines) + "\n"


def _head(process: str, description: str, asked: HelpRequest) -> Iterator[str]:
    yield f"usage: {process} [--config RUN.toml] [--option value ...]"
    yield from ["", description] if description else []
    yield ""
    example = environment_name_of("log.level", process=process)
    yield f"Defaults < [{process}] and [run] of RUN.toml < environment ({example}) < command line."
    if not asked.every_type:
        for key, name in asked.picked.items():
            other = f"{process} {flag_of(key)} NAME --help"
            yield f"Below are the options of {flag_of(key)} {name}; of another one: {other}"
    if not asked.whole and not asked.named:
        yield f"At length: {process} --help KEY, or --help GROUP; all keys of all kinds: {process} --help --all"
    yield ""


def _in_short(
    options: Sequence[Option],
    process: str,
    usual: Sequence[str],
    asked: HelpRequest,
    schema: OptionSchema,
    *,
    room: int,
) -> Iterator[str]:
    """The process's own keys and those of the usual groups, a line each, as far as there is room; then other groups."""
    groups: dict[str, list[Option]] = {}
    for option in options:
        groups.setdefault(_group_of(option), []).append(option)
    shown = {"": groups.get("", [])}
    left = room - len(shown[""]) - len(groups) - 3
    for name in usual:
        if name in groups and len(groups[name]) <= left:
            shown[name] = groups[name]
            left -= len(groups[name])
    for part in shown.values():
        for option in part:
            choice = schema.choice_of(option.key)
            if choice is not None and choice.type_key == option.key:
                yield from _type_lines(choice, option, asked)
            else:
                yield _line(option, asked.of(option, schema)[0], process)
    rest = [name for name in groups if name not in shown]
    if rest:
        yield ""
        yield f"Other groups of options ({process} --help GROUP):"
    for name in rest:
        keys = ", ".join(option.key.rpartition(".")[2] for option in groups[name])
        yield textwrap.shorten(f"  {name}  {keys}", _WIDTH, placeholder=" …", initial_indent="  ")


def _group_of(option: Option) -> str:
    return option.key.rpartition(".")[0]


def _line(option: Option, variant: str, process: str) -> str:
    text = option.texts.get(variant, option.description)
    if any(models_in(option.annotation)):
        start = f"[[{process}.{option.key}]]  tables in a list"
    else:
        start = f"{flag_of(option.key)}  {_value_of(option, variant)}"
    return textwrap.shorten(f"{start}: {text}" if text else start, _WIDTH - 2, placeholder=" …").join(("  ", ""))


def _type_lines(choice: Choice, option: Option, asked: HelpRequest) -> Iterator[str]:
    """The names that it may have, and what the picked one is."""
    first = list(_types(choice, asked))[:1]
    text = f"{flag_of(choice.key)} NAME  {_default_text(option.default)}: {option.description}, one of "
    yield from textwrap.wrap(text + ", ".join(choice.variants), _WIDTH, initial_indent="  ", subsequent_indent=" " * 6)
    yield from (textwrap.shorten(line, _WIDTH - 6, placeholder=" …").join(("      ", "")) for line in first)


def _value_of(option: Option, variant: str) -> str:
    kind = option.kinds.get(variant, option.annotation)
    default = option.variants.get(variant, option.default)
    return f"{kind_name(kind)}, {_default_text(default)}"


def _at_length(options: Sequence[Option], schema: OptionSchema, asked: HelpRequest, process: str) -> Iterator[str]:
    """A paragraph for each option: flag, kind, default, and what it means; a list's tables after it."""
    for option in options:
        choice = schema.choice_of(option.key)
        is_type = choice is not None and choice.type_key == option.key
        short = f", or {flag_of(choice.key)}" if choice is not None and is_type else ""
        alike: dict[tuple[str, str], list[str]] = {}
        for variant in asked.of(option, schema):
            said = (_value_of(option, variant), option.texts.get(variant, option.description))
            alike.setdefault(said, []).append(variant)
        for (value, text), variants in alike.items():
            of = f"  (of {', '.join(variants)})" if asked.every_type and variants != [""] else ""
            yield f"  {flag_of(option.key)}{short}  {value}{of}"
            yield from textwrap.wrap(text, 10_000, initial_indent="      ")
        if choice is not None and is_type:
            yield from _types(choice, asked)
        yield from _entries(option, process)


def _types(choice: Choice, asked: HelpRequest) -> Iterator[str]:
    for name in choice.variants if asked.every_type else (asked.picked.get(choice.key, ""),):
        for at, line in enumerate(choice.texts.get(name, "").splitlines()):
            yield f"      {name}: {line}" if not at else f"      {line}"


def _entries(option: Option, process: str) -> Iterator[str]:
    """The keys of the tables that stand in a list: `[[env-service.environments]]`."""
    if not option.is_list:
        return
    for _, model in models_in(option.annotation):
        tag = next((name for name in _TAG_FIELDS if name in model.model_fields), "")
        values = get_args(model.model_fields[tag].annotation) if tag else ()
        of = f'  {tag} = "{values[0]}"' if len(values) == 1 and isinstance(values[0], str) else ""
        yield f"      [[{process}.{option.key}]]{of}"
        yield from (f"          {line}" for line in inspect.cleandoc(model.__doc__ or "").splitlines()[:1])
        for inner in schema_of(model).options.values():
            if inner.key != tag or not of:
                yield f"          {inner.key}  {_value_of(inner, '')}: {inner.description}".rstrip(": ")


def kind_name(annotation: object) -> str:
    """A short name of a type for help texts."""
    if get_origin(annotation) is Annotated:
        return kind_name(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return "|".join(str(value) for value in get_args(annotation))
    if get_origin(annotation) in (list, tuple, set, frozenset):
        return "list of " + kind_name(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(kind_name(part) for part in get_args(annotation))
    if annotation is type(None):
        return "none"
    names = {"str": "text", "SecretStr": "secret", "float": "number", "int": "integer", "bool": "true|false"}
    name = getattr(annotation, "__name__", str(annotation))
    return names.get(name, name.lower())


def _default_text(value: object) -> str:
    if value is REQUIRED:
        return "required"
    return "default none" if value is None else f"default {_plain(value)}"


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_plain(item) for item in value) + "]"
    if isinstance(value, BaseModel):
        return str(getattr(value, "name", type(value).__name__))
    return str(value)
