"""A model's folder of a few kilobytes, with all that is read of one before it is loaded."""

import json
import struct
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def small_config(**fields: object) -> str:
    """The text of a config.json, with these fields; one of None is left out."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 32}
    config = {"model_type": "llama", "max_position_embeddings": 128, "eos_token_id": 1, **sizes} | fields
    return json.dumps({name: value for name, value in config.items() if value is not None})


def small_model(
    folder: Path, *, positions: int = 128, characters: str = "0123456789+=abcdefgh ", template: str = ""
) -> Path:
    """Writes a model with a token for each character; without weights that anything could be computed with."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(small_config(max_position_embeddings=positions, vocab_size=3 + len(characters)))
    vocabulary = {token: index for index, token in enumerate(("<pad>", "<eos>", "<unk>", *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<eos>"} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    return folder
