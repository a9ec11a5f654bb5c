"""A tiny random reward model with a character tokenizer and a chat template, as a directory."""

import json
from pathlib import Path

import tokenizers
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from protocol.rewards import RewardInput, write_reward_input

CHARACTERS = "abcdefghijklmnopqrstuvwxyz ?!.\n"
SPECIAL = ("<end>", "<pad>", "<user>", "<assistant>")
END, PAD = 0, 1
LONGEST = 64
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = RewardInput(format="chat", tokenize="apart")
PLAIN = RewardInput(format="plain", tokenize="apart")


def write_reward_model(
    folder: Path, *, given: RewardInput | None = CHAT, pad: int | None = None, seed: int = 0, causal: bool = False
) -> Path:
    """A Llama for sequence classification with one label; `causal`: its weights are those of a language model."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        max_position_embeddings=LONGEST,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=pad,
        num_labels=1,
        initializer_range=0.3,
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    if causal:
        settings = (folder / "config.json").read_text(encoding="utf-8")
        LlamaForCausalLM(config).save_pretrained(folder)
        (folder / "config.json").write_text(settings, encoding="utf-8")
    _write_tokenizer(folder)
    if given is not None:
        write_reward_input(folder, given)
    return folder


def _write_tokenizer(folder: Path) -> None:
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="."))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    fast.decoder = tokenizers.decoders.Fuse()
    fast.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in SPECIAL])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<end>", pad_token="<pad>")
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)


def alone(folder: Path, token_ids: list[int]) -> float:
    """Score of one input by Hugging Face's own class."""
    model = LlamaForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        return float(model(input_ids=torch.tensor([token_ids])).logits.item())


def edit_settings(folder: Path, **changes: object) -> None:
    """Changes config.json; a value of None takes the key away."""
    file = folder / "config.json"
    settings = {**json.loads(file.read_text(encoding="utf-8")), **changes}
    kept = {key: value for key, value in settings.items() if value is not None}
    file.write_text(json.dumps(kept), encoding="utf-8")
