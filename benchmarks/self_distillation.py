"""Self-distillation on addition: a policy that is its own teacher, which is shown the answer.

    python -m benchmarks.self_distillation FOLDER [--steps 500]
    headway up FOLDER/run.toml

Makes a policy that can copy an answer from its prompt, `085=37+48=` is continued with `085`, and of sums without one
knows what `models/addition` does; and the run file of a run that trains it on its own likeliest tokens.
"""

import argparse
import random
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from env_service.environments.jsonl import split

ROOT = Path(__file__).parents[1]
BASE = ROOT / "models" / "addition"
_BATCH = 64
_EOS, _FIRST_DIGIT, _PLUS, _EQUALS = 1, 3, 13, 14
_RUN = """
[run]
name = "self"
directory = "{folder}/runs"

[learner]
model = "{model}"
steps = 40
groups_per_step = 32
max_lag = 2
rollouts = {{ group_size = 2, max_tokens = 5 }}
evaluation = {{ tasks = 400, every_steps = 20, final_tasks = 400 }}
training.optimizer = {{ learning_rate = 3e-5 }}
algo = {{ type = "opd", divergence = "forward_kl", teacher_tokens = 8 }}
teachers = [{{ name = "self", policy = true }}]

[generator]
model = "{model}"
engine = {{ dtype = "float32", max_model_len = 64, max_num_seqs = 64, kv_cache_gb = 0.25 }}

[reward-service]
sandbox = "off"

[env-service]
model = "{model}"
environments = [{{ source = "addition", teacher_hint = "{{privileged}}=" }}]
"""


def digits(number: int, width: int) -> list[int]:
    """The tokens of a number with so many digits."""
    return [_FIRST_DIGIT + int(digit) for digit in f"{number:0{width}d}"]


def question(pair: int) -> list[int]:
    """The tokens of a sum without its answer."""
    left, right = divmod(pair, 100)
    return [*digits(left, 2), _PLUS, *digits(right, 2), _EQUALS]


@torch.no_grad()
def continued(model: PreTrainedModel, prompts: list[list[int]], *, greedy: bool) -> torch.Tensor:
    """Four tokens behind each prompt, all of one length: [N, 4]."""
    token_ids = torch.tensor(prompts)
    for _ in range(4):
        logits = model(token_ids).logits[:, -1]
        following = logits.argmax(-1) if greedy else torch.multinomial(logits.softmax(-1), 1)[:, 0]
        token_ids = torch.cat([token_ids, following[:, None]], dim=1)
    return token_ids[:, -4:]


def accuracy(model: PreTrainedModel, pairs: list[int], *, hinted: bool) -> float:
    """The share of sums that are right with the likeliest tokens, where the answer is in the prompt, or is not."""
    sums = [sum(divmod(pair, 100)) for pair in pairs]
    hints = [[*digits(total, 3), _EQUALS] if hinted else [] for total in sums]
    prompts = [hint + question(pair) for hint, pair in zip(hints, pairs, strict=True)]
    expected = torch.tensor([[*digits(total, 3), _EOS] for total in sums])
    return float((continued(model, prompts, greedy=True) == expected).all(-1).float().mean())


def train(model: PreTrainedModel, *, steps: int) -> None:
    """Teaches it to copy any number from before a sum, and to go on as it does where there is none."""
    pairs, _ = split()
    own = [row.tolist() for row in continued(model, [question(pair) for pair in pairs], greedy=False)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    chance = random.Random(0)
    for step in range(steps):
        rows, hinted = [], step % 2 == 0
        for at in chance.choices(range(len(pairs)), k=_BATCH):
            number = digits(chance.randrange(199), 3)
            rows.append(
                [*number, _EQUALS, *question(pairs[at]), *number, _EOS] if hinted else question(pairs[at]) + own[at]
            )
        token_ids = torch.tensor(rows)
        logits = model(token_ids[:, :-1]).logits[:, -4:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), token_ids[:, -4:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    _, evaluation = split()
    train(model, steps=given.steps)
    folder = given.folder.absolute() / "model"
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(BASE / name, folder / name)
    (folder.parent / "run.toml").write_text(_RUN.format(folder=folder.parent, model=folder), encoding="utf-8")
    for hinted in (True, False):
        print(f"{'with' if hinted else 'without'} the answer: {accuracy(model, evaluation, hinted=hinted):.3f} right")


if __name__ == "__main__":
    main()
