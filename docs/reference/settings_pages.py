"""Pages of settings, one for each process, made from its pydantic model: what a table of run.toml may hold."""

import inspect
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from docs.reference.tables import table
from env_service.config import EnvServiceConfig
from env_service.environments.imported import class_at, options_model
from env_service.environments.task_configs import BUILT_IN, ClassTasks
from generator.config import GeneratorConfig
from learner.config import LearnerConfig
from reward_service.config import RewardServiceConfig
from services.config.help_text import kind_name
from services.config.models import ProcessConfig
from services.config.options import Option, schema_of

MODELS: Mapping[str, type[ProcessConfig]] = {
    "learner": LearnerConfig,
    "generator": GeneratorConfig,
    "reward-service": RewardServiceConfig,
    "env-service": EnvServiceConfig,
}

_MAX_NAMED = 6
_BOUNDS = ((Ge, "ge", "≥"), (Gt, "gt", ">"), (Le, "le", "≤"), (Lt, "lt", "<"))


class _Unset(Enum):
    """Stands for the instance of a group that has no default."""

    UNSET = "unset"


@dataclass(frozen=True)
class Section:
    """A table of run.toml: its header, what it is for, and a row of cells for each key."""

    header: str
    text: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def settings_page(process: str) -> str:
    """The page of a process, as Markdown."""
    model = MODELS[process]
    example = f"HEADWAY_{process.upper().replace('-', '_')}__LOG__LEVEL"
    lines = [
        f"# Settings of the {process.replace('-', ' ')}",
        "",
        f"Every key that `[{process}]` and its tables in `run.toml` may hold, with its unit, default and meaning. The",
        f"same keys are options of the command `{process}` (`--log.level debug`), options of `headway up`",
        f"(`--{process}.log.level debug`) and environment variables (`{example}=debug`). The command line",
        "overrides the environment, and that the file. A secret can also be read from a file, which is named by the",
        "same key with `_file` after it. This page is made from the code by `python -m docs.reference settings`.",
    ]
    built_in = _built_in_environments() if process == "env-service" else ()
    for section in (*_sections(model, at=process), *built_in):
        lines += ["", *_section_lines(section)]
    return "\n".join(lines) + "\n"


def _built_in_environments() -> Iterator[Section]:
    """The `options` of each environment that comes with Headway and is a class, those that have none, too."""
    at = "env-service.environments.options"
    for name in sorted(BUILT_IN):
        entry = ClassTasks(source=name, name=name)
        made = class_at(entry)
        model = options_model(made, entry)
        text = (inspect.getdoc(made) or "").partition("\n\n")[0]
        own, *inner = [*_sections(model, at=at)] if model else [Section("", "", (), ())]
        if own.header != f"`[{at}]`":  # it has tables alone
            own, inner = Section("", "", (), ()), [own, *inner] if model else []
        yield Section(f'`[{at}]`, `source = "{name}"`', text, own.columns, own.rows)
        yield from inner


def _section_lines(section: Section) -> Iterator[str]:
    yield f"## {section.header}"
    yield ""
    if section.text:
        yield section.text
        yield ""
    if section.rows:
        yield from table(section.columns, section.rows)


def _sections(model: type[BaseModel], *, at: str, default: object = _Unset.UNSET) -> Iterator[Section]:
    """The table of `model`, then those inside it. `default` is the group's default instance."""
    plain: list[tuple[str, FieldInfo, object]] = []
    inner: list[tuple[str, FieldInfo, object]] = []
    for name, info in model.model_fields.items():
        value = getattr(default, name) if default is not _Unset.UNSET else _default(info)
        (inner if _models(info.annotation) else plain).append((name, info, value))
    if plain:
        rows = tuple((f"`{name}`", _value(info, value), info.description or "") for name, info, value in plain)
        yield Section(f"`[{at}]`", _said(model), ("key", "value", "meaning"), rows)
    for name, info, value in inner:
        yield from _inner(model, name, info, value, at=at)


def _inner(model: type[BaseModel], name: str, info: FieldInfo, value: object, *, at: str) -> Iterator[Section]:
    models = _models(info.annotation)
    here = "run" if name == "run" else f"{at}.{name}"
    if _is_list(info.annotation):
        for one in models:
            yield from _entry(one, at=here, of_several=len(models) > 1)
    elif len(models) > 1:
        yield _choice(model, name, at=here)
    else:
        yield from _sections(models[0], at=here, default=value if type(value) is models[0] else _Unset.UNSET)


def _entry(model: type[BaseModel], *, at: str, of_several: bool) -> Iterator[Section]:
    """An entry of a list of tables, of which several may stand in the file."""
    first, *others = _sections(model, at=at)
    kind = f", {_tag(model)}" if of_several else ""
    yield Section(f"`[[{at}]]`{kind}", first.text, first.columns, first.rows)
    yield from others


def _choice(model: type[BaseModel], name: str, *, at: str) -> Section:
    """A table of one of several types: keys that mean the same to several of them stand once."""
    options = [option for option in schema_of(model).options.values() if option.key.startswith(f"{name}.")]
    (kind,) = [option for option in options if not option.variants]
    names = get_args(kind.annotation)
    rows = [
        (f"`{kind.key.partition('.')[2]}`", f"default `{kind.default}`", "", f"{kind.description}: {_listed(names)}")
    ]
    fields = {_type_of(one): one.model_fields for one in _models(model.model_fields[name].annotation)}
    for option in options:
        rows += _rows_of(option, everyone=names, fields=fields)
    text = f'`{name} = "NAME"` is short for `type = "NAME"`. A key of another type is an error.'
    return Section(f"`[{at}]`", text, ("key", "value", "of", "meaning"), tuple(rows))


def _rows_of(
    option: Option, *, everyone: Sequence[str], fields: Mapping[str, Mapping[str, FieldInfo]]
) -> Iterator[tuple[str, str, str, str]]:
    same: dict[tuple[str, str], list[str]] = {}
    key = option.key.partition(".")[2]
    for variant, default in option.variants.items():
        meant = _value(fields[variant][key], default), option.texts.get(variant, option.description)
        same.setdefault(meant, []).append(variant)
    for (value, text), variants in same.items():
        yield f"`{key}`", value, _of(variants, everyone), text


def _of(variants: Sequence[str], everyone: Sequence[str]) -> str:
    others = [name for name in everyone if name not in variants]
    if not others:
        return "all"
    return f"all but {_listed(others)}" if len(others) <= _MAX_NAMED else _listed(variants)


def _listed(names: Iterable[object]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _said(model: type[BaseModel]) -> str:
    return inspect.cleandoc(model.__doc__ or "")


def _type_of(model: type[BaseModel]) -> str:
    """The name by which a table of one of several types picks this one."""
    (name,) = get_args(model.model_fields["type"].annotation)
    return str(name)


def _tag(model: type[BaseModel]) -> str:
    """Tells an entry of this model from those of others: `source = "jsonl"`."""
    for name, info in model.model_fields.items():
        if name in ("type", "source", "kind"):
            names = get_args(info.annotation) if get_origin(info.annotation) is Literal else ()
            return f'`{name} = "{names[0]}"`' if names else f"any other `{name}`"
    raise AssertionError(f"{model.__name__} has no field that tells it from the others")


def _value(info: FieldInfo, default: object) -> str:
    bounds = [f"{sign} {_number(getattr(mark, field))}" for mark in info.metadata for kind, field, sign in _BOUNDS
              if isinstance(mark, kind)]  # fmt: skip
    return ", ".join([" ".join([_kind(info.annotation), *bounds[:1]]), *bounds[1:], _shown(default)])


def _number(bound: float) -> str:
    """Whole numbers with all of their digits."""
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _default(info: FieldInfo) -> object:
    return info.get_default(call_default_factory=True, validated_data={})


def _shown(value: object) -> str:
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "default none"
    if isinstance(value, bool):
        return f"default `{str(value).lower()}`"
    if isinstance(value, list | tuple):
        return f"default `[{', '.join(map(str, value))}]`"
    return 'default `""`' if value == "" else f"default `{value}`"


def _kind(annotation: object) -> str:
    parts = _parts(annotation)
    literals = [value for part in parts if get_origin(part) is Literal for value in get_args(part)]
    others = [kind_name(part) for part in parts if get_origin(part) is not Literal]
    return " or ".join([*([_listed(literals)] if literals else []), *(name.replace("|", " or ") for name in others)])


def _parts(annotation: object) -> list[object]:
    """The members of a union, annotations taken off."""
    if get_origin(annotation) is Annotated:
        return _parts(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [inner for part in get_args(annotation) for inner in _parts(part)]
    return [annotation]


def _is_list(annotation: Any) -> bool:
    return any(get_origin(part) in (tuple, list) for part in _parts(annotation))


def _models(annotation: object) -> list[type[BaseModel]]:
    """The config models in an annotation, those in a list included."""
    found: list[type[BaseModel]] = []
    for part in _parts(annotation):
        if get_origin(part) in (tuple, list):
            found += [model for inner in get_args(part) if inner is not ... for model in _models(inner)]
        elif isinstance(part, type) and issubclass(part, BaseModel):
            found.append(part)
    return found
