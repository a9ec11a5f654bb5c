"""Gap between the logprobs of vLLM and of the learner for a mixture of experts, with router replay and without it.

    .venv/bin/python -m benchmarks.router_replay

A random Qwen3-MoE is sampled by vLLM's CPU engine, which tells the experts of its tokens; the learner computes the same
tokens with the same weights, once with its own routing and once with the engine's. In the last rows its weights have
moved a little, as they do while data is under way.
"""

import argparse
import asyncio
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.architectures import SETTINGS
from generator.engine.options import EngineOptions, prepare_environment
from learner.algorithms.ratios import mismatch
from learner.training.batch import SequenceRouting, TrainSequence, flatten
from learner.training.packing import pack, shared_prefixes
from learner.training.policy import PolicyModel, load_causal_lm
from learner.training.router_replay import RouterReplay
from learner.training.routing import ExpertWatch
from protocol.generation import Sampling

if TYPE_CHECKING:
    from generator.engine.engine import Engine

RESULTS = Path(__file__).with_name("results") / "router_replay.md"
LAYERS, EXPERTS, CHOSEN, VOCABULARY = 6, 32, 4, 128
PROMPTS, COMPLETIONS, PROMPT_TOKENS, MAX_TOKENS = 16, 4, 12, 32
MOVED = 0.02
"""Change of each weight, as a share of its size, in the last rows."""
Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class ReplayGaps:
    """Of sampled tokens: the mean estimate of KL(engine || learner), mean and largest difference of logprobs in nats,
    and the share of all choices of experts that the learner's own routers make otherwise.
    """

    what: str
    replay: bool
    kl: float
    mean: float
    largest: float
    changed: float


def write_model(folder: Path) -> Path:
    """A random mixture whose routers are undecided now and then, as those of trained ones are."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=128, moe_intermediate_size=64,
        num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=4, head_dim=32, num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN, norm_topk_prob=True, max_position_embeddings=256, initializer_range=0.1,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


async def sampled(engine: "Engine") -> list[TrainSequence]:
    """Some completions of each prompt, with the logprobs and the experts that the engine tells."""
    sequences = []
    for number in range(PROMPTS):
        prompt = tuple(np.random.default_rng(number).integers(0, VOCABULARY, PROMPT_TOKENS).tolist())
        made: list[tuple[list[int], list[float], list[Any]]] = [([], [], []) for _ in range(COMPLETIONS)]
        asked = engine.generate(
            request_id=f"r-{number}", prompt_token_ids=prompt, n=COMPLETIONS, routed_experts=True,
            sampling=Sampling(max_tokens=MAX_TOKENS, seed=7 * number),
        )  # fmt: skip
        async for some in asked:
            for part in some:
                ids, logprobs, rows = made[part.index]
                ids.extend(part.token_ids)
                logprobs.extend(part.behavior_logprobs)
                rows.extend([] if part.routed_experts is None else [part.routed_experts.rows()])
        for ids, logprobs, rows in made:
            token_ids = np.array([*prompt, *ids], dtype=np.int32)
            told = np.concatenate([*rows, np.zeros((1, LAYERS, CHOSEN), dtype=np.uint8)])
            sequence = TrainSequence.supervised(token_ids=token_ids, loss_mask=np.arange(len(token_ids)) >= len(prompt))
            behavior = np.array([0.0] * len(prompt) + logprobs, dtype=np.float32)
            known = np.arange(len(token_ids)) < len(token_ids) - 1
            sequences.append(replace(sequence, behavior_logprobs=behavior, routing=SequenceRouting(told, known)))
    return sequences


@torch.no_grad()
def gaps_of(
    model: Path, sequences: Sequence[TrainSequence], *, dtype: Dtype, replay: bool, moved: float, what: str
) -> ReplayGaps:
    """Of a learner in `dtype`, whose weights have moved by a share of their size."""
    policy = PolicyModel(load_causal_lm(model, dtype=torch.float32), settings=SETTINGS).eval()
    drawn = torch.Generator().manual_seed(1)
    for parameter in policy.parameters():
        parameter.mul_(1 + moved * torch.randn(parameter.shape, generator=drawn))
    policy = policy.to(getattr(torch, dtype))
    policy.replay, policy.watch = RouterReplay(policy.causal_lm), ExpertWatch(policy.causal_lm)
    batch = flatten(list(sequences))
    row = pack(batch, np.arange(len(sequences)), prefixes=shared_prefixes(batch))
    *_, routing = policy(row)
    changed = float(routing.changed / routing.given)
    if not replay:
        policy.replay = None
    found = policy(row)[0].double()
    theirs = row.behavior_logprobs.double()
    gap = (found - theirs).abs()
    kl = mismatch(proximal_logprobs=found, behavior_logprobs=theirs)
    return ReplayGaps(what, replay, float(kl.mean()), float(gap.mean()), float(gap.max()), changed)


async def measured(folder: Path) -> tuple[list[ReplayGaps], int]:
    """All rows of the table, and of how many tokens; one engine, in bfloat16."""
    model = write_model(folder)
    options = EngineOptions(
        model=str(model), dtype="bfloat16", max_model_len=128, max_num_seqs=16, kv_cache_gb=0.25, tokenizer=False,
        routed_experts="on",
    )  # fmt: skip
    prepare_environment(options)
    torch.set_num_threads(1)
    # vLLM warns at import of things that are not ours to change.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from generator.engine.engine import Engine

    engine = await Engine.start(options=options)
    try:
        sequences = await sampled(engine)
    finally:
        await engine.shutdown()
    cases: tuple[tuple[str, Dtype, float], ...] = (
        ("bfloat16", "bfloat16", 0.0),
        ("float32", "float32", 0.0),
        (f"bfloat16, weights moved by {MOVED:.0%}", "bfloat16", MOVED),
    )
    found = [
        gaps_of(model, sequences, dtype=dtype, replay=replay, moved=moved, what=what)
        for what, dtype, moved in cases
        for replay in (False, True)
    ]
    return found, sum(int(each.loss_mask.sum()) for each in sequences)


def table(found: Sequence[ReplayGaps], *, tokens: int) -> str:
    """In Markdown."""
    lines = [
        "# Logprobs of vLLM and of the learner for a mixture of experts, with router replay and without it",
        "",
        f"`python -m benchmarks.router_replay`. A random Qwen3-MoE of {LAYERS} layers with {EXPERTS} experts, "
        f"{CHOSEN} of them for a token, sampled by vLLM's CPU engine in bfloat16; {tokens} sampled tokens. In nats.",
        "",
        "| learner | routers take the engine's experts | KL | mean difference | largest | choices that its own routers "
        "make otherwise |",
        "|---|---|---:|---:|---:|---:|",
        *(
            f"| {each.what} | {'yes' if each.replay else 'no'} | {each.kl:.2e} | {each.mean:.2e} | "
            f"{each.largest:.2e} | {each.changed:.2%} |"
            for each in found
        ),
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    """Writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found, tokens = asyncio.run(measured(Path(folder)))
    text = table(found, tokens=tokens)
    given.output.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
