r"""The `math` verifier against labels made by hand.

The labels are mathematical judgements, with these conventions where mathematics does not decide: a unit that the right
answer lacks may be added, and one that it has may be left out, but not be another one; a percentage is also its number
where that is above 1; a bare list may stand for a tuple in the same order; a decimal stands for 1/3 or pi if it is
within a millionth of it; `\log` without a base may be of base 10 or e; an equation gives the value of its name.
"""

import asyncio
from collections import Counter

from pydantic import JsonValue

from benchmarks.math_agreement import Judged, Pair, read_pairs
from protocol.rewards import ScoreError
from reward_service.config import RewardServiceConfig
from reward_service.verifier.config import WorkerConfig
from reward_service.verifier.lanes import pool_settings
from reward_service.verifier.worker_pool import VerifierJob, WorkerPool

# Several times the default, as tests may share a slow machine with others.
DEADLINE_S = 100.0


def test_the_set_holds_enough_pairs_of_every_form_and_of_either_label() -> None:
    pairs = read_pairs()
    labels = Counter(pair.equal for pair in pairs)
    assert len(pairs) >= 300
    assert min(labels.values()) >= len(pairs) / 3
    assert len({(pair.completion, pair.gold, str(pair.arguments)) for pair in pairs}) == len(pairs)


async def test_math_agrees_with_the_labels_and_no_pair_is_over_its_deadline() -> None:
    workers = WorkerConfig(count=2, compute_timeout_s=DEADLINE_S, start_timeout_s=200.0, max_attempts=1)
    killed: list[None] = []
    pool = WorkerPool(
        path="reward_service.verifiers.mathematics.math_answer:math_answer",
        settings=pool_settings(RewardServiceConfig(workers=workers), trusted=False),
        on_kill=lambda: killed.append(None),
    )
    async with pool:
        judged = await asyncio.gather(*(judge(pair, pool=pool) for pair in read_pairs()))
    disagreements = [str(one) for one in judged if not one.agrees]
    print(*disagreements, sep="\n")
    assert killed == []
    assert len(disagreements) <= 0.02 * len(judged), disagreements


async def judge(pair: Pair, *, pool: WorkerPool) -> Judged:
    golds: JsonValue = pair.gold if isinstance(pair.gold, str) else list(pair.gold)
    job = VerifierJob(completion=pair.completion, prompt="", arguments={"answer": golds, **pair.arguments})
    outcome = await pool.run(job=job, deadline=asyncio.get_running_loop().time() + 1000)
    result = outcome.result
    return Judged(pair=pair, verdict=str(result) if isinstance(result, ScoreError) else result.reward)
