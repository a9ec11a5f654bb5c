"""A tiny random BERT with a character tokenizer, as a directory."""

from pathlib import Path

import tokenizers
import torch
from transformers import BertConfig, BertForMaskedLM, BertModel, PreTrainedTokenizerFast

CHARACTERS = "abcdefghijklmnopqrstuvwxyz "
LONGEST = 32


def write_encoder(folder: Path, *, seed: int = 0, nothing: bool = False) -> Path:
    """An encoder without the head that sums up a text; with `nothing` its weights are those of no encoder."""
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(CHARACTERS) + 1,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LONGEST,
        initializer_range=0.5,
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    if nothing:
        settings = (folder / "config.json").read_text(encoding="utf-8")
        other = BertConfig(**{**config.to_dict(), "num_hidden_layers": 1})
        BertForMaskedLM(other).save_pretrained(folder)
        (folder / "config.json").write_text(settings, encoding="utf-8")
    vocabulary = {token: index for index, token in enumerate(("?", *CHARACTERS))}
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="?").save_pretrained(folder)
    return folder


def states(folder: Path, text: str) -> torch.Tensor:
    """The last hidden states [tokens, size] of a text alone, by Hugging Face's own class."""
    model = BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
    ids = [1 + CHARACTERS.index(character) for character in text]
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    return found
