"""The models of a rank: what is trained, and those that it is compared with in passes without gradient.

The passes go over a whole step, before its first update, and give what advantages and losses compare with:

microbatches of this rank ─▶ policy, reference, teacher, critic ─▶ sum over ranks ─▶ the same numbers on every rank
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from learner.algorithms.old_tokens import OldTokenBound
from learner.algorithms.preset import CarriedState, LossTokens, Passes, Preset, ScoredBatch
from learner.training.adapters import add_adapters
from learner.training.batch import FlatBatch
from learner.training.compiled import check_compilable, check_compiled, compile_layers
from learner.training.config import TrainingConfig
from learner.training.deferred import DeferredFiles
from learner.training.engine import TrainingEngine, sharder
from learner.training.layouts import takes_packed_rows
from learner.training.logprobs import Chunking
from learner.training.packing import Microbatch
from learner.training.policy import LogprobSettings, PolicyModel, load_causal_lm, torch_dtype
from learner.training.policy_average import PolicyAverage
from learner.training.ranks import summed_over_ranks
from learner.training.recomputing import recompute_layers
from learner.training.reference import FrozenPolicy, Reference, open_reference
from learner.training.router_replay import RouterReplay
from learner.training.routing import ExpertWatch, RoutingSums
from learner.training.row_parts import check_shareable
from learner.training.score_model import (
    Critic,
    CriticHead,
    CriticTargets,
    ScoreModel,
    load_score_model,
    value_metrics,
)
from learner.training.self_check import check_policy, check_scores, gap_between
from learner.training.sequence_groups import ALONE, SequenceGroup
from learner.training.sharded_load import Shard
from learner.training.unfit_model import UnfitModel

logger = logging.getLogger(__name__)

Output = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, RoutingSums | None]
"""Output of a trained model: see PolicyModel.forward and ScoreModel.forward."""
Score = Callable[[Microbatch], Tensor]
"""A number for each of the microbatch's N targets, [N]."""


@dataclass(frozen=True)
class Scorers:
    """Models that score tokens; None for those that the algorithm does not need."""

    proximal: Score
    reference: Score | None = None
    teacher: Score | None = None
    values: Score | None = None
    proximal_with_norms: Score | None = None
    """Two numbers for each target, [2, N]: the first is `proximal`'s."""


@dataclass(frozen=True, kw_only=True)
class TokenScores:
    """Float32 [N], 0 at tokens that are not trained, on the CPU; None for what no pass was run for."""

    proximal_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    values: Tensor | None = None
    logit_norms: Tensor | None = None

    def anchored(self, parts: Sequence[tuple[Tensor, Tensor]], *, tokens: int) -> TokenScores:
        """With the proximal logprobs of an update that began with the step, by places: all that later epochs of this
        rank look at. So a pass without gradient is saved.
        """
        found = torch.zeros(tokens)
        for places, logprobs in parts:
            found[places] = logprobs.float().cpu()
        return replace(self, proximal_logprobs=found)


@dataclass(frozen=True, kw_only=True)
class Credit:
    """The preset's result for the whole step, [N] on the CPU; 0 and False at tokens that are not trained.

    `advantages` and `returns` float32; `kept` bool: tokens that take part in the loss; `pulled` bool: those that the
    loss treats unlike others, None where it does not. `carried` is for the next step.
    """

    advantages: Tensor
    kept: Tensor
    returns: Tensor | None
    means: dict[str, float]
    carried: CarriedState
    correction_scale: float = 1.0
    step_scale: float = 1.0
    pulled: Tensor | None = None
    entropy_coefficient: float | None = None

    def kept_lengths(self, batch: FlatBatch) -> NDArray[np.int64]:
        """Number of tokens of each sequence that take part in the loss, [S]."""
        return np.add.reduceat(self.kept.numpy().astype(np.int64), batch.starts)

    def moves(self, batch: FlatBatch) -> NDArray[np.bool_]:
        """True where one of these has an advantage, [S]; one that is not a number is one."""
        return np.logical_or.reduceat((self.kept & (self.advantages != 0)).numpy(), batch.starts)


def score(
    batch: FlatBatch,
    microbatches: Sequence[Microbatch],
    *,
    scorers: Scorers,
    passes: Passes,
    group: SequenceGroup = ALONE,
) -> TokenScores:
    """Runs the passes on this rank's microbatches, which the ranks of `group` have alike, and shares them. All ranks
    must call it.

    Logprobs that came with the batch are taken as they are; those of a teacher may have come for some sequences alone.
    """

    def run(wanted: bool, scorer: Score | None, known: NDArray[np.float32] | None = None) -> Tensor | None:
        if known is not None and len(known):
            return torch.from_numpy(known)
        if not wanted:
            return None
        assert scorer is not None, "a pass without a model to run it"
        return _everywhere(microbatches, scorer, group=group, tokens=len(batch.token_ids))

    def taught() -> Tensor | None:
        known, asked = batch.teacher_logprobs, batch.teachers >= 0
        if not len(known) or not passes.teacher or not asked.any():
            return run(passes.teacher, scorers.teacher, known)
        found = run(True, scorers.teacher)
        assert found is not None, "a pass that was wanted"
        return torch.where(torch.from_numpy(asked[batch.owners]), found, torch.from_numpy(known))

    proximal, norms = None, None
    if passes.logit_norms:
        assert scorers.proximal_with_norms is not None, "a pass without a model to run it"
        proximal, norms = _everywhere(
            microbatches, scorers.proximal_with_norms, group=group, tokens=len(batch.token_ids), each=2
        )
    return TokenScores(
        proximal_logprobs=run(passes.proximal, scorers.proximal) if proximal is None else proximal,
        logit_norms=norms,
        reference_logprobs=run(passes.reference, scorers.reference, batch.reference_logprobs),
        teacher_logprobs=taught(),
        values=run(passes.values, scorers.values),
    )


def _everywhere(
    microbatches: Sequence[Microbatch], scorer: Score, *, group: SequenceGroup, tokens: int, each: int = 1
) -> Tensor:
    """A number for each token, [N], or with `each` so many, [each, N]."""
    values = torch.zeros(tokens) if each == 1 else torch.zeros(each, tokens)
    with torch.no_grad():
        for microbatch in microbatches:
            values[..., microbatch.places] = scorer(microbatch).float().cpu()
    return summed_over_ranks(group.once(values))


def credit(
    batch: FlatBatch,
    scores: TokenScores,
    *,
    preset: Preset,
    carried: CarriedState,
    old_tokens: OldTokenBound | None = None,
) -> Credit:
    """The preset's advantages, and which tokens it keeps; `carried` is what the step before left, `old_tokens` the
    bound on those that are older than others may be.
    """
    trained = torch.from_numpy(np.flatnonzero(batch.loss_mask))
    tokens = len(batch.token_ids)
    kept = torch.zeros(tokens, dtype=torch.bool)
    kept[trained] = True
    if preset.advantages is None:
        return Credit(advantages=torch.zeros(tokens), kept=kept, returns=None, means={}, carried=carried)
    made = preset.advantages(replace(_scored(batch, scores, trained), carried=carried, old_tokens=old_tokens))
    if made.kept is not None:
        kept[trained] = made.kept
    return Credit(
        advantages=_spread(made.advantages, trained, tokens=tokens),
        kept=kept,
        returns=None if made.returns is None else _spread(made.returns, trained, tokens=tokens),
        means=dict(made.means),
        carried=carried if made.carried is None else made.carried,
        correction_scale=made.correction_scale,
        step_scale=made.step_scale,
        entropy_coefficient=made.entropy_coefficient,
        pulled=None if made.pulled is None else _spread(made.pulled, trained, tokens=tokens) > 0,
    )


def _spread(values: Tensor, trained: Tensor, *, tokens: int) -> Tensor:
    spread = torch.zeros(tokens)
    spread[trained] = values.float()
    return spread


def _scored(batch: FlatBatch, scores: TokenScores, trained: Tensor) -> ScoredBatch:
    def of_trained(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[trained].double()

    places, firsts = trained.numpy(), batch.firsts
    return ScoredBatch(
        rewards=torch.from_numpy(batch.rewards[firsts]),
        groups=torch.from_numpy(batch.groups[firsts]),
        truncated=torch.from_numpy(batch.truncated[firsts]),
        components=torch.from_numpy(batch.components.reshape(len(batch.lengths), -1)[firsts]),
        sequences=torch.from_numpy(batch.trajectories[batch.owners[places]]),
        contexts=torch.from_numpy(batch.owners[places]),
        token_ids=torch.from_numpy(batch.token_ids[places]).long(),
        turns=torch.from_numpy(batch.turns[places]),
        turn_states=torch.from_numpy(batch.turn_states),
        turn_branches=torch.from_numpy(batch.turn_branches),
        turn_rewards=torch.from_numpy(batch.turn_rewards),
        lags=torch.from_numpy(batch.lags[places]).long(),
        behavior_logprobs=torch.from_numpy(batch.behavior_logprobs[places]).double(),
        proximal_logprobs=of_trained(scores.proximal_logprobs),
        reference_logprobs=of_trained(scores.reference_logprobs),
        teacher_logprobs=of_trained(scores.teacher_logprobs),
        values=of_trained(scores.values),
        logit_norms=of_trained(scores.logit_norms),
        roles=torch.from_numpy(batch.roles[firsts]),
        greedy_rewards=torch.from_numpy(batch.greedy_rewards[firsts]),
        mismatched=torch.from_numpy(batch.mismatched[firsts]),
        taught=None if batch.taught is None else torch.from_numpy(batch.taught[places]),
    )


@dataclass(frozen=True)
class StepData:
    """Data that all updates of a step draw on; arrays over the batch's N tokens or S sequences."""

    batch: FlatBatch
    scores: TokenScores
    credit: Credit
    sequence_weights: NDArray[np.float64]
    """[S]: the weight of each kept token of a sequence in its update's loss."""
    critic_targets: CriticTargets | None
    good_weights: NDArray[np.float64] | None
    """[S]: the same among good sequences alone; None where the algorithm asks for none."""
    taught: Tensor | None = None
    """[N] bool: false at tokens of which the teacher has nothing to say; None if there are none."""
    observed_weights: NDArray[np.float64] | None = None
    """[S]: the weight of each token that the environment said in a sequence, the same for all of an update: one over
    their number. None where the algorithm asks for none.
    """

    def asked(self, microbatch: Microbatch) -> Microbatch:
        """The microbatch as what is trained is given it: with the environment's tokens, where these are wanted."""
        return microbatch if self.observed_weights is None else microbatch.observing()

    def told(self, microbatch: Microbatch, output: Output) -> tuple[Output, dict[str, Any]]:
        """Parts what a model gave for `asked(microbatch)`: that of the microbatch's own targets, and the fields of
        LossTokens that are of the environment's tokens.
        """
        if self.observed_weights is None:
            return output, {}
        count, (logprobs, entropy, candidates, states, routing) = len(microbatch.targets), output

        def own(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[:count]

        weight = float(self.observed_weights[microbatch.members.numpy()].max(initial=0.0))
        observed = {"observed_logprobs": logprobs[count:], "observed_weight": weight}
        return (logprobs[:count], own(entropy), own(candidates), own(states), routing), observed


def loss_tokens(data: StepData, microbatch: Microbatch, *, logprobs: Tensor, entropy: Tensor | None) -> LossTokens:
    """The microbatch as a loss sees it, from what the model gives for it."""
    device, members, places, pairs = logprobs.device, microbatch.members, microbatch.places, microbatch.pairs
    scores = data.scores

    def at_tokens(values: Tensor) -> Tensor:
        return values[places].to(device)

    sequence_weights = torch.from_numpy(data.sequence_weights).float()[members].to(device)
    good_weights = None
    if data.good_weights is not None:
        good_weights = torch.from_numpy(data.good_weights).float()[members].to(device)[microbatch.sequences]
    proximal, reference = scores.proximal_logprobs, scores.reference_logprobs
    return LossTokens(
        policy_logprobs=logprobs,
        proximal_logprobs=logprobs.detach() if proximal is None else at_tokens(proximal),
        behavior_logprobs=microbatch.behavior_logprobs,
        advantages=at_tokens(data.credit.advantages),
        lags=microbatch.lags,
        weights=sequence_weights[microbatch.sequences] * at_tokens(data.credit.kept),
        good_weights=None if good_weights is None else good_weights * at_tokens(data.credit.kept),
        sequences=microbatch.sequences,
        sequence_weights=sequence_weights,
        labels=torch.from_numpy(data.batch.labels)[members].to(device),
        pairs=pairs,
        margins=torch.from_numpy(data.batch.margins).float()[members].to(device)[pairs[:, 0]],
        reference_logprobs=None if reference is None else at_tokens(reference),
        entropy=entropy,
        pulled=None if data.credit.pulled is None else at_tokens(data.credit.pulled),
        taught=None if data.taught is None else at_tokens(data.taught),
        correction_scale=data.credit.correction_scale,
        entropy_coefficient=data.credit.entropy_coefficient,
    )


def critic_targets(
    batch: FlatBatch, scores: TokenScores, made: Credit, weights: NDArray[np.float64]
) -> CriticTargets | None:
    """Targets of a critic for the step; None if there is none."""
    if made.returns is None or scores.values is None:
        return None
    owners = torch.from_numpy(batch.owners)
    of_tokens = torch.from_numpy(weights).float()[owners] * made.kept
    return CriticTargets(old_values=scores.values, returns=made.returns, weights=of_tokens)


def critic_metrics(data: StepData, losses: Sequence[float]) -> dict[str, float]:
    """Metrics of its updates, which had these losses."""
    targets = data.critic_targets
    if targets is None or not losses:
        return {}
    trained = torch.from_numpy(data.batch.loss_mask)
    metrics = value_metrics(values=targets.old_values[trained], returns=targets.returns[trained])
    return {"value_loss": sum(losses) / len(losses), **metrics}


@dataclass(frozen=True, kw_only=True)
class TokenValues:
    """Values that the learner computed of each token of a step's batch, float32 [N]; NaN where it computed nothing, as
    outside of the loss mask. Logprobs and entropies in nats: of the first update that a token was in.
    """

    learner_logprobs: NDArray[np.float32]
    entropies: NDArray[np.float32]
    advantages: NDArray[np.float32]


def token_values(
    batch: FlatBatch,
    made: Credit,
    parts: Sequence[tuple[Tensor, Tensor, Tensor | None]],
    *,
    group: SequenceGroup = ALONE,
) -> TokenValues:
    """Of this rank's microbatches their places, logprobs and entropies. Every rank must call it: each token is in the
    microbatches of one of them, or of one `group`.
    """
    trained = torch.from_numpy(batch.loss_mask)
    found = torch.zeros(3, len(trained))
    for places, logprobs, entropy in parts:
        found[0, places] = logprobs.float().cpu()
        found[1, places] = torch.nan if entropy is None else entropy.float().cpu()
        found[2, places] = 1.0
    logprobs, entropies, seen = summed_over_ranks(group.once(found))
    unknown = ~trained | (seen == 0)
    return TokenValues(
        learner_logprobs=logprobs.masked_fill(unknown, torch.nan).numpy(),
        entropies=entropies.masked_fill(unknown, torch.nan).numpy(),
        advantages=made.advantages.float().masked_fill(~trained, torch.nan).numpy(),
    )


@dataclass(frozen=True)
class Models:
    """`trained` under its `engine`; None for what the algorithm does not need."""

    trained: PolicyModel | ScoreModel
    engine: TrainingEngine[Output]
    reference: Reference | None
    teachers: LocalTeachers
    critic: Critic | CriticHead | None
    average: PolicyAverage | None = None
    group: SequenceGroup = ALONE
    """The ranks that share this one's rows."""

    @property
    def scorers(self) -> Scorers:
        """Models that can be asked for a number at each token."""
        return Scorers(
            proximal=lambda microbatch: self.engine.forward(microbatch)[0],
            reference=None if self.reference is None else self.reference.logprobs,
            teacher=self.teachers.logprobs if self.teachers else None,
            values=None if self.critic is None else self.critic.values,
            proximal_with_norms=self._logprobs_with_norms,
        )

    def _logprobs_with_norms(self, microbatch: Microbatch) -> Tensor:
        policy = self.trained
        assert isinstance(policy, PolicyModel), "what an algorithm trains that asks for norms"
        with policy.telling_norms():
            logprobs, norms, *_ = self.engine.forward(microbatch)
        assert norms is not None, "the policy was told to give them"
        return torch.stack([logprobs, norms])

    @property
    def engines(self) -> tuple[TrainingEngine[Any], ...]:
        """Engines of what is trained and, if there is one, of its critic."""
        return (self.engine,) if self.critic is None else (self.engine, self.critic.engine)

    @property
    def skipped(self) -> int:
        """Updates of policy and critic that were left out since their gradient was not finite."""
        return sum(engine.skipped for engine in self.engines)

    @property
    def skipped_in_row(self) -> int:
        """Number of the newest updates that were skipped one after the other, by the model with more of them."""
        return max(engine.skipped_in_row for engine in self.engines)

    def has_finite_weights(self) -> bool:
        """True if this rank's part of what is trained is finite."""
        critic = self.critic is None or self.critic.engine.has_finite_weights()
        return critic and self.engine.has_finite_weights()

    def save(self, directory: Path, *, later: DeferredFiles | None = None) -> None:
        """Writes what is trained, each rank its part. Raises OSError on all ranks if one cannot write."""
        self.engine.save(directory, later=later)
        if self.critic is not None:
            self.critic.save(directory, later=later)

    def load(self, directory: Path) -> None:
        """Reads what `save` wrote, and the reference. Raises FileNotFoundError."""
        self.engine.load(directory)
        if self.reference is not None:
            self.reference.load(directory)
        if self.average is not None:
            self.average.load(directory)
        if self.critic is not None:
            self.critic.load(directory)

    def close(self) -> None:
        """Releases the models."""
        self.engine.close()
        self.teachers.close()
        for other in (self.reference, self.critic):
            if other is not None:
                other.close()
        self.group.close()


class LocalTeachers:
    """Teachers by index; a microbatch says for each of its sequences which one to ask."""

    def __init__(self, models: Sequence[FrozenPolicy]) -> None:
        self._models = models

    def __bool__(self) -> bool:
        return bool(self._models)

    def logprobs(self, microbatch: Microbatch) -> Tensor:
        """Logprobs [N] of the microbatch's targets, each by its sequence's teacher."""
        wanted = microbatch.teachers[microbatch.sequences.cpu()].to(microbatch.targets.device)
        found = torch.zeros(len(microbatch.targets), device=microbatch.targets.device)
        for index, model in enumerate(self._models):
            found = torch.where(wanted == index, model.logprobs(microbatch).float(), found)
        return found

    def candidates(self, microbatch: Microbatch, *, count: int) -> tuple[Tensor, Tensor]:
        """Most probable tokens int64 [N, count] by the teacher of each target's sequence, and their logprobs."""
        wanted = microbatch.teachers[microbatch.sequences.cpu()].to(microbatch.targets.device)[:, None]
        tops = [model.top_candidates(microbatch, count=count) for model in self._models]
        token_ids, logprobs = tops[0].token_ids, tops[0].logprobs
        for index, top in enumerate(tops[1:], start=1):
            token_ids = torch.where(wanted == index, top.token_ids, token_ids)
            logprobs = torch.where(wanted == index, top.logprobs, logprobs)
        return token_ids, logprobs

    def close(self) -> None:
        """Releases the teachers."""
        for model in self._models:
            model.close()


def open_models(
    path: Path,
    *,
    config: TrainingConfig,
    preset: Preset,
    teachers: Sequence[Path],
    device: torch.device,
    average: float | None = None,
) -> Models:
    """Loads what the preset needs onto `device`; with ZeRO-3 no rank holds a whole model. The process group must be
    open. `average` is the decay of the policy's average, if that teaches.
    """
    shard, group = (
        sharder(config),
        SequenceGroup.opened(config.sequence_parallel, timeout_s=config.collective_timeout_s),
    )
    if preset.trains_scores:
        scores = new_score_model(path, config=config, shard=shard, group=group)
        scores.watch = _watch_of(scores.classifier, path, config=config)
        engine: TrainingEngine[Output] = TrainingEngine(
            scores, config=config, device=device, alignment=config.alignment
        )
        gap = check_scores(scores, path, compute=lambda microbatch: engine.forward(microbatch)[0])
        if config.compile:
            _compile(scores.classifier, path, engine=engine, allowed=gap.allowed)
        none = LocalTeachers(())
        return Models(trained=scores, engine=engine, reference=None, teachers=none, critic=None, group=group)
    entropy = (config.report_entropy, preset.entropy_gradient)
    policy = new_policy(path, config=config, entropy=entropy, adapted=config.lora.enabled, shard=shard, group=group)
    policy.watch = _watch_of(policy.causal_lm, path, config=config)
    if preset.passes.values and config.critic.kind == "head":
        policy.settings = replace(policy.settings, with_states=True)
    engine = TrainingEngine(policy, config=config, device=device, alignment=config.alignment)
    gap = check_policy(policy, path, compute=lambda microbatch: engine.forward(microbatch)[0])
    if preset.samples_policy:
        policy.replay = _replay_of(policy, path, engine=engine, config=config, allowed=gap.allowed)
    if config.compile:
        _compile(policy.causal_lm, path, engine=engine, allowed=gap.allowed)

    def frozen(folder: Path) -> FrozenPolicy:
        model = new_policy(folder, config=config, entropy=(False, False), adapted=False, shard=shard, group=group)
        found = FrozenPolicy(model, config=config, device=device)
        if folder != path:
            check_policy(model, folder, compute=found.logprobs)
        return found

    return Models(
        trained=policy,
        engine=engine,
        reference=open_reference(policy, engine=engine, config=config, load=lambda: frozen(path))
        if preset.passes.reference
        else None,
        teachers=LocalTeachers([frozen(folder) for folder in teachers]),
        critic=_critic(path, policy, engine, config=config, preset=preset, device=device)
        if preset.passes.values
        else None,
        average=None if average is None else PolicyAverage(engine, decay=average),
        group=group,
    )


def _compile(inner: nn.Module, path: Path, *, engine: TrainingEngine[Any], allowed: float) -> None:
    """Compiles what `engine` trains, a model of transformers, whose numbers may differ by `allowed`."""
    device = next(inner.parameters()).device
    check_compilable(inner, path, packed=takes_packed_rows(inner), experts=bool(ExpertWatch(inner)), device=device)
    compile_layers(inner)
    # Not through the engine, which wants to see a backward pass through to its update; the model is whole on each rank.
    check_compiled(inner, path, compute=lambda microbatch: engine.model(microbatch)[0], allowed=allowed)


def _critic(
    path: Path,
    policy: PolicyModel,
    engine: TrainingEngine[Output],
    *,
    config: TrainingConfig,
    preset: Preset,
    device: torch.device,
) -> Critic | CriticHead:
    if config.critic.kind == "model":
        critic = Critic(path, config=config, device=device, value_clip=preset.value_clip, group=policy.group)
        scores = critic.engine.model
        assert isinstance(scores, ScoreModel), "what a critic's engine trains"
        source = config.critic.model or path
        gap = check_scores(scores, source, compute=critic.values)
        if config.compile:
            _compile(scores.classifier, source, engine=critic.engine, allowed=gap.allowed)
        return critic

    def states(microbatch: Microbatch) -> Tensor:
        found = engine.forward(microbatch)[3]
        assert found is not None, "the policy was told to give its states"
        return found

    return CriticHead(
        width=policy.width,
        states=states,
        config=config,
        device=device,
        value_clip=preset.value_clip,
        group=policy.group,
    )


def new_score_model(
    path: Path, *, config: TrainingConfig, shard: Shard | None = None, group: SequenceGroup = ALONE
) -> ScoreModel:
    """The reward model that the folder `path` begins, with adapters if `config` has them; in parts with `shard`. The
    ranks of `group` share its rows.
    """
    scores = load_score_model(path, dtype=torch_dtype(config.dtype), head_seed=config.head_seed, shard=shard)
    if config.lora.enabled:
        add_adapters(scores.classifier, config.lora, sharded=config.zero_stage == 3)
        scores.head.requires_grad_(True)
    check_shareable(scores.classifier, path, group)
    recompute_layers(scores.classifier, config)
    scores.group = group
    return scores


def new_policy(
    path: Path,
    *,
    config: TrainingConfig,
    entropy: tuple[bool, bool],
    adapted: bool,
    shard: Shard | None = None,
    group: SequenceGroup = ALONE,
) -> PolicyModel:
    """The policy that the folder `path` begins; with `shard` in parts, and all ranks must call it. `entropy`: whether
    it gives entropies, and these a gradient. The ranks of `group` share its rows.
    """
    causal_lm = load_causal_lm(path, dtype=torch_dtype(config.dtype), shard=shard)
    if adapted:
        add_adapters(causal_lm, config.lora, sharded=config.zero_stage == 3)
    check_shareable(causal_lm, path, group)
    recompute_layers(causal_lm, config)
    settings = LogprobSettings(
        temperature=config.temperature,
        chunking=Chunking(tokens=config.logprob_chunk_tokens, vocabulary=config.logprob_chunk_vocabulary),
        with_entropy=entropy[0],
        entropy_gradient=entropy[1],
        float32_head=config.head_dtype == "float32",
    )
    policy = PolicyModel(causal_lm, settings=settings)
    policy.group = group
    return policy


def _watch_of(model: nn.Module, path: Path, *, config: TrainingConfig) -> ExpertWatch | None:
    """None for a model without experts. Raises UnfitModel for one that lacks the loss that `config` asks for."""
    watch = ExpertWatch(model)
    if config.router.aux_loss_coef:
        watch.check_loss(path)
    return watch or None


def _replay_of(
    policy: PolicyModel, path: Path, *, engine: TrainingEngine[Output], config: TrainingConfig, allowed: float
) -> RouterReplay | None:
    """None for a model whose routers cannot be given experts, with a word, or without one if it has none. Raises
    UnfitModel for such a model where `config` insists. All ranks must call it.
    """
    wanted = config.router.replay
    if wanted == "off":
        return None
    replay = RouterReplay(policy.causal_lm)
    reason: str | None = "it has no experts"
    if replay:
        gap = gap_between(
            policy.causal_lm, lambda microbatch: engine.forward(microbatch)[0], replay.echoing, allowed=allowed
        )
        reason = replay.fault()
        if reason is None and not gap.passes:
            reason = f"given its own experts it computes other logprobs, {gap.found:.2g} apart"
    if reason is None:
        return replay
    name = type(policy.causal_lm).__name__
    if wanted == "on":
        raise UnfitModel(
            f"{path}: training.router.replay is on, and the routers of {name} cannot take the experts that generators "
            f"chose: {reason}. Set it to auto or off, or name another model."
        )
    if replay:
        logger.warning("%s: router replay is off, and tokens go through experts of the learner's choice, since the "
                       "routers of %s cannot be given any: %s", path, name, reason)  # fmt: skip
    return None
