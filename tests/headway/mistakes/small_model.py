"""A model's folder of a few kilobytes, with all that is read of one before it is loaded."""

import json
import struct
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def small_model(
    folder: Path, *, positions: int = 128, characters: str = "0123456789+=abcdefgh ", template: str = ""
) -> Path:
    """One token for each character; without weights that anything could be computed with."""
    folder.mkdir(parents=True)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 3 + len(characters)}
    config = {"model_type": "llama", "max_position_embeddings": positions, "eos_token_id": 1, **sizes}
    (folder / "config.json").write_text(json.dumps(config))
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
