"""Every algorithm on streamed tokens, in the real trainer, on tokens that older weights really sampled."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from transformers import AutoModelForCausalLM

from learner.algorithms.knobs import Knobs
from learner.algorithms.presets.gdpo import GdpoConfig
from learner.algorithms.presets.online_dpo import OnlineDpoConfig
from learner.algorithms.presets.opd import OpdConfig
from learner.algorithms.presets.registry import STREAMED, AlgorithmConfig
from learner.training.batch import TrainSequence
from learner.training.config import TrainingConfig
from learner.training.ranks import CommandChannel, Ranks
from learner.training.trainer import Trainer
from tests.learner.training.tiny_model import VOCABULARY

ADAPTER: TypeAdapter[AlgorithmConfig] = TypeAdapter(AlgorithmConfig)
KINDS: tuple[type[Knobs], ...] = STREAMED
PROMPT, COMPLETION = 3, 6
REWARDS = (1.0, 0.0, 0.25, 0.0, 0.0, 1.0, 1.0, 0.5)
"""Of two groups of four, which are four pairs too, the better one first or last."""


@pytest.fixture(scope="module")
def sampled(tied_llama: Path) -> list[TrainSequence]:
    """Completions that the model sampled, with its logprobs of them."""
    model = AutoModelForCausalLM.from_pretrained(tied_llama)
    torch.manual_seed(1)
    ids = torch.randint(2, VOCABULARY, (len(REWARDS), PROMPT))
    with torch.inference_mode():
        for _ in range(COMPLETION):
            ids = torch.cat([ids, model(ids).logits[:, -1].softmax(-1).multinomial(1)], dim=1)
    return [sequence(row, index, logprobs_of(model, row)) for index, row in enumerate(ids)]


def sequence(ids: torch.Tensor, index: int, logprobs: np.ndarray) -> TrainSequence:
    mask = np.arange(PROMPT + COMPLETION) >= PROMPT
    return TrainSequence(
        token_ids=ids.numpy().astype(np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, logprobs, 0).astype(np.float32),
        lags=np.zeros(PROMPT + COMPLETION, dtype=np.int32),
        reward=REWARDS[index],
        components=(REWARDS[index],),
        group=index // 4,
        pair=index // 2,
    )


def logprobs_of(model: torch.nn.Module, ids: torch.Tensor) -> np.ndarray:
    """By transformers alone; 0 for the first token, which nothing predicts."""
    with torch.inference_mode():
        logprobs = model(ids[None]).logits[0, :-1].double().log_softmax(-1)
    return np.concatenate([[0.0], logprobs.gather(1, ids[1:, None].long())[:, 0].numpy()])


def older(sequences: list[TrainSequence]) -> list[TrainSequence]:
    """The same a version later."""
    return [replace(one, lags=one.loss_mask.astype(np.int32)) for one in sequences]


def largest_ratio(folder: Path, sequences: list[TrainSequence]) -> float:
    """exp(policy - behavior) of the token where it is largest, for the policy in the folder."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    gaps = [
        (logprobs_of(model, torch.from_numpy(one.token_ids).long()) - one.behavior_logprobs)[one.loss_mask]
        for one in sequences
    ]
    return math.exp(np.concatenate(gaps).max())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.model_fields["type"].default))
def test_a_step_on_data_of_older_weights_measures_how_far_they_are_and_stays_finite(
    kind: type[Knobs], sampled: list[TrainSequence], tied_llama: Path, commands: CommandChannel, tmp_path: Path
) -> None:
    algorithm = ADAPTER.validate_python(kind.model_validate({"components": {"a": 1.0}} if kind is GdpoConfig else {}))
    config = TrainingConfig.model_validate({"optimizer": {"learning_rate": 3e-3, "epsilon": 1e-4}})
    teachers = [tied_llama] if kind is OpdConfig else []
    trainer = Trainer(
        tied_llama, algorithm=algorithm, config=config, ranks=Ranks(), commands=commands, teachers=teachers
    )
    try:
        fresh = trainer.train_step(moved(sampled, kind), version=0)
        trainer.export(tmp_path)
        stale = trainer.train_step(older(moved(sampled, kind)), version=1)
    finally:
        trainer.close()
    assert fresh.mismatch_kl == pytest.approx(0, abs=1e-5), "fresh tokens are the policy's own"
    assert fresh.importance_ratio_max == pytest.approx(1, abs=1e-3)
    assert stale.mismatch_kl is None, "no token is of the weights that are trained"
    assert stale.importance_ratio_max == pytest.approx(largest_ratio(tmp_path, sampled), rel=2e-3)
    assert stale.importance_ratio_max is not None
    assert stale.importance_ratio_max > 1.01, "the first step has moved the policy"
    assert math.isfinite(stale.loss)
    assert math.isfinite(stale.grad_norm)
    assert stale.skipped_updates == 0


def moved(sequences: list[TrainSequence], kind: type[Knobs]) -> list[TrainSequence]:
    """Pairs for an algorithm that learns from them alone; for a student that begins as its teacher, with another
    opinion of the teacher's.
    """
    if kind is OpdConfig:
        taught = np.where(sequences[0].loss_mask, -3.0, 0.0).astype(np.float32)
        return [replace(one, pair=-1, teacher_logprobs=taught) for one in sequences]
    return sequences if kind is OnlineDpoConfig else [replace(one, pair=-1) for one in sequences]
