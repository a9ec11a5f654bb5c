"""The flat view of a config model: one `Option` for each key, found by walking the nested groups.

A group is a field whose type is another config model. A choice is a field whose type is a union of config models with
a discriminator: its options belong to one variant each, and the discriminator's own key (`algo.type`) picks it.
"""

import difflib
import inspect
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr, Tag, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from services.config.run_paths import is_written

REQUIRED = PydanticUndefined

FILE_SUFFIX = "_file"
_PLAINLY = {
    "int_parsing": "expected a whole number",
    "int_type": "expected a whole number",
    "float_parsing": "expected a number",
    "float_type": "expected a number",
    "bool_parsing": "expected true or false",
    "bool_type": "expected true or false",
    "string_type": "expected text in quotes",
    "tuple_type": "expected a list, in square brackets",
    "model_type": "expected a table, in curly brackets",
    "model_attributes_type": "expected a table, in curly brackets",
}
_NAME_PATTERN = "'^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$'"
_CLOSE = 0.7
_ALIKE = 0.6
# What other trainers call what is called otherwise here.
_ELSEWHERE = {
    "num_generations": "rollouts.group_size",
    "n_samples_per_prompt": "rollouts.group_size",
    "rollouts_per_example": "rollouts.group_size",
    "max_completion_length": "rollouts.max_tokens",
    "max_response_length": "rollouts.max_tokens",
    "max_new_tokens": "rollouts.max_tokens",
    "max_completion_tokens": "rollouts.max_tokens",
    "generate_max_len": "rollouts.max_tokens",
    "beta": "algo.kl_coefficient",
    "kl_coef": "algo.kl_coefficient",
    "init_kl_coef": "algo.kl_coefficient",
    "epsilon": "algo.clip_low",
    "epsilon_high": "algo.clip_high",
    "clip_eps": "algo.clip_low",
    "max_steps": "steps",
    "per_device_train_batch_size": "groups_per_step",
    "train_batch_size": "groups_per_step",
    "rollout_batch_size": "groups_per_step",
    "output_dir": "output",
    "model_name_or_path": "model",
    "max_async_level": "max_lag",
    "max_off_policy_steps": "max_lag",
    "num_train_epochs": "data.epochs",
    "num_epochs": "data.epochs",
    "epochs": "data.epochs",
    "eval_every": "evaluation.every_steps",
    "eval_steps": "evaluation.every_steps",
    "test_freq": "evaluation.every_steps",
    "save_steps": "checkpoint.every_steps",
    "save_freq": "checkpoint.every_steps",
    **dict.fromkeys(
        ("chat_template", "chat_template_path", "custom_chat_template", "tokenizer_chat_template"), "run.chat_template"
    ),
    "learning_rate": "training.optimizer.learning_rate",
    "lr": "training.optimizer.learning_rate",
    "temperature": "training.temperature",
    "lora_rank": "training.lora.rank",
    "warmup_steps": "training.optimizer.warmup_updates",
    "max_grad_norm": "training.optimizer.max_grad_norm",
    "gpu_memory_utilization": "engine.gpu_memory_fraction",
    "vllm_gpu_memory_utilization": "engine.gpu_memory_fraction",
}
_WHOLE = (
    "is not there for training: which tokens are left out is decided by the engine's numbers, which are not the "
    "learner's to the last digit, so that the logprobs of the two would not be of one distribution; for evaluations "
    "there is evaluation.{}"
)
# What others have, and is left out here, with the reason and what to do instead.
_NOT_HERE = {
    **{name: _WHOLE.format(name) for name in ("top_p", "top_k", "min_p")},
    **dict.fromkeys(
        ("stop", "stop_strings"),
        "is set as rollouts.stop_token_ids, or as stop of an environment (rules.stop of one of several turns)",
    ),
}


@dataclass(frozen=True)
class Option:
    """A key that can be set; `variants` is empty, or holds the default for each variant that has this key.

    `texts` and `kinds` hold what it means to each of them and of what type it is; `description` and `annotation` are
    those of the first.
    """

    key: str
    annotation: object
    default: object
    description: str
    variants: Mapping[str, object] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    kinds: Mapping[str, object] = field(default_factory=dict)
    is_written: bool = False
    """True for a path that the process makes."""

    @property
    def is_list(self) -> bool:
        return any(get_origin(part) in (list, tuple, set, frozenset) for part in _union_parts(self.annotation))

    @property
    def is_text(self) -> bool:
        """True if a string from a command line is taken as it is, though it may look like JSON."""
        return str in _union_parts(self.annotation)

    @property
    def is_bool(self) -> bool:
        return bool in _union_parts(self.annotation)

    @property
    def is_secret(self) -> bool:
        return SecretStr in _union_parts(self.annotation)

    @property
    def is_optional(self) -> bool:
        return type(None) in _union_parts(self.annotation)

    @property
    def literals(self) -> Mapping[str, object]:
        """The values of a Literal by their text: pydantic takes no "2" for a 2 there."""
        parts = (part for part in _union_parts(self.annotation) if get_origin(part) is Literal)
        return {str(value): value for part in parts for value in get_args(part)}


@dataclass(frozen=True)
class Choice:
    """A group of one of several types: `key` is the group's, `discriminator` the name of the field that picks.

    `texts` says of each variant what it is.
    """

    key: str
    discriminator: str
    variants: tuple[str, ...]
    default: str | None
    texts: Mapping[str, str] = field(default_factory=dict)

    @property
    def type_key(self) -> str:
        return f"{self.key}.{self.discriminator}"


@dataclass(frozen=True)
class OptionSchema:
    """Every option of a config model by dotted key, its groups, and its choices by group key."""

    options: Mapping[str, Option]
    groups: frozenset[str]
    choices: Mapping[str, Choice]

    def choice_of(self, key: str) -> Choice | None:
        """The choice whose type decides whether `key` exists."""
        return next((choice for name, choice in self.choices.items() if key.startswith(f"{name}.")), None)


def schema_of(model: type[BaseModel]) -> OptionSchema:
    """The schema of a config model. Defaults come from the default instances of its groups.

    Beside each secret there is an option of the same name with `_file` after it, for a file that holds it.
    """
    options: dict[str, Option] = {}
    groups: set[str] = set()
    choices: dict[str, Choice] = {}
    _walk(model, default=REQUIRED, prefix="", variant=None, into=(options, groups, choices))
    for option in [option for option in options.values() if option.is_secret]:
        key, variants = f"{option.key}{FILE_SUFFIX}", dict.fromkeys(option.variants)
        _add(
            options,
            Option(key, Path | None, None, f"file, for its owner's eyes only, that holds {option.key}", variants),
        )
    return OptionSchema(options=options, groups=frozenset(groups), choices=choices)


_Collected = tuple[dict[str, Option], set[str], dict[str, Choice]]


def _walk(model: type[BaseModel], *, default: object, prefix: str, variant: str | None, into: _Collected) -> None:
    options, groups, choices = into
    for name, info in model.model_fields.items():
        key = f"{prefix}{name}"
        value = _default(info) if default is REQUIRED else getattr(default, name)
        parts = [part for part in _union_parts(info.annotation) if _is_model(part)]
        if info.discriminator is not None and parts:
            groups.add(key)
            choices[key] = _walk_choice(key, info, parts, value, into)
        elif len(parts) == 1:
            groups.add(key)
            _walk(parts[0], default=_instance(value, parts[0]), prefix=f"{key}.", variant=variant, into=into)
        else:
            text = info.description or ""
            variants = {} if variant is None else {variant: value}
            texts = {} if variant is None else {variant: text}
            kinds = {} if variant is None else {variant: info.annotation}
            _add(options, Option(key, info.annotation, value, text, variants, texts, kinds, is_written(info)))


def _walk_choice(
    key: str, info: FieldInfo, parts: Sequence[type[BaseModel]], default: object, into: _Collected
) -> Choice:
    discriminator = str(info.discriminator)
    variants = {str(get_args(part.model_fields[discriminator].annotation)[0]): part for part in parts}
    picked = next((name for name, part in variants.items() if type(default) is part), None)
    texts = {name: inspect.cleandoc(part.__doc__ or "") for name, part in variants.items()}
    choice = Choice(key=key, discriminator=discriminator, variants=tuple(variants), default=picked, texts=texts)
    into[0][choice.type_key] = Option(
        key=choice.type_key,
        annotation=Literal[choice.variants],
        default=REQUIRED if picked is None else picked,
        description=info.description or f"which {key}",
    )
    for variant, part in variants.items():
        _walk_variant(part, default=_instance(default, part), choice=choice, variant=variant, into=into)
    return choice


def _walk_variant(part: type[BaseModel], *, default: object, choice: Choice, variant: str, into: _Collected) -> None:
    kept = into[0][choice.type_key]  # the variant's own field of that name is a constant
    _walk(part, default=default, prefix=f"{choice.key}.", variant=variant, into=into)
    into[0][choice.type_key] = kept


def _add(options: dict[str, Option], option: Option) -> None:
    """Two variants may have a field of the same name: one option then, which belongs to both."""
    known = options.get(option.key)
    both = option
    if known is not None:
        both = replace(
            known,
            variants={**known.variants, **option.variants},
            texts={**known.texts, **option.texts},
            kinds={**known.kinds, **option.kinds},
        )
    options[option.key] = both


def _default(info: FieldInfo) -> object:
    value: object = info.get_default(call_default_factory=True, validated_data={})
    return value


def _instance(value: object, model: type[BaseModel]) -> object:
    return value if type(value) is model else REQUIRED


def _is_model(part: object) -> typing.TypeGuard[type[BaseModel]]:
    return isinstance(part, type) and issubclass(part, BaseModel)


def complaint_of(error: ValidationError, model: type[BaseModel]) -> str:
    """The complaint about a record of the user's: above all a misspelled key, from which other complaints follow."""
    found = error.errors(include_url=False, include_context=False)
    strange = next((item["loc"] for item in found if item["type"] == "extra_forbidden"), None)
    if strange is not None:
        known = model.model_fields if len(strange) == 1 else ()
        guess = nearest(str(strange[-1]), known)
        hint = f"did you mean {guess}?" if guess else f"expected {', '.join(known) or 'another one'}"
        return f"unknown key {'.'.join(map(str, strange))!r}; {hint}"
    item = found[0]
    where = ".".join(map(str, item["loc"]))
    if item["type"] == "missing":
        return f"{where} is missing"
    reason = plain_reason(item["type"], item["msg"])
    got = "" if item["type"] == "value_error" else f": got {repr(item['input'])[:80]}"
    return f"{where}{got}: {reason}" if where else reason


def option_faults(error: ValidationError) -> list[str]:
    """The options of a command line that are wrong, and why; a fault of several together shows no value, as one of them
    may be a token.
    """
    return [_option_fault(item) for item in error.errors(include_url=False, include_context=False)]


def _option_fault(item: ErrorDetails) -> str:
    reason = plain_reason(item["type"], item["msg"])
    if not item["loc"]:
        return reason
    name = flag_of(str(item["loc"][0]))
    return f"{name}: {reason}" if item["type"] == "value_error" else f"{name}: got {item['input']!r}: {reason}"


def plain_reason(kind: str, message: str) -> str:
    """pydantic's message about a value, in the words of whoever wrote the value."""
    if kind == "string_pattern_mismatch" and _NAME_PATTERN in message:
        return "expected letters, digits, dots, dashes and underscores, a letter or digit first, 100 at most"
    text = message.removeprefix("Value error, ").replace("Input should be", "expected", 1)
    return _PLAINLY.get(kind, text.replace("String should match", "expected text of the", 1))


def models_in(annotation: object, tag: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """The config models that a type is made of, each with its tag in a union, or its name."""
    if _is_model(annotation):
        yield tag or annotation.__name__, annotation
    elif get_origin(annotation) is Annotated:
        inner, *marks = get_args(annotation)
        given = next((mark.tag for mark in marks if isinstance(mark, Tag)), tag)
        yield from models_in(inner, given)
    else:
        for part in get_args(annotation):
            yield from models_in(part)


def _union_parts(annotation: object) -> list[object]:
    if get_origin(annotation) is Annotated:
        return _union_parts(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [inner for part in get_args(annotation) for inner in _union_parts(part)]
    return [annotation]


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known dotted name that is most like `name`, by whole name or by last part; None if nothing is close.

    Close is what a slip of the fingers makes: a few letters more, fewer or in another order. What stands before the
    last part, and the dashes of a flag, do not make two names alike.
    """
    group, own = _parted(name)

    def likeness(candidate: str) -> float:
        other_group, other = _parted(candidate)
        last = difflib.SequenceMatcher(None, own, other).ratio()
        if group == other_group:
            return last
        whole = difflib.SequenceMatcher(None, f"{group}.{own}", f"{other_group}.{other}").ratio()
        return max(whole if last >= _ALIKE else 0.0, last * 0.95)

    best = max(known, key=likeness, default=None)
    return best if best is not None and likeness(best) >= _CLOSE else None


def _parted(name: str) -> tuple[str, str]:
    """Group and last part of a key, a flag or a variable of the environment."""
    group, _, own = name.lstrip("-").replace("__", ".").rpartition(".")
    return group, own


def idle_reason(key: str, idle: Mapping[str, str]) -> str | None:
    """Reason why a key does nothing, by its own name or by that of a group that it is in; None if it does something."""
    return next((reason for name, reason in idle.items() if f"{key}.".startswith(f"{name}.")), None)


def flag_of(key: str) -> str:
    """`algo.clip_low` → `--algo.clip-low`."""
    return "--" + key.replace("_", "-")


def environment_name_of(key: str, *, process: str) -> str:
    """`algo.clip_low` of the learner → `HEADWAY_LEARNER__ALGO__CLIP_LOW`; `run.name` → `HEADWAY_RUN__NAME`."""
    path = key if key.startswith("run.") else f"{process}.{key}"
    return "HEADWAY_" + path.replace("-", "_").replace(".", "__").upper()


def called_elsewhere(key: str, schema: OptionSchema) -> str | None:
    """Advice on a key that other trainers have: its name here, or why it is not there; None for any other."""
    name = key.rpartition(".")[2]
    meant = _ELSEWHERE.get(name)
    if meant in schema.options:
        return f"; that is {meant} here"
    return f"; {name} {_NOT_HERE[name]}" if name in _NOT_HERE else None
