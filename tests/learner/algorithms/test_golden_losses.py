"""Policy losses against the numbers of their authors' code, or of the best known implementation.

Each function below was run on the tokens of `golden.py`; loss and gradient by the policy's logprobs are what came out.

    clip, gspo, sapo, gmpo, cispo, dro,    verl-project/verl at 1dda039b, verl/trainer/ppo/core_algos.py:
    dppo, kl_cov, clip_cov                 compute_policy_loss_{vanilla,gspo,sapo,geo_mean,cispo,dro,dppo_tv,dppo_kl,
                                           kl_cov,clip_cov} and agg_loss
    kl_cov, clip_cov, again                PRIME-RL/Entropy-Mechanism-of-RL at 88505792, the same file
    dppo, again                            sail-sg/Stable-RL at c6af1d11, the same file: compute_policy_loss_with_mask
    dppo with kappa                        PrimeIntellect-ai/prime-rl at 559b4477, src/prime_rl/trainer/rl/loss.py:
                                           default_loss_fn
    luspo                                  huggingface/trl at f2cd5771, trl/trainer/grpo_trainer.py: _compute_loss
    vespo                                  FloyedShen/VESPO at aa1f3045, recipe/vespo/code/core_algos.py
    topr, kimi, reinforce                  alibaba/ROLL at 8eb27cc2, roll/pipeline/agentic/agentic_actor_pg_worker.py
    gvpo                                   jszkc/GVPO at 627aa25e, GVPO/gvpo_core_algos.py: times (n - 1) / (beta n)

Some of them add 1e-8 to a length, and have a loss that is not the objective's value: those losses are left out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from learner.algorithms import advantages, covariance, policy_loss
from learner.algorithms.knobs import Aggregation
from learner.algorithms.policy_loss import GammaWeight, PolicyLoss
from learner.algorithms.ratios import sequence_sums
from tests.learner.algorithms.differences import doubles, gradient
from tests.learner.algorithms.golden import ADVANTAGES, BEFORE, COUNT, MOVES, SEQUENCES, UNEVEN, weights_of

ALL = torch.ones(len(BEFORE), dtype=torch.bool)
Made = Callable[[Tensor, Tensor], PolicyLoss]
"""A loss of the policy's logprobs and the advantages."""


def to_proximal(loss: Callable[..., PolicyLoss], **knobs: object) -> Made:
    return lambda policy, found: loss(policy_logprobs=policy, proximal_logprobs=BEFORE, advantages=found, **knobs)


def to_behavior(loss: Callable[..., PolicyLoss], **knobs: object) -> Made:
    return lambda policy, found: loss(policy_logprobs=policy, behavior_logprobs=BEFORE, advantages=found, **knobs)


def covariances(policy: Tensor, found: Tensor) -> Tensor:
    return covariance.covariances(advantages=found, logprobs=policy.detach(), counted=ALL)


def kl_cov(policy: Tensor, found: Tensor) -> PolicyLoss:
    pulled = covariance.largest(covariances(policy, found), share=0.2, counted=ALL)
    return to_proximal(policy_loss.kl_cov, pulled=pulled, pull=1.0)(policy, found)


def clip_cov(policy: Tensor, found: Tensor) -> PolicyLoss:
    drawn = covariance.drawn(covariances(policy, found), low=0.05, high=5.0, share=1.0, counted=ALL, seed=1)
    return clip(policy, torch.where(drawn, 0.0, found))


def gvpo(policy: Tensor, found: Tensor) -> PolicyLoss:
    implied = sequence_sums(values=MOVES, sequences=SEQUENCES, count=COUNT)
    made = advantages.group_variance(
        rewards=doubles(1.0, 0.2, -0.5, 0.4), groups=torch.zeros(4).long(), log_ratios=implied, beta=0.1
    )
    return policy_loss.likelihood_gain(policy_logprobs=policy, advantages=made[SEQUENCES])


clip = to_proximal(policy_loss.clip, clip_low=0.2, clip_high=0.28)
dual_clip = to_proximal(policy_loss.clip, clip_low=0.2, clip_high=0.28, dual_clip=1.3)
whole = {"sequences": SEQUENCES, "count": COUNT}
sequence_clip = to_proximal(policy_loss.sequence_clip, clip_low=0.1, clip_high=0.1, **whole)
gmpo = to_proximal(policy_loss.gmpo, clip_low=0.2, clip_high=0.2, **whole)
sapo = to_proximal(policy_loss.sapo, temperature_positive=1.0, temperature_negative=1.05)
kimi = to_proximal(policy_loss.kimi, tau=0.1)
cispo = partial(to_behavior, policy_loss.cispo, clip_high=0.28)
dppo = partial(to_behavior, policy_loss.dppo, delta_low=0.1, delta_high=0.15)
vespo = to_behavior(policy_loss.vespo, positive=GammaWeight(2.0, 3.0), negative=GammaWeight(3.0, 2.0), **whole)


@dataclass(frozen=True)
class Golden:
    """`slopes` [10] are of the loss, aggregated, by the policy's logprobs; `loss` is None where it is no objective."""

    made: Made
    aggregation: Aggregation
    loss: float | None
    slopes: tuple[float, ...]
    found: Tensor = ADVANTAGES


# fmt: off
GOLDEN = {
    "clip": Golden(clip, "token", -0.4284632635, (
        -0.153030201, -0.1111227331, 0, 0.09110594, 0, 0.1326205102, -0.0832648619, -0.0397268243, -0.0929467394,
        -0.076098354)),
    "clip_by_sequence_mean": Golden(clip, "sequence_mean", -0.0491099446, (
        -0.1275251671, -0.0926022773, 0, 0.22776485, 0, 0.1657756369, -0.0520405386, -0.0248292651, -0.058091712,
        -0.0475614711)),
    "clip_by_sequence_sum": Golden(clip, "sequence_sum", -1.0711581588, (
        -0.3825755025, -0.2778068328, 0, 0.22776485, 0, 0.3315512754, -0.2081621548, -0.0993170608, -0.2323668485,
        -0.1902458849)),
    "clip_by_constant": Golden(clip, "constant", -0.2677895397, (
        -0.0956438756, -0.0694517082, 0, 0.0569412125, 0, 0.0828878189, -0.0520405387, -0.0248292652, -0.0580917121,
        -0.0475614712)),
    "dual_clip": Golden(dual_clip, "token", -0.5268401422, (
        -0.1632322144, -0.0963063687, 0, 0, 0, 0.1436722193, -0.1040810774, -0.0248292652, -0.1045650818,
        -0.076098354), UNEVEN),
    "gspo": Golden(sequence_clip, "sequence_mean", -0.0516366331, (
        *[-0.1279509602] * 3, 0.2277648478, *[0.1391615223] * 2, *[-0.0434679117] * 4)),
    "gspo_of_tokens": Golden(sequence_clip, "sequence_mean", -0.1034871419, (
        -0.1364810242, -0.1108908322, -0.1535411523, 0.2277648478, 0.0927743482, 0.1507583158, -0.0543348896,
        -0.0271674448, -0.0489014006, -0.0434679117), UNEVEN),
    "luspo": Golden(sequence_clip, "sequence_sum", -1.0626342924, (
        *[-0.383852882] * 3, 0.22776485, *[0.2783230459] * 2, *[-0.1738716471] * 4)),
    "sapo": Golden(sapo, "sequence_mean", -0.265883975, (
        -0.1275121574, -0.0910643802, -0.1698179338, 0.1900973733, 0.1152587282, 0.1652712676, -0.052018876,
        -0.0233203025, -0.057713006, -0.0475332003)),
    "gmpo": Golden(gmpo, "sequence_mean", -0.0258701257, (
        *[-0.1217107179] * 2, 0, 0.2277648441, 0, 0.1426844123, *[-0.0434679116] * 4)),
    "cispo": Golden(cispo(clip_low=1.0), "token", 0.1257883488, (
        -0.153030201, -0.1111227331, -0.192, 0.064, 0.093456094, 0.1326205102, -0.0832648619, -0.0397268243,
        -0.0929467394, -0.076098354)),
    "cispo_bounded_below": Golden(cispo(clip_low=0.2), "token", 0.2296887779, (
        -0.153030201, -0.12, -0.192, 0.064, 0.096, 0.1326205102, -0.0832648619, -0.064, -0.0929467394,
        -0.076098354)),
    "dro": Golden(to_behavior(policy_loss.dro, beta=0.5), "token", 0.36835, (
        -0.149, -0.165, -0.1325, 0.08, 0.1075, 0.125, -0.078, -0.115, -0.0725, -0.0825)),
    "dppo": Golden(dppo(kappa=0.0), "token", None, (
        -0.1632322144, -0.0963063687, 0, 0.09110594, 0, 0.1436722193, -0.1040810774, -0.0248292652, -0.1045650818,
        -0.076098354), UNEVEN),
    "dppo_by_divergence": Golden(dppo(kappa=0.0, kl_limit=0.02), "token", None, (
        -0.1632322144, -0.0963063687, 0, 0.09110594, 0, 0.1436722193, 0, -0.0248292652, -0.1045650818,
        -0.076098354), UNEVEN),
    "dppo_with_kappa": Golden(dppo(kappa=1e-3), "token", -0.334218002138, (
        -0.1632282144, -0.0963663687, 0.00007, 0.09122594, -0.00005, 0.1436922193, -0.1040730774, -0.0249692652,
        -0.1045350818, -0.076108354), UNEVEN),
    "kl_cov": Golden(kl_cov, "token", -0.4148673019, (
        -0.053030201, -0.1111227331, -0.1128601323, 0.09110594, 0.093456094, 0.1326205102, -0.0832648619,
        -0.0397268243, -0.0929467394, -0.076098354)),
    "clip_cov": Golden(clip_cov, "token", None, (0, -0.1111227331, 0, 0, 0, 0, 0, -0.0397268243, 0, 0)),
    "vespo": Golden(vespo, "token", 0.4151224158, (
        *[-0.1388106467] * 3, 0.0584274261, *[0.1010965287] * 2, *[-0.0944810649] * 4)),
    "topr": Golden(to_behavior(policy_loss.topr), "token", 0.356553538920, (
        *[-0.15] * 3, 0.05, 0.093456094, 0.12, *[-0.08] * 4)),
    "kimi": Golden(kimi, "token", 0.34511, (
        -0.1498, -0.153, -0.1465, 0.056, 0.1175, 0.121, -0.0796, -0.087, -0.0785, -0.0805)),
    "reinforce": Golden(to_behavior(policy_loss.reinforce, cap=1.0), "token", 0.143833994812, (
        -0.15, -0.1111227331, -0.15, 0.05, 0.093456094, 0.12, -0.08, -0.0397268243, -0.08, -0.076098354)),
    "gvpo": Golden(gvpo, "sequence_sum", None, (
        *[-0.17925] * 3, 0.034, *[0.19025] * 2, *[-0.045] * 4)),
}
# fmt: on


@pytest.mark.parametrize("name", GOLDEN)
def test_loss_and_gradient_are_those_of_the_public_code(name: str) -> None:
    golden = GOLDEN[name]
    weights = weights_of(golden.aggregation)

    def total(policy: Tensor) -> Tensor:
        return (weights * golden.made(policy, golden.found).losses).sum()

    if golden.loss is not None:
        assert float(total(BEFORE + MOVES)) == pytest.approx(golden.loss, abs=1e-8)
    assert gradient(total, BEFORE + MOVES).tolist() == pytest.approx(list(golden.slopes), abs=1e-8)
