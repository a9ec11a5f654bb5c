"""Makes what the addition demo starts from: a tiny untrained Llama, and examples to warm it up on.

The directory gets a model of 0.64 million random parameters, a tokenizer with one token per character, and `sft.jsonl`
with every training problem of the addition environment as prompt and completion. No evaluation problem is in it.
"""

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from env_service.environments.jsonl import Addition

DEFAULT_DIRECTORY = Path("models/addition-init")
PAD, END, UNKNOWN = "<pad>", "<eos>", "<unk>"
CHARACTERS = "0123456789+="
POSITIONS = 128


def make_tokenizer(characters: str = CHARACTERS, *, positions: int = POSITIONS) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character; nothing is put before or after the text."""
    vocabulary = {token: index for index, token in enumerate((PAD, END, UNKNOWN, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNKNOWN, model_max_length=positions
    )


def make_model(tokenizer: PreTrainedTokenizerFast, *, seed: int) -> LlamaForCausalLM:
    """A Llama of 0.64 million parameters with tied embeddings, in float32."""
    torch.manual_seed(seed)
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
        dtype=torch.float32,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad)
    return model


def write_examples(path: Path) -> int:
    """Writes one line per training problem; returns their number."""
    addition = Addition()
    with path.open("w", encoding="utf-8") as file:
        for index in range(addition.train_tasks):
            task = addition.task("train", index)
            line = {"prompt": task.prompt, "completion": task.verification.arguments["answer"]}
            file.write(json.dumps(line) + "\n")
    return addition.train_tasks


def main() -> None:
    """The command: `python examples/addition/make_model.py [DIRECTORY] [--seed N]`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", default=DEFAULT_DIRECTORY, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random parameters; default: %(default)s")
    arguments = parser.parse_args()
    directory: Path = arguments.directory
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed=arguments.seed)
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
    examples = write_examples(directory / "sft.jsonl")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{directory}: an untrained model of {parameters:,} parameters and {examples:,} examples")


if __name__ == "__main__":
    main()
