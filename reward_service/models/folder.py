"""The directory of a model: what can be said about it without loading it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import xxhash

from protocol.rewards import REWARD_INPUT_FILE, RewardInput, read_reward_input
from reward_service.models.config import EncoderConfig, RewardModelConfig
from reward_service.verifier.submission import UserError
from services.model_folder import chat_template, template_in

_KIND = "ForSequenceClassification"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_HASHED = (".json", ".jinja", ".model", ".safetensors", ".txt")
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True)
class RewardModel:
    """A reward model to be served.

    `input`: what its directory says about its input; `longest`: most tokens that it takes, if its files say so;
    `fingerprint`: over all of its files. `template`: the text of the chat template that it was given; empty without.
    """

    config: RewardModelConfig
    input: RewardInput | None
    longest: int | None
    fingerprint: str
    template: str = ""


def open_reward_model(config: RewardModelConfig) -> RewardModel:
    """Checks the directory and takes its fingerprint. Raises UserError that says what is wrong with it."""
    folder = config.path
    settings = _settings(folder / "config.json")
    _check_kind(folder, settings)
    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        raise UserError(f"{folder} has no tokenizer: expected one of {', '.join(_TOKENIZER_FILES)}")
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"{folder} has no weights: expected model.safetensors, or parts of it")
    try:
        given = read_reward_input(folder)
        template = template_in(config.chat_template) if config.chat_template else ""
        own = chat_template(folder)
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from error
    if given is not None and given.format == "chat" and not (template or own):
        raise UserError(
            f"{folder} takes messages (the format chat in {REWARD_INPUT_FILE}) and has no chat template: give it the "
            "one that it was trained with, chat_template = FILE, or train it on plain text"
        )
    return RewardModel(
        config=config, input=given, longest=_longest(folder, settings), fingerprint=fingerprint(folder),
        template=template,
    )  # fmt: skip


def encoder_fingerprint(config: EncoderConfig) -> str:
    """Over all files of the model. Raises UserError for a directory that holds none."""
    if not (config.path / "config.json").exists() or not any(config.path.glob("*.safetensors")):
        raise UserError(
            f"{config.path} is no model: expected a Hugging Face directory with config.json and safetensors"
        )
    return fingerprint(config.path)


def most_encoder_tokens(config: EncoderConfig) -> int:
    """The longest text: `max_tokens`, or less where the model has fewer positions. Raises UserError."""
    settings = _settings(config.path / "config.json")
    # What counts no positions reads longer texts than its tokenizer says.
    longest = _longest(config.path, settings) if "max_position_embeddings" in _text_settings(settings) else None
    return config.max_tokens if longest is None else min(config.max_tokens, longest)


def fingerprint(folder: Path) -> str:
    """Over names and contents of the files that decide a reward: configuration, tokenizer and weights."""
    digest = xxhash.xxh3_128()
    for file in sorted(file for file in folder.iterdir() if file.suffix in _HASHED and file.is_file()):
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as opened:
            while chunk := opened.read(_CHUNK_BYTES):
                digest.update(chunk)
    return str(digest.hexdigest())


def _settings(file: Path) -> Mapping[str, object]:
    try:
        settings = json.loads(file.read_bytes())
    except OSError as error:
        raise UserError(f"{file} cannot be read: expected a Hugging Face model directory ({error})") from error
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise UserError(f"{file} holds {type(settings).__name__}, expected an object")
    return settings


def _check_kind(folder: Path, settings: Mapping[str, object]) -> None:
    """A model of another kind would be loaded all the same, with a head of random numbers."""
    kinds = settings.get("architectures") or ["nothing"]
    if not isinstance(kinds, list) or not str(kinds[0]).endswith(_KIND):
        raise UserError(f"{folder} is a model of the kind {kinds}: expected one that ends with {_KIND}")
    named = settings.get("id2label")
    labels = len(named) if isinstance(named, dict) else settings.get("num_labels", 2)
    if labels != 1:
        raise UserError(f"{folder} has {labels} labels: a reward model has one (num_labels 1)")


def _longest(folder: Path, settings: Mapping[str, object]) -> int | None:
    """The least of what the model's positions and its tokenizer allow."""
    places = _text_settings(settings)
    tokenizer = folder / "tokenizer_config.json"
    limits = [places.get("max_position_embeddings")]
    limits += [_settings(tokenizer).get("model_max_length")] if tokenizer.exists() else []
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)


def _text_settings(settings: Mapping[str, object]) -> Mapping[str, object]:
    text = settings.get("text_config")
    return cast(Mapping[str, object], text) if isinstance(text, dict) else settings
