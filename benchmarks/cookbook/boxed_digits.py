"""Makes the model of this benchmark: `python -m benchmarks.cookbook.boxed_digits FOLDER`.

A Qwen3 of two layers whose tokens are bytes, which has learned to answer whatever it is asked with some digit in a box:
some of its answers are right, so that a reward has something to strengthen.
"""

import random
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from tests.learner.tenants.tiny import make_tiny_model

_STEPS = 250
_ENDINGS = ("", "?", " Provide a numerical answer without units, written inside \\boxed{}.")


def main() -> None:
    """Writes the model."""
    folder = Path(sys.argv[1])
    folder.parent.mkdir(parents=True, exist_ok=True)
    make_tiny_model(folder, hidden=64)
    model, words = Qwen3ForCausalLM.from_pretrained(folder).float(), AutoTokenizer.from_pretrained(folder)
    dice, optimizer = random.Random(0), torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(_STEPS):
        asked = f"{dice.randrange(10)}+{dice.randrange(10)}={dice.choice(_ENDINGS)}"
        head = words.encode(f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n")
        ids = torch.tensor([head + words.encode(f"\\boxed{{{digit}}}<|im_end|>") for digit in range(10)])
        labels = ids.clone()
        labels[:, : len(head)] = -100
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
