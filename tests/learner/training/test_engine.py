from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from learner.training.config import OptimizerConfig
from learner.training.engine import TrainingEngine
from learner.training.ranks import CommandChannel
from tests.learner.training.engine_parts import (
    CPU,
    LORA,
    OPTIMIZER,
    Parts,
    assert_close,
    config_with,
    halves,
    load_policy,
    logprobs,
    microbatch,
    open_parts,
    update,
    weights_of,
)
from tests.learner.training.tiny_model import random_sequences

STEPS = [random_sequences(6, seed=1), random_sequences(5, seed=2), random_sequences(4, seed=3)]
STAGES = (0, 1, 2, 3)
CRITIC = OptimizerConfig(learning_rate=1.0, beta1=0.5, epsilon=1e-3, weight_decay=0.2, max_grad_norm=0.1)


def trained(path: Path, *, rate: float = OPTIMIZER.learning_rate, **changes: object) -> dict[str, torch.Tensor]:
    """The weights after three updates."""
    parts = open_parts(path, config_with(**changes))
    for sequences in STEPS:
        update(parts, sequences, rate=rate)
    weights = weights_of(parts)
    parts.engine.close()
    return weights


@pytest.mark.parametrize(("stage", "offload"), [(1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "all")])
@pytest.mark.parametrize("lora", [{}, LORA], ids=["full", "lora"])
def test_offloading_changes_where_the_optimizer_works_and_not_what_it_does(
    tied_llama: Path, commands: CommandChannel, stage: int, offload: str, lora: dict[str, object]
) -> None:
    expected = trained(tied_llama, rate=3e-3, lora=lora)
    # The fused AdamW that offloading uses rounds elsewhere than the usual one: weights of about 0.1, 24 bits.
    seen = trained(tied_llama, rate=3e-3, lora=lora, zero_stage=stage, offload=offload)
    assert_close(seen, expected, atol=1e-6)


@pytest.mark.parametrize(("stage", "offload"), [(1, "optimizer"), (3, "all")])
def test_an_offloaded_optimizer_is_in_the_checkpoint(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path, stage: int, offload: str
) -> None:
    config = config_with(zero_stage=stage, offload=offload, dtype="bfloat16")
    parts = open_parts(tied_llama, config)
    update(parts, STEPS[0])
    parts.engine.save(tmp_path)
    update(parts, STEPS[1])
    expected = weights_of(parts)
    parts.engine.close()
    parts = open_parts(tied_llama, config)
    parts.engine.load(tmp_path)
    update(parts, STEPS[1])
    assert_close(weights_of(parts), expected, atol=1e-7)
    parts.engine.close()


@pytest.mark.parametrize("lora", [{}, LORA], ids=["full", "lora"])
def test_gradient_checkpointing_gives_the_same_gradients(
    tied_llama: Path, commands: CommandChannel, lora: dict[str, object]
) -> None:
    def gradients(checkpointing: bool) -> dict[str, torch.Tensor]:
        parts = open_parts(tied_llama, config_with(lora=lora, gradient_checkpointing=checkpointing))
        if lora:
            update(parts, STEPS[1])  # until then `up` is 0, and with it the gradient of `down`
        recomputed = _calls(parts)
        parts.engine.backward(-logprobs(parts, microbatch(STEPS[0])).sum(), last=True)
        assert recomputed() == (2 if checkpointing else 1)
        found = {name: value.grad.clone() for name, value in parts.policy.named_parameters() if value.grad is not None}
        parts.engine.close()
        return found

    plain = gradients(False)
    assert plain
    assert all(float(value.abs().max()) > 0 for value in plain.values())
    assert_close(gradients(True), plain, atol=1e-7)


def _calls(parts: Parts) -> Callable[[], int]:
    """Counts from now on how often the computation of the first layer's MLP begins; a second one may end early."""
    calls: list[int] = []
    mlp = next(module for name, module in parts.policy.named_modules() if name.endswith("layers.0.mlp"))
    mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    return lambda: len(calls)


@pytest.mark.parametrize("stage", STAGES)
def test_bfloat16_adds_up_updates_that_are_too_small_for_it(
    tied_llama: Path, commands: CommandChannel, stage: int
) -> None:
    # AdamW's first update moves each weight by lr * g / (|g| + eps), which is at most lr, and three of them by 3 lr at
    # most. All weights are numbers of bfloat16 at first; it has 8 bits, so that those of at least 2^-4 are 2^-12 from
    # their neighbours or more. A move of 3 * 2^-20 rounds back to the same number, and float32 keeps it.
    rate = 2.0**-20
    adamw = {"learning_rate": rate, "epsilon": 1e-12, "weight_decay": 0.0}
    parts = open_parts(tied_llama, config_with(dtype="bfloat16", zero_stage=stage, optimizer=adamw))
    initial = weights_of(parts)
    for sequences in STEPS:
        update(parts, sequences, rate=rate)
    name = "model.layers.0.mlp.up_proj.weight"
    master, start = weights_of(parts)[name], initial[name]
    moved = (master - start).abs()
    assert float((moved > 0).float().mean()) > 0.99
    assert rate < float(moved.max()) < 3.01 * rate
    model = parts.policy.get_parameter(f"causal_lm.{name}")
    with parts.engine.gathered([model]):
        assert model.dtype == torch.bfloat16
        large = start.abs() >= 2**-4
        assert torch.equal(model.float()[large], start[large])
    parts.engine.close()


@pytest.mark.parametrize("stage", STAGES)
def test_two_engines_in_one_process_do_not_touch_each_other(
    tiny_llama: Path, commands: CommandChannel, tmp_path: Path, stage: int
) -> None:
    def critic() -> Parts:
        return open_parts(tiny_llama, config_with(zero_stage=stage, lora=LORA), optimizer=CRITIC)

    alone = critic()
    for sequences in STEPS:
        update(alone, sequences, rate=0.05)
    expected = weights_of(alone)
    alone.engine.close()

    policy, second = open_parts(tiny_llama, config_with(zero_stage=stage)), critic()
    for number, sequences in enumerate(STEPS):
        if number == 2:
            policy.engine.save(tmp_path / "policy")
            second.engine.save(tmp_path / "critic")
        # Both forward passes come before either backward pass, as in a step that trains a policy and its critic.
        for part, last in halves(sequences):
            losses = [-logprobs(parts, microbatch(part)).sum() for parts in (policy, second)]
            for parts, loss in zip((policy, second), losses, strict=True):
                parts.engine.backward(loss, last=last)
        policy.engine.update(learning_rate=OPTIMIZER.learning_rate)
        second.engine.update(learning_rate=0.05)
    assert_close(weights_of(policy), trained(tiny_llama, zero_stage=stage), atol=1e-7)
    assert_close(weights_of(second), expected, atol=1e-7)

    for parts, folder, rate in ((policy, "policy", OPTIMIZER.learning_rate), (second, "critic", 0.05)):
        after = weights_of(parts)
        parts.engine.load(tmp_path / folder)
        update(parts, STEPS[2], rate=rate)
        assert_close(weights_of(parts), after, atol=1e-7)
        parts.engine.close()


@pytest.mark.parametrize("stage", [0, 1])
def test_an_engine_of_its_own_optimizer_uses_its_settings(
    tied_llama: Path, commands: CommandChannel, stage: int
) -> None:
    parts = open_parts(tied_llama, config_with(zero_stage=stage), optimizer=CRITIC)
    name = "model.norm.weight"
    weight = parts.policy.get_parameter(f"causal_lm.{name}")
    start = weight.detach().clone()
    parts.engine.backward(-logprobs(parts, microbatch(STEPS[0])).sum(), last=True)
    gradient = weight.grad.clone() if weight.grad is not None else None
    norm = parts.engine.update(learning_rate=0.05)
    assert norm > 0.1
    if gradient is not None:  # without ZeRO it stays where it was
        # In its first update AdamW's two means, bias corrected, are g and g^2, with g clipped to a global norm of 0.1:
        # w = w (1 - lr * decay) - lr * g / (|g| + eps), with decay 0.2 and eps 1e-3.
        clipped = gradient * 0.1 / norm
        expected = start * (1 - 0.05 * 0.2) - 0.05 * clipped / (clipped.abs() + 1e-3)
        torch.testing.assert_close(weights_of(parts)[name], expected, rtol=0, atol=1e-6)
    parts.engine.close()


@pytest.mark.parametrize(("stage", "dtype"), [(0, "float32"), (1, "float32"), (3, "float32"), (0, "bfloat16")])
def test_a_run_whose_optimizer_was_not_fused_goes_on_with_one_that_is(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path, stage: int, dtype: str
) -> None:
    config = config_with(zero_stage=stage, dtype=dtype)
    parts = open_parts(tied_llama, config)
    optimizer = parts.engine._engine.basic_optimizer
    optimizer.param_groups[0].update(fused=None, foreach=None)
    update(parts, STEPS[0])
    parts.engine.save(tmp_path)
    update(parts, STEPS[1])
    expected = weights_of(parts)
    parts.engine.close()
    parts = open_parts(tied_llama, config)
    parts.engine.load(tmp_path)
    assert parts.engine._engine.basic_optimizer.param_groups[0]["fused"]
    update(parts, STEPS[1])
    assert_close(weights_of(parts), expected, atol=1e-6)
    parts.engine.close()


@pytest.mark.parametrize(("stage", "dtype"), [(1, "float32"), (2, "float32"), (3, "float32"), (0, "bfloat16")])
def test_a_run_goes_on_with_its_own_limit_of_the_gradient(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path, stage: int, dtype: str
) -> None:
    changes = {"zero_stage": stage, "dtype": dtype}
    parts = open_parts(tied_llama, config_with(**changes))
    update(parts, STEPS[0])
    parts.engine.save(tmp_path)
    parts.engine._engine.optimizer.clip_grad = CRITIC.max_grad_norm
    assert update(parts, STEPS[1]) > OPTIMIZER.max_grad_norm > CRITIC.max_grad_norm
    expected = weights_of(parts)
    parts.engine.close()
    limit = {**OPTIMIZER.model_dump(exclude_none=True), "max_grad_norm": CRITIC.max_grad_norm}
    parts = open_parts(tied_llama, config_with(**changes, optimizer=limit))
    parts.engine.load(tmp_path)
    update(parts, STEPS[1])
    assert_close(weights_of(parts), expected, atol=1e-7)
    parts.engine.close()


def test_a_weight_that_nothing_depends_on_decays_like_all_others(tied_llama: Path, commands: CommandChannel) -> None:
    config = config_with()
    policy = load_policy(tied_llama, config)
    policy.register_parameter("unused", torch.nn.Parameter(torch.ones(3)))
    parts = Parts(policy=policy, engine=TrainingEngine(policy, config=config, device=CPU))
    update(parts, STEPS[0], rate=0.1)
    torch.testing.assert_close(
        policy.get_parameter("unused").detach(), torch.full((3,), 1 - 0.1 * OPTIMIZER.weight_decay)
    )
    parts.engine.close()


def test_a_row_that_ranks_share_counts_on_each_with_the_tokens_that_it_computes(
    tied_llama: Path, commands: CommandChannel
) -> None:
    parts, row = open_parts(tied_llama, config_with(sequence_parallel=2)), microbatch(STEPS[0])
    parts.engine.forward(row)
    assert parts.engine.costs.taken().products[0] == (1, len(row.token_ids) / 2)
    parts.engine.close()


@pytest.mark.parametrize("stage", STAGES)
def test_a_pass_without_gradient_drops_nothing(tied_llama: Path, commands: CommandChannel, stage: int) -> None:
    parts = open_parts(tied_llama, config_with(zero_stage=stage, lora={**LORA, "dropout": 0.5}))
    update(parts, STEPS[0])  # until then `up` is 0, and nothing comes of what is dropped
    row = microbatch(STEPS[1])
    with_masks = [logprobs(parts, row).detach() for _ in range(2)]
    before = torch.get_rng_state()
    with torch.no_grad():
        first, again = logprobs(parts, row), logprobs(parts, row)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.allclose(with_masks[0], with_masks[1], atol=1e-3)
    assert not torch.allclose(logprobs(parts, row), first, atol=1e-3)
    parts.engine.close()
