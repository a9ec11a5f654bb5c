"""Makes what the demo of repairs starts from: tasks, a tiny untrained Llama, and conversations to warm it up on.

The folder gets `train.jsonl` and `held_out.jsonl`, tasks of the environment `computer`; a model of 0.7 million random
parameters with a tokenizer for words and signs; and `sft.jsonl`, conversations of a scripted agent that errs often.
"""

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path
from random import Random

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.swe.player import SUBMIT, TEST, conversation_of, shell
from examples.swe.repairs import FUNCTIONS, MODULES, NAMES, repair_of, task_of

DEFAULT_DIRECTORY = Path("models/swe-init")
PAD, END, UNKNOWN = "<pad>", "<|end|>", "<unk>"
ROLES = ("<|user|>", "<|assistant|>", "<|tool|>")
CALL, CLOSE = shell("COMMAND").split("COMMAND")
WHOLE = (
    CALL,
    CLOSE,
    SUBMIT,
    TEST,
    "no output",
    "grep -n",
    "sed -i",
    "return",
    "gives",
    "not",
    "See",
    "def",
    "ok",
    ".py",
)
"""Texts that are a token each, beside the words of the modules. All others are made of single characters."""
POSITIONS = 512
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that reads texts of WHOLE, words, and then character by character."""
    pieces = (*WHOLE, *FUNCTIONS, *NAMES, *MODULES)
    signs = ("\n", "\t", *map(chr, range(32, 127)))
    vocabulary = {
        token: number for number, token in enumerate(dict.fromkeys((PAD, END, UNKNOWN, *ROLES, *signs, *pieces)))
    }
    tokenizer = Tokenizer(
        models.WordPiece(vocabulary, unk_token=UNKNOWN, continuing_subword_prefix="", max_input_chars_per_word=1000)
    )
    whole = "|".join(re.escape(text) for text in sorted(WHOLE, key=len, reverse=True) if not text.isalpha())
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{whole}|[a-zA-Z]+|[\\s\\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, END, *ROLES)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNKNOWN, model_max_length=POSITIONS
    )
    fast.chat_template = TEMPLATE
    return fast


def make_model(tokenizer: PreTrainedTokenizerFast, *, seed: int) -> LlamaForCausalLM:
    """A Llama of 0.7 million parameters with tied embeddings, in float32."""
    torch.manual_seed(seed)
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.088,  # 1 / sqrt(hidden_size): with the usual 0.02 it learns to copy ten times later
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
        dtype=torch.float32,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad)
    return model


def write_lines(path: Path, lines: Iterable[object]) -> None:
    """Write objects as JSON, one a line."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def main() -> None:
    """The command: `python -m examples.swe.make_model [DIRECTORY]`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", default=DEFAULT_DIRECTORY, help="default: %(default)s")
    parser.add_argument("--tasks", type=int, default=4000, help="tasks to train on; default: %(default)s")
    parser.add_argument("--held-out", type=int, default=400, help="tasks to evaluate on; default: %(default)s")
    parser.add_argument("--conversations", type=int, default=6000, help="of the scripted agent; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random parameters; default: %(default)s")
    given = parser.parse_args()
    directory: Path = given.directory
    directory.mkdir(parents=True, exist_ok=True)
    for name, count, held_out in (("train", given.tasks, False), ("held_out", given.held_out, True)):
        repairs = (repair_of(index, held_out=held_out) for index in range(count))
        write_lines(directory / f"{name}.jsonl", map(task_of, repairs))
    played = [
        conversation_of(repair_of(index, held_out=False, seed=1), Random(index)) for index in range(given.conversations)
    ]
    write_lines(directory / "sft.jsonl", [{"messages": messages} for messages, _ in played])
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed=given.seed)
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{directory}: {given.tasks:,} tasks and {given.held_out:,} held out, a model of {parameters:,} parameters")
    share = sum(repaired for _, repaired in played) / len(played)
    print(f"{directory / 'sft.jsonl'}: {len(played):,} conversations of an agent that repairs {share:.0%}")


if __name__ == "__main__":
    main()
