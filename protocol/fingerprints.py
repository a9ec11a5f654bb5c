"""Fingerprints of a model's directory, by which processes check that they mean the same tokens.

The tokenizer's is over its files, the chat template's over the template's text, the model's over the parts of its
configuration that shape the weights. Weights are not in it: they change with every step.
"""

import json
from pathlib import Path
from typing import Any

import xxhash

from protocol.fleet import Fingerprints

# Of the configuration, what says which tensors exist and what they mean. The rest differs harmlessly between releases.
_SHAPE_KEYS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "tie_word_embeddings", "hidden_act", "rms_norm_eps", "num_experts", "num_local_experts",
)  # fmt: skip
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")


def fingerprint_directory(model: Path) -> Fingerprints:
    """Fingerprints of a Hugging Face model directory.

    Raises FileNotFoundError that names the missing file.
    """
    config = _read_json(model / "config.json")
    shape = {key: config[key] for key in _SHAPE_KEYS if key in config}
    return Fingerprints(
        model=_digest(json.dumps(shape, sort_keys=True).encode()),
        tokenizer=_tokenizer(model),
        chat_template=_digest(chat_template(model).encode()),
    )


def chat_template(model: Path) -> str:
    """The chat template's text, empty if the model has none."""
    file = model / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    settings = model / "tokenizer_config.json"
    template = _read_json(settings).get("chat_template") if settings.exists() else None
    if not template:
        return ""
    return template if isinstance(template, str) else json.dumps(template, sort_keys=True)


def vocabulary_size(model: Path) -> int:
    """The number of token ids that the model knows. Raises FileNotFoundError that names the missing file."""
    return int(_read_json(model / "config.json")["vocab_size"])


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
