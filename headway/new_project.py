"""`headway init`: a small project that runs as it is, to be changed into one's own, piece by piece.

run.toml         a table for each process
tasks.jsonl      what is trained on, a task a line; held_out.jsonl is only measured
reward.py        the verifier
README.md        what to type, and what to change first
model/           a Llama of 0.6 million random parameters that reads digits, unless a model is named
"""

import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.own_options import own_options
from services.config.run_paths import in_hub_cache, is_hub_name, run_name
from services.config.sources import ConfigError, in_toml

_LARGEST = 9
_HELD_OUT = 20
_CHARACTERS = "0123456789+="
_SPECIAL = ("<pad>", "<eos>", "<unk>")
_POSITIONS = 64

_REWARD = '''\
"""The reward: a function of a completion and the task's arguments. Change it, and start the run anew."""

import re

from pydantic import BaseModel

from reward_service.verifier import Submission


class Arguments(BaseModel):
    """Arguments of a task beside its prompt: here the right answer."""

    answer: int


def close(submission: Submission, arguments: Arguments) -> float:
    """1 for the right number, less the further away it is, 0 if there is none."""
    numbers = re.findall(r"\\d+", submission.completion)
    if not numbers:
        return 0.0
    return max(0.0, 1 - abs(int(numbers[WHICH]) - arguments.answer) / 10)
'''

_RUN = """\
# Made by `headway init`. `headway check run.toml` reads it, `headway up run.toml` starts it. Relative paths count from
# this file's folder. What is left out has a default: `learner --help`, `generator --help` and so on list everything.

[run]
name = "{name}"
directory = "runs"            # each run has a folder of its own in it

[learner]
model = {model}
algo = "grpo"
steps = {steps}
groups_per_step = 16          # tasks in a step
max_lag = 4                   # no token older than so many policy versions is trained on; 0 is synchronous

[learner.rollouts]
group_size = {group_size}     # completions of each task
max_tokens = {max_tokens}     # of a completion

[learner.training.optimizer]
learning_rate = {learning_rate}

[learner.evaluation]          # on held-out tasks, before, during and after training
tasks = {held_out}
every_steps = 20
final_tasks = {held_out}

[generator]
model = {model}

[generator.engine]
{engine}

[reward-service]
sandbox = "off"               # it runs no programs

[[reward-service.verifiers]]
name = "close"
function = "reward:close"

[env-service]
model = {model}

[[env-service.environments]]
name = "sums"
source = "jsonl"
train_file = "tasks.jsonl"
evaluation_file = "held_out.jsonl"
verifier = "close"            # of tasks that name none
chat = {chat}{system}
"""

_README = """\
# {name}

A project for Headway: a model learns sums by reinforcement learning, with a reward of your own.

    headway check run.toml    # reads everything, starts nothing
    headway up run.toml       # trains; Ctrl-C stops it, and headway up run.toml --resume goes on
    headway eval run.toml --model runs/{name}/model

What a run leaves is in `runs/{name}/`: `curves.png`, `samples.jsonl` (what was sampled, and its rewards),
`metrics.jsonl`, `summary.json`, `made_with.json` (all settings) and `model/`, a Hugging Face folder.

Change, one at a time:

1. `tasks.jsonl`: a prompt and an answer a line; `arguments` holds more than an answer.
2. `reward.py`: any function of the completion and these arguments.
3. `model` in run.toml, three times: a Hugging Face folder, or a name on the hub after `headway fetch NAME`. Then
   `chat = true`, and larger `max_tokens` and `engine.max_model_len`.
"""


def make_project(arguments: Sequence[str]) -> int:
    """The command. Raises ConfigError if there is such a folder already, none can be written, or the model is none."""
    own, others = own_options(arguments, {"--model": True})
    if len(others) != 1 or others[0].startswith("-"):
        raise ConfigError(["headway init needs the name of a folder: headway init NAME [--model FOLDER]"])
    folder = Path(others[0])
    if folder.exists() and any(folder.iterdir() if folder.is_dir() else [folder]):
        raise ConfigError([f"{folder} is there already; headway init makes a new folder: give another name"])
    if not run_name(folder):
        raise ConfigError([f"{folder} gives the run no name; expected one with letters or digits"])
    given = own.get("--model", [None])[-1]
    model = None if given is None else _checked(given)
    settings = _tiny() if model is None else _of_a_model(model, given or "", folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if model is None:
            make_tiny_model(folder / "model")
        _write(folder, settings=settings)
    except OSError as error:
        remedy = "make room there, or give a folder in which you may write"
        raise ConfigError([f"cannot write to {folder}: {error.strerror or error}: {remedy}"]) from error
    sys.stdout.write(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}\n")
    sys.stdout.write(f"next: headway up {folder / 'run.toml'}\n")
    return 0


def _checked(model: str) -> Path:
    """The folder of a model by its path or its name on the hub. Raises ConfigError."""
    folder = Path(model) if Path(model).is_dir() else in_hub_cache(model, "model")
    if folder is None:
        fetch = f"; headway fetch {model} downloads it" if is_hub_name(model) else ""
        raise ConfigError([f"--model {model}: no folder, and not in the hub's cache{fetch}"])
    if not (folder / "config.json").exists():
        raise ConfigError([f"--model {model}: {folder} has no config.json; expected a Hugging Face model directory"])
    return folder


def _tiny() -> dict[str, object]:
    engine = 'dtype = "float32"\nmax_model_len = 32\nkv_cache_gb = 0.25'
    return {
        "model": '"model"', "steps": 60, "group_size": 16, "max_tokens": 3, "learning_rate": "1e-3", "engine": engine,
        "chat": "false", "system": "", "which": "0",
    }  # fmt: skip


def _of_a_model(folder: Path, given: str, project: Path) -> dict[str, object]:
    """Cautious settings for a model that can talk, or at least go on with a text."""
    chat = _has_chat_template(folder)
    system = '\nsystem_prompt = "Work the sum out. End with the number alone."' if chat else ""
    written = os.path.relpath(folder, project) if Path(given).is_dir() and not Path(given).is_absolute() else given
    return {
        "model": in_toml(written), "steps": 60, "group_size": 8, "max_tokens": 64 if chat else 8,
        "learning_rate": "1e-6", "engine": "max_model_len = 512", "chat": str(chat).lower(), "system": system,
        "which": "-1" if chat else "0",
    }  # fmt: skip


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").exists():
        return True
    try:
        settings: Mapping[str, Any] = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(settings.get("chat_template"))


def _write(folder: Path, *, settings: Mapping[str, object]) -> None:
    sums = [(one, other) for one in range(_LARGEST + 1) for other in range(_LARGEST + 1)]
    random.Random(0).shuffle(sums)
    for name, part in (("tasks.jsonl", sums[_HELD_OUT:]), ("held_out.jsonl", sums[:_HELD_OUT])):
        lines = (json.dumps({"prompt": f"{one}+{other}=", "answer": one + other}) for one, other in part)
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    name = run_name(folder)
    texts = {
        "run.toml": _RUN.format(name=name, held_out=_HELD_OUT, **settings),
        "reward.py": _REWARD.replace("WHICH", str(settings["which"])),
        "README.md": _README.format(name=name),
    }
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8")


def make_tiny_model(folder: Path, *, seed: int = 0) -> None:
    """A Llama with random parameters and a token for each digit, `+` and `=`, as a Hugging Face directory."""
    for name in ("TQDM_DISABLE", "HF_HUB_OFFLINE"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Deferred: they load torch, which no other command of this process needs.
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    pad, end, unknown = _SPECIAL
    words = {token: index for index, token in enumerate((*_SPECIAL, *_CHARACTERS))}
    plain = Tokenizer(models.WordLevel(words, unk_token=unknown))
    plain.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    plain.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token=pad, eos_token=end, unk_token=unknown, model_max_length=_POSITIONS
    )
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=_POSITIONS, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=words[end], pad_token_id=words[pad], dtype=torch.float32,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=words[end], pad_token_id=words[pad])
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
