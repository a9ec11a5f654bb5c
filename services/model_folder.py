"""Reads a model's folder in Hugging Face's format: fingerprints, its chat template, and the sizes that its config.json
tells. Nothing is loaded, and no package of models is imported.

By the fingerprints processes check that they mean the same tokens. The tokenizer's is over its files, the chat
template's over the template's text and what it is told in the whole run, the model's over the parts of its
configuration that shape the weights. Weights are not in it: they change with every step.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash
from pydantic import JsonValue

from protocol.fleet import Digest, Fingerprints

SLOWEST_BYTES_PER_S = 1e8
"""Least rate at which weights, or the probe, go through a model on a busy machine without a GPU."""
# Of the configuration, what says which tensors exist and what they mean. The rest differs harmlessly between releases.
_SHAPE_KEYS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "tie_word_embeddings", "hidden_act", "rms_norm_eps", "num_experts", "num_local_experts",
)  # fmt: skip
_POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
_QUANTIZATION_KEYS = ("quantization_config", "compression_config")
_QUANTIZATION_FILE = "hf_quant_config.json"
_METHOD_KEYS = ("quant_method", "quant_algo", "quantization", "method")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k", "moe_topk", "moe_k")


def fingerprint_directory(
    model: Path, template: Path | None = None, told: Mapping[str, JsonValue] | None = None
) -> Fingerprints:
    """Fingerprints of a Hugging Face model directory, with the chat template of the file `template` if that is given.
    What a template is `told` (chat_template_kwargs) counts as a part of it.

    Raises FileNotFoundError that names the missing file, and ValueError for one that cannot be read.
    """
    config = _read_json(model / "config.json")
    shape = {key: config[key] for key in _SHAPE_KEYS if key in config}
    if isinstance(inner := config.get("text_config"), dict):
        shape["text_config"] = {key: inner[key] for key in _SHAPE_KEYS if key in inner}
    return Fingerprints(
        model=_digest(json.dumps(shape, sort_keys=True).encode()),
        tokenizer=_tokenizer(model),
        chat_template=_told_template(chat_template(model) if template is None else template_in(template), told or {}),
    )


def _told_template(text: str, told: Mapping[str, JsonValue]) -> Digest:
    return _digest(f"{text}\0{json.dumps(told, sort_keys=True)}".encode() if told else text.encode())


def template_in(file: Path) -> str:
    """The text of a chat template's file. Raises FileNotFoundError, and ValueError for one that holds no text."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not a file: expected the Jinja text of a chat template")
    try:
        text = file.read_text(encoding="utf-8-sig")  # the mark of some editors would be in every prompt
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 ({error.reason} at byte {error.start}): expected Jinja text") from error
    if not text.strip():
        raise ValueError(f"{file} is empty: expected the Jinja text of a chat template")
    return text


def template_digest(file: Path) -> str:
    """The fingerprint of a chat template in a file. Raises as `template_in`."""
    return _digest(template_in(file).encode())


def template_file(model: Path) -> Path | None:
    """The file of a model that has its chat template; None if it has none."""
    settings, file = model / "tokenizer_config.json", model / "chat_template.jinja"
    return (file if file.exists() else settings) if chat_template(model) else None


def chat_template(model: Path) -> str:
    """The text of the model's own chat template, empty if it has none."""
    file = model / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    settings = model / "tokenizer_config.json"
    template = _read_json(settings).get("chat_template") if settings.exists() else None
    if not template:
        return ""
    return template if isinstance(template, str) else json.dumps(template, sort_keys=True)


def language_config(model: Path) -> dict[str, Any]:
    """A model's config.json, with what it says of its language model (`text_config`) in front of the rest.

    Raises FileNotFoundError that names the missing file, and ValueError for one that cannot be read.
    """
    config = _read_json(model / "config.json")
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


def model_bytes(model: Path) -> int:
    """The size of a model's weights on disk, in bytes; 0 if there are none."""
    return sum(path.stat().st_size for path in model.glob("*.safetensors"))


def with_size(least_s: float, model: Path) -> float:
    """A limit in seconds for what goes through all weights of a model once: `least_s`, and more for a large one."""
    return least_s + model_bytes(model) / SLOWEST_BYTES_PER_S


def vocabulary_size(model: Path) -> int:
    """The number of token ids that the model knows. Raises as `language_config`."""
    size = language_config(model).get("vocab_size")
    if not isinstance(size, int):
        raise ValueError(f"{model / 'config.json'} does not say how many tokens the model has: expected vocab_size")
    return size


def positions(model: Path) -> int | None:
    """Most tokens that a model takes by its config.json; None if that does not say it, or cannot be read."""
    try:
        config = _read_json(model / "config.json")
    except (OSError, ValueError):
        return None
    inner = config.get("text_config")
    for one in (config, inner if isinstance(inner, dict) else {}):
        most = next((one[key] for key in _POSITION_KEYS if isinstance(one.get(key), int)), None)
        if most is not None:
            scaling = one.get("rope_scaling") or one.get("rope_parameters") or {}
            factor = scaling.get("factor", 1) if isinstance(scaling, dict) else 1
            # Of Llama 3's kind, and of those that say what they began with, the factor is in the number already.
            counted = isinstance(scaling, dict) and "original_max_position_embeddings" in scaling
            return int(most if counted else most * max(1, factor))
    return None


def attention_heads(model: Path) -> int | None:
    """Number of heads of a model's attention by its config.json; None if that does not say it, or cannot be read."""
    return _size_in_config(model, "num_attention_heads")


def hidden_size(model: Path) -> int | None:
    """The width of a model by its config.json; None if that does not say it, or cannot be read."""
    return _size_in_config(model, "hidden_size")


def experts_of(told: Callable[[str], object]) -> tuple[int, int]:
    """Number of experts of a layer, and of those that a token is given to; 0 for what a configuration does not say.

    `told` answers for a key of the configuration; anything but a whole number is no answer.
    """
    experts, chosen = (
        next((found for found in map(told, keys) if isinstance(found, int)), 0) for keys in (_EXPERTS, _CHOSEN)
    )
    return experts, chosen


def has_experts(model: Path) -> bool | None:
    """True of what may be a mixture of experts, by its config.json, also of a kind that `experts_of` does not know;
    None if that cannot be read.
    """
    try:
        config = language_config(model)
    except (OSError, ValueError):
        return None
    return any(value for key, value in config.items() if "expert" in key or key.startswith("moe_"))


def quantization(model: Path) -> str | None:
    """The method by which a model's files say that its weights are quantized, such as fp8; None if they do not."""
    try:
        config = _read_json(model / "config.json")
        inner = config.get("text_config")
        found = [one.get(key) for one in (config, inner) if isinstance(one, dict) for key in _QUANTIZATION_KEYS]
        if (model / _QUANTIZATION_FILE).exists():
            found.append(_read_json(model / _QUANTIZATION_FILE).get("quantization"))
    except (OSError, ValueError):
        return None
    given = next((one for one in found if one), None)
    if not isinstance(given, dict):
        return None if given is None else str(given)
    return str(next((given[key] for key in _METHOD_KEYS if given.get(key)), "of an unnamed kind"))


def _size_in_config(model: Path, key: str) -> int | None:
    try:
        size = language_config(model).get(key)
    except (OSError, ValueError):
        return None
    return size if isinstance(size, int) and size > 0 else None


def _tokenizer(model: Path) -> str:
    files = [model / name for name in _TOKENIZER_FILES if (model / name).exists()]
    if not files:
        raise FileNotFoundError(f"{model} has no tokenizer: expected one of {', '.join(_TOKENIZER_FILES)}")
    return _digest(b"".join(file.read_bytes() for file in files))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: expected a Hugging Face model directory")
    loaded = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} holds {type(loaded).__name__}, expected an object")
    return loaded


def _digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)
