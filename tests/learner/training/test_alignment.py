"""Consecutive gradients: the arithmetic by hand, what is remembered, and the same control at every ZeRO stage."""

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from learner.algorithms.presets.grpo import GrpoConfig
from learner.algorithms.presets.ppo import PpoConfig
from learner.training import alignment as alignment_module
from learner.training.alignment import AlignmentJudgement, GradientAlignment, Products, dot, judged
from learner.training.batch import TrainSequence
from learner.training.config import AlignmentConfig, TrainingConfig
from learner.training.ranks import CommandChannel, Ranks
from learner.training.trainer import Trainer
from tests.learner.training.engine_parts import CPU
from tests.learner.training.tiny_model import random_sequences, with_a_bad_reward
from tests.learner.training.two_ranks_of_alignment import CASES, CONTROL, config_of, train

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("two_ranks_of_alignment.py")
ON_ONE_RANK = (*CASES, (2, "bfloat16"))


def control(**knobs: object) -> AlignmentConfig:
    return AlignmentConfig.model_validate({"mode": "control", **knobs})


def products(g: Tensor, p: Tensor) -> Products:
    return Products(float(g @ g), float(p @ p), float(g @ p))


def judge(
    g: list[float], p: list[float], *, skips_in_row: int = 0, **knobs: object
) -> tuple[AlignmentJudgement, list[float]]:
    """The decision, and what is applied of the gradient."""
    one, former = torch.tensor(g).double(), torch.tensor(p).double()
    found = judged(products(one, former), control(**knobs), skips_in_row=skips_in_row)
    return found, (one - found.factor * former).tolist()


def test_an_aligned_gradient_is_turned_until_its_cosine_is_the_threshold() -> None:
    # (3, 4) and (2, 0): the cosine is 3 / 5. The part across is (0, 4); of the part along so much stays that the cosine
    # is 1 / 2, that is tan 60 = 4 / x, so that x = 4 / sqrt 3 = 2.3094, and f = (3 - 2.3094) / 2.
    found, applied = judge([3.0, 4.0], [2.0, 0.0], project_above=0.5)
    assert (found.action, found.norm) == ("project", 5.0)
    assert found.cosine == pytest.approx(0.6)
    assert found.factor == pytest.approx((3 - 4 / math.sqrt(3)) / 2)
    assert applied == pytest.approx([4 / math.sqrt(3), 4.0])


def test_a_threshold_of_0_takes_the_whole_part_along_the_former_gradient() -> None:
    found, applied = judge([3.0, 4.0], [2.0, 0.0], project_above=0.0)
    assert (found.factor, applied) == (1.5, [0.0, 4.0])


@pytest.mark.parametrize(
    ("g", "p"),
    [([3.0, 4.0], [2.0, 0.0]), ([-4.0, 3.0], [2.0, 0.0]), ([0.0, 4.0], [2.0, 0.0]), ([3.0, 4.0], [0.0, 0.0])],
)
def test_a_gradient_at_the_threshold_against_the_former_one_or_without_one_stays(
    g: list[float], p: list[float]
) -> None:
    found, applied = judge(g, p, project_above=0.6)
    assert (found.action, applied) == ("keep", g)


def test_a_gradient_above_both_thresholds_is_skipped_but_not_for_ever() -> None:
    def action(skips_in_row: int) -> str:
        found, _ = judge(
            [3.0, 4.0],
            [2.0, 0.0],
            skips_in_row=skips_in_row,
            project_above=0.5,
            skip_above=0.55,
            max_skips_in_row=2,
        )
        return found.action

    assert [action(so_far) for so_far in range(4)] == ["skip", "skip", "project", "project"]
    assert judge([1.0, 0.0], [2.0, 0.0], skip_above=1.0)[0].action == "project", "1 never skips"


def test_parallel_gradients_leave_nothing_to_apply_and_no_number_that_is_none() -> None:
    found, applied = judge([0.3, 0.7], [0.9, 2.1], project_above=0.2, skip_above=1.0)
    assert found.cosine == pytest.approx(1.0)
    assert applied == pytest.approx([0.0, 0.0], abs=1e-7)


def test_products_of_long_tensors_are_added_up_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alignment_module, "_CHUNK", 4)
    numbers = torch.arange(10.0).reshape(2, 5)
    assert float(dot(numbers, numbers)) == 285.0
    assert float(dot(numbers[:0], numbers[:0])) == 0.0


def test_measuring_decides_nothing() -> None:
    found = judged(Products(1.0, 1.0, 1.0), AlignmentConfig(mode="measure"), skips_in_row=0)
    assert found == AlignmentJudgement(1.0, 1.0)


def examined(alignment: GradientAlignment, *gradient: float) -> tuple[str, Any, list[float]]:
    """The decision, the cosine, and what is left of a gradient in two tensors."""
    parts = [torch.tensor(gradient[:1]), torch.tensor([gradient[1:]])]
    found = alignment.examine(parts)
    return found.action, found.cosine, [*parts[0].tolist(), *parts[1].flatten().tolist()]


def test_the_next_update_compares_with_the_gradient_as_it_was_computed(commands: CommandChannel) -> None:
    alignment = GradientAlignment(control(project_above=0.0, skip_above=0.99), parts=False)
    assert examined(alignment, 2.0, 0.0, 0.0) == ("keep", None, [2.0, 0.0, 0.0])
    assert examined(alignment, 3.0, 4.0, 0.0) == ("project", pytest.approx(0.6), [0.0, 4.0, 0.0])
    # Beside (3, 4, 0), not beside the (0, 4, 0) that was applied.
    assert examined(alignment, 6.0, 8.0, 0.0) == ("skip", pytest.approx(1.0), [6.0, 8.0, 0.0])
    # What was skipped is the former one, too: beside (6, 8, 0) this one has a cosine of 0.8.
    assert examined(alignment, 0.0, 1.0, 0.0)[:2] == ("project", pytest.approx(0.8))


@pytest.mark.parametrize("bad", [(math.nan, 1.0, 1.0), (math.inf, 0.0, 0.0), (0.0, 0.0, 0.0)])
def test_what_has_no_direction_is_passed_over(commands: CommandChannel, bad: tuple[float, ...]) -> None:
    alignment = GradientAlignment(control(project_above=0.0), parts=False)
    examined(alignment, 2.0, 0.0, 0.0)
    assert examined(alignment, *bad)[:2] == ("keep", None)
    assert examined(alignment, 3.0, 4.0, 0.0) == ("project", pytest.approx(0.6), [0.0, 4.0, 0.0])


def test_a_reading_is_of_the_updates_since_the_last_one(commands: CommandChannel) -> None:
    alignment = GradientAlignment(control(project_above=0.0, skip_above=0.99), parts=False)
    for gradient in ((2.0, 0.0, 0.0), (3.0, 4.0, 0.0), (6.0, 8.0, 0.0), (-8.0, 6.0, 0.0)):
        examined(alignment, *gradient)
    reading = alignment.taken()
    assert reading.cosine == pytest.approx((0.6 + 1.0 + 0.0) / 3, abs=1e-6)
    assert (reading.projected_share, reading.skipped_share) == (0.25, 0.25)
    assert alignment.taken().cosine is None
    measuring = GradientAlignment(AlignmentConfig(mode="measure"), parts=False)
    examined(measuring, 1.0, 0.0, 0.0)
    assert measuring.taken().projected_share is None


def test_a_gradient_that_was_cut_otherwise_is_not_taken_up(
    commands: CommandChannel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    written = GradientAlignment(control(), parts=False)
    examined(written, 2.0, 0.0, 0.0)
    written.save(tmp_path, rank=0)
    same, other = (GradientAlignment(control(), parts=parts) for parts in (False, True))
    same.load(tmp_path, rank=0, device=CPU)
    assert not caplog.messages
    other.load(tmp_path, rank=0, device=CPU)
    assert "neither compared nor controlled" in caplog.messages.pop()
    assert examined(same, 3.0, 4.0, 0.0)[1] == pytest.approx(0.6)
    assert examined(other, 3.0, 4.0, 0.0)[1] is None
    same.load(tmp_path, rank=0, device=CPU)
    assert examined(same, 3.0, 4.0)[1] is None, "other weights"
    assert "is cut otherwise" in caplog.messages.pop()
    same.load(tmp_path / "of a run without", rank=0, device=CPU)
    assert examined(same, 3.0, 4.0, 0.0)[1] is None


def trained_by(
    path: Path, commands: CommandChannel, config: TrainingConfig, batches: list[list[TrainSequence]]
) -> list[Tensor]:
    """The weights before the first step and after each of them, each end to end."""
    trainer = Trainer(path, algorithm=GrpoConfig(), config=config, ranks=Ranks(), commands=commands)
    found = [flat(trainer)]
    for version, batch in enumerate(batches):
        trainer.train_step(batch, version=version)
        found.append(flat(trainer))
    trainer.close()
    return found


def flat(trainer: Trainer) -> Tensor:
    return torch.cat([tensor.value.double().flatten().clone() for tensor in trainer.host_copy().tensors])


def cosine(one: Tensor, other: Tensor) -> float:
    return float(one @ other / one.norm() / other.norm())


@pytest.mark.parametrize(("stage", "dtype"), ON_ONE_RANK)
def test_an_update_moves_the_weights_by_what_is_left_of_its_gradient(
    tied_llama: Path, commands: CommandChannel, stage: int, dtype: str
) -> None:
    config = config_of(stage, dtype)
    batches = [random_sequences(20, seed=1), [*random_sequences(10, seed=1), *random_sequences(10, seed=2)]]

    def moves(**knobs: object) -> list[Tensor]:
        weights = trained_by(
            tied_llama,
            commands,
            config.model_copy(update={"alignment": AlignmentConfig.model_validate(knobs)}),
            batches,
        )
        return [after - before for before, after in itertools.pairwise(weights)]

    plain, measured = moves(), moves(mode="measure")
    assert all(torch.equal(one, other) for one, other in zip(plain, measured, strict=True)), (
        "measuring changed a number"
    )
    aligned = cosine(plain[0], plain[1])
    assert 0.4 < aligned < 0.9
    first, projected = moves(mode="control", project_above=0.3, skip_above=0.97)
    assert torch.equal(first, plain[0])
    # Weights of about 0.1 hold moves of 1e-3 to 24 bits, so that these are known to about 1e-5 of their length.
    assert cosine(first, projected) == pytest.approx(0.3, abs=1e-3)
    across = plain[1] - (plain[1] @ first) / (first @ first) * first
    assert cosine(projected - (projected @ first) / (first @ first) * first, across) > 0.999
    assert float((projected - (projected @ first) / (first @ first) * first).norm()) == pytest.approx(
        float(across.norm()), rel=1e-3
    )
    _, skipped = moves(mode="control", project_above=0.3, skip_above=0.35)
    assert not skipped.any()


def test_one_and_two_ranks_control_alike_at_each_stage(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path
) -> None:
    argv = [sys.executable, str(SCRIPT), str(tied_llama), str(tmp_path)]
    subprocess.run(argv, check=True, timeout=400, env={**os.environ, "PYTHONPATH": str(ROOT)})
    for stage, dtype in CASES:
        made = Trainer(
            tied_llama, algorithm=GrpoConfig(), config=config_of(stage, dtype), ranks=Ranks(), commands=commands
        )
        one = train(made, folder=tmp_path / f"one-{stage}-{dtype}")
        made.close()
        two = json.loads((tmp_path / f"{stage}-{dtype}.json").read_text(encoding="utf-8"))
        shares = [(step["projected"], step["skipped"]) for step in one.steps]
        assert shares == [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 0.0)]
        assert shares == [(step["projected"], step["skipped"]) for step in two]
        allowed = 1e-6 if dtype == "float32" else 1e-3  # of which each rank rounds its own share
        for left, right in zip(one.steps[1:], two[1:], strict=True):
            assert left["cosine"] == pytest.approx(right["cosine"], abs=allowed)
        weights = load_file(tmp_path / f"{stage}-{dtype}.safetensors")
        for name, value in one.weights.items():
            torch.testing.assert_close(value, weights[name], rtol=0, atol=allowed)


@pytest.mark.parametrize(("stage", "dtype"), ON_ONE_RANK)
def test_a_resume_goes_on_as_if_it_had_not_ended(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path, stage: int, dtype: str
) -> None:
    config, batch = config_of(stage, dtype), random_sequences(20, seed=1)
    made = Trainer(tied_llama, algorithm=GrpoConfig(), config=config, ranks=Ranks(), commands=commands)
    made.train_step(batch, version=0)
    assert made.train_step(batch, version=1).alignment_skipped_share == 1.0
    made.begin_save(tmp_path)()
    expected, weights = made.train_step(batch, version=2), flat(made)
    assert expected.alignment_projected_share == 1.0, "one is skipped in a row"
    made.close()
    made = Trainer(tied_llama, algorithm=GrpoConfig(), config=config, ranks=Ranks(), commands=commands)
    made.load(tmp_path)
    again = made.train_step(batch, version=2)
    assert (again.alignment_cosine, again.alignment_projected_share) == (expected.alignment_cosine, 1.0)
    assert torch.equal(flat(made), weights)
    made.close()


@pytest.mark.parametrize(
    "changes", [{"lora": {"rank": 4, "alpha": 8.0}}, {"updates_per_step": 4}, {"partial_batches": True}]
)
def test_adapters_several_updates_and_batches_in_parts_are_compared_update_by_update(
    tied_llama: Path, commands: CommandChannel, changes: dict[str, object]
) -> None:
    config = TrainingConfig.model_validate({**config_of(0, "float32").model_dump(exclude_none=True), **changes})
    made = Trainer(tied_llama, algorithm=GrpoConfig(), config=config, ranks=Ranks(), commands=commands)
    batch = random_sequences(20, seed=1)
    first, second = (made.train_step(batch, version=version) for version in range(2))
    several = "updates_per_step" in changes
    assert (first.alignment_cosine is not None) == several
    assert second.alignment_cosine is not None
    assert several or second.alignment_skipped_share == 1.0
    assert second.skipped_updates == 0, "these count gradients that are not finite"
    made.close()


@pytest.mark.parametrize("kind", ["model", "head"])
def test_a_critic_learns_on_where_the_policy_is_skipped(tied_llama: Path, commands: CommandChannel, kind: str) -> None:
    critic = TrainingConfig.model_validate({"critic": {"kind": kind}}).critic
    control = AlignmentConfig(mode="control", project_above=0.0, skip_above=0.01)
    config = config_of(0, "float32").model_copy(update={"critic": critic, "alignment": control})
    made = Trainer(tied_llama, algorithm=PpoConfig(), config=config, ranks=Ranks(), commands=commands)
    batch = random_sequences(20, seed=1)
    made.train_step(batch, version=0)
    learner = made._models.critic
    assert learner is not None
    values = [each.detach().clone() for each in learner.engine.model.parameters()]
    policy = flat(made)
    assert made.train_step(batch, version=1).alignment_skipped_share == 1.0
    assert torch.equal(flat(made), policy)
    assert any(not torch.equal(one, two) for one, two in zip(values, learner.engine.model.parameters(), strict=True))
    made.close()


def test_a_gradient_that_is_not_finite_is_left_out_as_ever(tied_llama: Path, commands: CommandChannel) -> None:
    made = Trainer(tied_llama, algorithm=GrpoConfig(), config=config_of(0, "float32"), ranks=Ranks(), commands=commands)
    batch = random_sequences(20, seed=1)
    made.train_step(batch, version=0)
    bad = made.train_step(with_a_bad_reward(random_sequences(20, seed=2)), version=1)
    assert (bad.skipped_updates, bad.alignment_cosine, bad.alignment_skipped_share) == (1, None, 0.0)
    assert made.train_step(batch, version=1).alignment_skipped_share == 1.0, "beside the one before the bad one"
    made.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"zero_stage": 3}, "alignment.mode is control and zero_stage is 3.*Lower zero_stage"),
        ({"zero_stage": 2, "offload": "optimizer"}, "offload is optimizer.*Set offload to none"),
        ({"optimizer": {"type": "muon"}}, "optimizer.type is muon.*alignment.mode to measure"),
        ({"alignment": {"mode": "measure", "skip_above": 0.5}}, "skip_above is set but mode is measure"),
        ({"alignment": {**CONTROL, "skip_above": 0.2}}, "project_above is 0.3 and skip_above 0.2"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){words}"):
        TrainingConfig.model_validate({"alignment": CONTROL, **changes})
    muon = TrainingConfig.model_validate({"alignment": {"mode": "measure"}, "optimizer": {"type": "muon"}})
    assert muon.alignment.enabled
