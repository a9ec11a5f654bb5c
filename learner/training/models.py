"""The models of a rank: what is trained, and those that it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from learner.algorithms.presets.preset import Preset
from learner.training.adapters import add_adapters
from learner.training.config import TrainingConfig
from learner.training.critic import Critic, CriticHead
from learner.training.engine import Engine
from learner.training.logprobs import Chunking
from learner.training.packing import Microbatch
from learner.training.passes import Scorers
from learner.training.policy import LogprobSettings, PolicyModel, load_causal_lm
from learner.training.reference import Reference, open_reference
from learner.training.score_model import ScoreModel, load_score_model
from learner.training.weights import torch_dtype

Output = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""What a trained model returns: see PolicyModel.forward and ScoreModel.forward."""


@dataclass(frozen=True)
class Models:
    """`trained` under its `engine`; None for what the algorithm does not need."""

    trained: PolicyModel | ScoreModel
    engine: Engine[Output]
    reference: Reference | None
    teachers: LocalTeachers
    critic: Critic | CriticHead | None

    @property
    def scorers(self) -> Scorers:
        """Who can be asked for a number at each token."""
        return Scorers(
            proximal=lambda microbatch: self.engine.forward(microbatch)[0],
            reference=None if self.reference is None else self.reference.logprobs,
            teacher=self.teachers.logprobs if self.teachers else None,
            values=None if self.critic is None else self.critic.values,
        )

    @property
    def skipped(self) -> int:
        """Updates of policy and critic that were left out since their gradient was not finite."""
        return self.engine.skipped + (0 if self.critic is None else self.critic.engine.skipped)

    @property
    def skipped_in_row(self) -> int:
        """How many of the newest updates, of the one that has more of them."""
        return max(self.engine.skipped_in_row, 0 if self.critic is None else self.critic.engine.skipped_in_row)

    def has_finite_weights(self) -> bool:
        """True if this rank's part of what is trained is finite."""
        critic = self.critic is None or self.critic.engine.has_finite_weights()
        return critic and self.engine.has_finite_weights()

    def save(self, directory: Path) -> None:
        """Writes what is trained, each rank its part. Raises OSError on all ranks if one cannot write."""
        self.engine.save(directory)
        if self.critic is not None:
            self.critic.save(directory)

    def load(self, directory: Path) -> None:
        """Reads what `save` wrote, and the reference. Raises FileNotFoundError."""
        self.engine.load(directory)
        if self.reference is not None:
            self.reference.load(directory)
        if self.critic is not None:
            self.critic.load(directory)

    def close(self) -> None:
        """Releases the models."""
        self.engine.close()
        if self.critic is not None:
            self.critic.close()


class LocalTeachers:
    """Teachers that every rank holds whole, by index; a microbatch says for each of its sequences which one to ask."""

    def __init__(self, models: Sequence[PolicyModel]) -> None:
        self._models = models

    def __bool__(self) -> bool:
        return bool(self._models)

    def logprobs(self, microbatch: Microbatch) -> Tensor:
        """Logprobs [N] of the microbatch's targets, each by its sequence's teacher."""
        wanted = microbatch.teachers[microbatch.sequences.cpu()].to(microbatch.targets.device)
        found = torch.zeros(len(microbatch.targets), device=microbatch.targets.device)
        for index, model in enumerate(self._models):
            of_this: Tensor = model(microbatch)[0]
            found = torch.where(wanted == index, of_this.float(), found)
        return found

    def candidates(self, microbatch: Microbatch, *, count: int) -> tuple[Tensor, Tensor]:
        """The first teacher's most probable tokens int64 [N, count] and their logprobs [N, count]."""
        top = self._models[0].top_candidates(microbatch, count=count)
        return top.token_ids, top.logprobs


def open_models(
    path: Path, *, config: TrainingConfig, preset: Preset, teachers: Sequence[Path], device: torch.device
) -> Models:
    """Loads what the preset needs onto `device`. The process group must be open."""
    if preset.trains_scores:
        scores = load_score_model(path, dtype=torch_dtype(config.dtype), head_seed=config.head_seed)
        if config.lora.enabled:
            add_adapters(scores.classifier, config.lora)
            scores.head.requires_grad_(True)
        engine: Engine[Output] = Engine(scores, config=config, device=device)
        return Models(trained=scores, engine=engine, reference=None, teachers=LocalTeachers(()), critic=None)
    entropy = (config.report_entropy, preset.entropy_gradient)
    policy = _policy(path, config=config, entropy=entropy, adapted=config.lora.enabled)
    if preset.passes.values and config.critic.kind == "head":
        policy.settings = replace(policy.settings, with_states=True)
    engine = Engine(policy, config=config, device=device)

    def frozen(folder: Path) -> PolicyModel:
        model = _policy(folder, config=config, entropy=(False, False), adapted=False).to(device)
        return model.requires_grad_(False).eval()

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
    )


def _critic(
    path: Path,
    policy: PolicyModel,
    engine: Engine[Output],
    *,
    config: TrainingConfig,
    preset: Preset,
    device: torch.device,
) -> Critic | CriticHead:
    if config.critic.kind == "model":
        return Critic(path, config=config, device=device, value_clip=preset.value_clip)

    def states(microbatch: Microbatch) -> Tensor:
        found = engine.forward(microbatch)[3]
        assert found is not None, "the policy was told to give its states"
        return found

    return CriticHead(width=policy.width, states=states, config=config, device=device, value_clip=preset.value_clip)


def _policy(path: Path, *, config: TrainingConfig, entropy: tuple[bool, bool], adapted: bool) -> PolicyModel:
    causal_lm = load_causal_lm(path, dtype=torch_dtype(config.dtype))
    if adapted:
        add_adapters(causal_lm, config.lora)
    if config.gradient_checkpointing:
        _checkpoint_gradients(causal_lm)
    settings = LogprobSettings(
        temperature=config.temperature,
        chunking=Chunking(tokens=config.logprob_chunk_tokens, vocabulary=config.logprob_chunk_vocabulary),
        with_entropy=entropy[0],
        entropy_gradient=entropy[1],
    )
    return PolicyModel(causal_lm, settings=settings)


def _checkpoint_gradients(causal_lm: nn.Module) -> None:
    enable = causal_lm.gradient_checkpointing_enable
    assert callable(enable), "a transformers model"
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})
