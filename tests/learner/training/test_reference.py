from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from learner.training.config import TrainingConfig
from learner.training.policy import PolicyModel
from learner.training.ranks import CommandChannel
from learner.training.reference import REFERENCE_FILE, AdaptersOff, Reference, ReferenceCopy, open_reference
from tests.learner.training.engine_parts import (
    LORA,
    Parts,
    config_with,
    frozen_policy,
    load_policy,
    logprobs,
    microbatch,
    open_parts,
    update,
    weights_of,
)
from tests.learner.training.tiny_model import random_sequences

STEPS = [random_sequences(6, seed=seed) for seed in range(1, 5)]
ROW = microbatch(random_sequences(8, seed=9))
STAGES = (0, 1, 2, 3)


def reference_of(parts: Parts, path: Path, config: TrainingConfig) -> Reference:
    plain = config.model_copy(update={"lora": TrainingConfig().lora})
    return open_reference(parts.policy, engine=parts.engine, config=config, load=lambda: frozen_policy(path, plain))


def now(parts: Parts) -> torch.Tensor:
    with torch.no_grad():
        return logprobs(parts, ROW)


def fill(parts: Parts, value: float) -> None:
    with torch.no_grad():
        for parameter in parts.policy.parameters():
            parameter.fill_(value)


def written(reference: Reference, directory: Path) -> dict[str, torch.Tensor]:
    directory.mkdir()
    reference.save(directory, leads=True)
    return dict(load_file(directory / REFERENCE_FILE))


def test_a_moving_average_has_the_numbers_of_its_formula(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path
) -> None:
    config = config_with(reference={"mode": "ema", "decay": 0.75})
    parts = open_parts(tied_llama, config)
    initial = {name: value.detach().clone() for name, value in parts.policy.named_parameters()}
    reference = reference_of(parts, tied_llama, config)
    # 0.75 * w + 0.25 * 2, then 0.75 * that + 0.25 * 4 = 0.5625 * w + 0.375 + 1
    for value in (2.0, 4.0):
        fill(parts, value)
        reference.after_step()
    for name, average in written(reference, tmp_path / "checkpoint").items():
        torch.testing.assert_close(average, 0.5625 * initial[name] + 1.375, rtol=0, atol=1e-6)
    parts.engine.close()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("lora", [{}, LORA], ids=["full", "lora"])
def test_an_average_in_bfloat16_does_not_lose_what_is_small_against_it(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path, stage: int, lora: dict[str, object]
) -> None:
    # A step moves a weight of about 0.1 by 0.01, and the average by a hundredth of that: 1e-4, where bfloat16's numbers
    # are 5e-4 apart.
    config = config_with(dtype="bfloat16", zero_stage=stage, lora=lora, reference={"mode": "ema", "decay": 0.99})
    parts = open_parts(tied_llama, config)
    reference = reference_of(parts, tied_llama, config)
    expected = {name: value.double() for name, value in weights_of(parts).items()}
    for sequences in STEPS:
        update(parts, sequences)
        reference.after_step()
        expected = {name: 0.99 * expected[name] + 0.01 * value.double() for name, value in weights_of(parts).items()}
    averages = written(reference, tmp_path / "checkpoint")
    assert {name.removeprefix(PolicyModel.PREFIX) for name in averages} == set(expected)
    for name, average in averages.items():
        torch.testing.assert_close(average.double(), expected[name.removeprefix(PolicyModel.PREFIX)], rtol=0, atol=1e-6)
    parts.engine.close()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("lora", [{}, LORA], ids=["full", "lora"])
def test_a_refreshed_reference_is_the_policy_of_every_second_step(
    tiny_llama: Path, commands: CommandChannel, tmp_path: Path, stage: int, lora: dict[str, object]
) -> None:
    config = config_with(zero_stage=stage, lora=lora, reference={"mode": "refresh", "every_steps": 2})
    parts = open_parts(tiny_llama, config)
    reference = reference_of(parts, tiny_llama, config)
    policies, references = [now(parts)], [reference.logprobs(ROW)]
    for number, sequences in enumerate(STEPS[:3]):
        update(parts, sequences)
        reference.after_step()
        policies.append(now(parts))
        references.append(reference.logprobs(ROW))
        if number == 0:
            reference.save(tmp_path, leads=True)
            parts.engine.save(tmp_path)
    for seen, source in zip(references, (0, 0, 2, 2), strict=True):
        torch.testing.assert_close(seen, policies[source], rtol=0, atol=1e-5)
    assert not torch.allclose(policies[0], policies[2], atol=1e-2)

    parts.engine.load(tmp_path)
    resumed = reference_of(parts, tiny_llama, config)
    resumed.load(tmp_path)
    torch.testing.assert_close(resumed.logprobs(ROW), references[1], rtol=0, atol=1e-6)
    update(parts, STEPS[1])
    resumed.after_step()  # the second since the start
    torch.testing.assert_close(resumed.logprobs(ROW), references[2], rtol=0, atol=1e-5)
    parts.engine.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_moving_average_goes_on_from_a_checkpoint(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path, dtype: str
) -> None:
    config = config_with(dtype=dtype, reference={"mode": "ema", "decay": 0.9})
    parts = open_parts(tied_llama, config)
    reference = reference_of(parts, tied_llama, config)
    update(parts, STEPS[0])
    reference.after_step()
    saved = written(reference, tmp_path / "saved")
    assert all(value.dtype == torch.float32 for value in saved.values())
    resumed = reference_of(parts, tied_llama, config)
    resumed.load(tmp_path / "saved")
    torch.testing.assert_close(resumed.logprobs(ROW), reference.logprobs(ROW), rtol=0, atol=0)
    for each in (reference, resumed):
        each.after_step()
    expected = written(reference, tmp_path / "straight")
    for name, value in written(resumed, tmp_path / "resumed").items():
        assert torch.equal(value, expected[name])
    parts.engine.close()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("lora", [{}, LORA], ids=["full", "lora"])
def test_the_initial_reference_stays_while_the_policy_learns(
    tiny_llama: Path, commands: CommandChannel, tmp_path: Path, stage: int, lora: dict[str, object]
) -> None:
    config = config_with(zero_stage=stage, lora=lora)
    with torch.no_grad():
        initial = load_policy(tiny_llama, config_with())(ROW)[0]
    parts = open_parts(tiny_llama, config)
    reference = reference_of(parts, tiny_llama, config)
    assert isinstance(reference, AdaptersOff if lora else ReferenceCopy)
    for sequences in STEPS[:3]:
        torch.testing.assert_close(reference.logprobs(ROW), initial, rtol=0, atol=1e-6)
        update(parts, sequences)
        reference.after_step()
    seen = reference.logprobs(ROW)
    torch.testing.assert_close(seen, initial, rtol=0, atol=1e-6)
    assert not seen.requires_grad
    assert not torch.allclose(now(parts), initial, atol=1e-2)
    reference.save(tmp_path, leads=True)
    assert not list(tmp_path.iterdir())
    reference.load(tmp_path)
    parts.engine.close()


@pytest.mark.parametrize("stage", STAGES)
def test_a_pass_with_the_adapters_off_changes_nothing_about_the_update_after_it(
    tied_llama: Path, commands: CommandChannel, stage: int
) -> None:
    def trained(*, with_reference: bool) -> list[torch.Tensor]:
        config = config_with(zero_stage=stage, lora=LORA, gradient_checkpointing=True)
        parts = open_parts(tied_llama, config)
        reference = reference_of(parts, tied_llama, config)
        for sequences in STEPS:
            if with_reference:
                reference.logprobs(ROW)
            update(parts, sequences)
        weights = list(weights_of(parts).values())
        parts.engine.close()
        return weights

    pairs = zip(trained(with_reference=True), trained(with_reference=False), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_only_the_rank_that_leads_writes_and_a_missing_file_is_named(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path
) -> None:
    config = config_with(reference={"mode": "ema"})
    parts = open_parts(tied_llama, config)
    reference = reference_of(parts, tied_llama, config)
    reference.save(tmp_path, leads=False)
    with pytest.raises(FileNotFoundError, match=r"reference\.safetensors.*mode is ema"):
        reference.load(tmp_path)
    parts.engine.close()
