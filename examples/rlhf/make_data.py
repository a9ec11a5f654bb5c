"""Makes what the RLHF example starts from: an untrained Llama of 0.64 million parameters, and the data of all stages.

    python -m examples.rlhf.make_data [DIRECTORY]

Into the directory go model and tokenizer, and from the language of `examples/rlhf/language.py` the files `sft.jsonl`
(prompts and what writers wrote), `preferences.jsonl` (pairs, some of them the wrong way round), `tasks.jsonl` and
`held_out.jsonl` (prompts alone, whose verifier is the reward model). No prompt of a text is taken from another file.
"""

import argparse
import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from examples.addition.make_model import END, PAD, UNKNOWN, make_model
from examples.addition.make_model import make_tokenizer as tokenizer_of
from examples.rlhf.language import LETTERS, PROMPT_END, LetterLanguage, preferences

DEFAULT_DIRECTORY = Path("models/rlhf-init")
VERIFIER = "reward_model"
VOCABULARY = (PAD, END, UNKNOWN, *LETTERS, PROMPT_END)
POSITIONS = 64


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per letter; nothing is put before or after the text."""
    return tokenizer_of("".join((*LETTERS, PROMPT_END)), positions=POSITIONS)


def write_data(directory: Path, language: LetterLanguage, arguments: argparse.Namespace) -> None:
    """The four files."""
    draw = random.Random(f"prompts {arguments.seed}")
    prompts = [language.prompt(draw) for _ in range(arguments.texts)]
    texts = [{"prompt": prompt, "completion": language.continuation(prompt, draw)} for prompt in prompts]
    pairs = preferences(language, count=arguments.pairs, noise=arguments.noise, seed=arguments.seed)
    tasks, held_out = (
        [{"prompt": language.prompt(draw), "verifier": VERIFIER} for _ in range(count)]
        for count in (arguments.tasks, arguments.held_out)
    )
    _write(directory / "sft.jsonl", texts)
    _write(directory / "preferences.jsonl", map(asdict, pairs))
    _write(directory / "tasks.jsonl", tasks)
    _write(directory / "held_out.jsonl", held_out)


def _write(path: Path, records: Iterable[Mapping[str, str]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", default=DEFAULT_DIRECTORY, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of language, data and parameters; default: %(default)s")
    parser.add_argument("--texts", type=int, default=20_000, help="texts for sft; default: %(default)s")
    parser.add_argument("--pairs", type=int, default=1000, help="preferences; default: %(default)s")
    parser.add_argument(
        "--noise", type=float, default=0.2, help="share of preferences that are wrong; default: %(default)s"
    )
    parser.add_argument("--tasks", type=int, default=20_000, help="training prompts; default: %(default)s")
    parser.add_argument("--held-out", type=int, default=500, help="held-out prompts; default: %(default)s")
    return parser.parse_args()


def main() -> None:
    """The command."""
    arguments = _arguments()
    directory: Path = arguments.directory
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(directory)
    make_model(tokenizer, seed=arguments.seed).save_pretrained(directory)
    write_data(directory, LetterLanguage.of_seed(arguments.seed), arguments)
    print(
        f"{directory}: an untrained model, {arguments.texts:,} texts, {arguments.pairs:,} preferences of which "
        f"{arguments.noise:.0%} are wrong, {arguments.tasks:,} prompts and {arguments.held_out:,} held-out ones"
    )


if __name__ == "__main__":
    main()
