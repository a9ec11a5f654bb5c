"""Gap between the logprobs of vLLM and of the learner in bfloat16, by the type of the products that logits are made of.

    .venv/bin/python -m benchmarks.head_dtype [--model models/addition]

For each of `head_dtype = "model"` and `"float32"`, on both sides alike: an engine of its own samples completions, and
the learner computes their logprobs with the same weights. The hidden states of both are rounded by kernels of their
own in either case; what is left out is the rounding of each logit to 8 bits.
"""

import argparse
import asyncio
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from transformers import AutoTokenizer

from benchmarks.architectures import SETTINGS, sampled
from generator.engine.options import EngineOptions, prepare_environment
from learner.training.batch import TrainSequence, flatten
from learner.training.packing import pack, shared_prefixes
from learner.training.policy import PolicyModel, load_causal_lm

RESULTS = Path(__file__).with_name("results") / "head_dtype.md"
PROMPTS = 100
Head = Literal["model", "float32"]


@dataclass(frozen=True)
class HeadGaps:
    """Absolute differences of logprobs in nats, over `tokens` sampled tokens; `other` is their mean to a learner that
    has the other head.
    """

    head: Head
    tokens: int
    mean: float
    largest: float
    other: float


def learned(model: Path, sequences: Sequence[TrainSequence], *, head: Head) -> torch.Tensor:
    """The learner's logprobs of the sampled tokens."""
    policy = PolicyModel(
        load_causal_lm(model, dtype=torch.bfloat16), settings=replace(SETTINGS, float32_head=head == "float32")
    )
    batch = flatten(list(sequences))
    row = pack(batch, np.arange(len(sequences)), prefixes=shared_prefixes(batch))
    with torch.no_grad():
        found: torch.Tensor = policy.eval()(row)[0]
    return found.float()


def prompts_of(model: Path) -> list[list[int]]:
    """Sums, as of the addition demo."""
    drawn = np.random.default_rng(0)
    sums = [f"{left:02d}+{right:02d}=" for left, right in drawn.integers(0, 100, (PROMPTS, 2)).tolist()]
    found: list[list[int]] = AutoTokenizer.from_pretrained(model)(sums, add_special_tokens=False)["input_ids"]
    return found


async def gaps_of(model: Path, *, head: Head) -> HeadGaps:
    """Of one type of products, with an engine that has ended then."""
    options = EngineOptions(
        model=str(model), dtype="bfloat16", head_dtype=head, max_model_len=64, max_num_seqs=8, kv_cache_gb=0.25,
        tokenizer=False,
    )  # fmt: skip
    prepare_environment(options)
    torch.set_num_threads(1)
    # vLLM warns at import of things that are not ours to change.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from generator.engine.engine import Engine

    engine = await Engine.start(options=options)
    try:
        sequences = await sampled(engine, label=head, prompts=prompts_of(model))
    finally:
        await engine.shutdown()
    theirs = torch.from_numpy(np.concatenate([each.behavior_logprobs[each.loss_mask] for each in sequences]))
    gap = (learned(model, sequences, head=head) - theirs).abs()
    other = (learned(model, sequences, head="model" if head == "float32" else "float32") - theirs).abs()
    return HeadGaps(head, len(theirs), float(gap.mean()), float(gap.max()), float(other.mean()))


def table(found: Sequence[HeadGaps], model: Path) -> str:
    """In Markdown."""
    lines = [
        "# Logprobs of vLLM and of the learner in bfloat16, by `head_dtype`",
        "",
        f"`python -m benchmarks.head_dtype --model {model}`, on 2 cores. Absolute differences in nats.",
        "",
        "| head_dtype on both sides | tokens | mean | largest | mean with the other one in the learner |",
        "|---|---:|---:|---:|---:|",
        *(
            f"| {each.head} | {each.tokens} | {each.mean:.2e} | {each.largest:.2e} | {each.other:.2e} |"
            for each in found
        ),
    ]
    return "\n".join([*lines, ""])


async def _measured(model: Path) -> list[HeadGaps]:
    return [await gaps_of(model, head=head) for head in ("model", "float32")]


def main() -> None:
    """Writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/addition"))
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    text = table(asyncio.run(_measured(given.model)), given.model)
    given.output.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
