import json
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from learner.algorithms.presets.grpo import GrpoConfig
from learner.algorithms.presets.opd import OpdConfig
from learner.algorithms.presets.ppo import PpoConfig
from learner.algorithms.presets.registry import AlgorithmConfig
from learner.algorithms.presets.sft import SftConfig
from learner.training.batch import Candidates, TrainSequence, flatten
from learner.training.config import Dtype, OptimizerConfig, TrainingConfig
from learner.training.models import Output
from learner.training.packing import Microbatch
from learner.training.policy import PolicyModel, WeightSnapshot
from learner.training.ranks import CommandChannel, Ranks
from learner.training.step import TrainingStopped
from learner.training.trainer import PROGRESS_FILE, NotFinite, Trainer, faster_dtype, stop_after_skips
from tests.learner.training.plain_adamw import plain_training
from tests.learner.training.tiny_model import random_sequences, with_a_bad_reward

# A large epsilon keeps AdamW's first steps from turning rounding of a tiny gradient into a whole step.
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, epsilon=1e-4, weight_decay=0.1, max_grad_norm=0.5)
CONFIG = TrainingConfig(optimizer=OPTIMIZER, microbatch_tokens=64)


@contextmanager
def trainer(
    path: Path,
    commands: CommandChannel,
    *,
    algorithm: AlgorithmConfig | None = None,
    config: TrainingConfig = CONFIG,
    keeps_tokens: bool = False,
) -> Iterator[Trainer]:
    made = Trainer(
        path,
        algorithm=algorithm or GrpoConfig(),
        config=config,
        ranks=Ranks(),
        commands=commands,
        keeps_tokens=keeps_tokens,
    )
    yield made
    made.close()


def assert_same_weights(snapshot: WeightSnapshot, expected: dict[str, torch.Tensor], *, atol: float = 1e-5) -> None:
    assert [tensor.name for tensor in snapshot.tensors] == list(expected)
    for tensor in snapshot.tensors:
        torch.testing.assert_close(tensor.value, expected[tensor.name], rtol=0, atol=atol)


def config_with(**changes: object) -> TrainingConfig:
    return TrainingConfig.model_validate({**CONFIG.model_dump(exclude_none=True), **changes})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_steps_move_the_weights_like_plain_adamw(tiny_llama: Path, commands: CommandChannel, stage: int) -> None:
    steps = [random_sequences(20, seed=1), random_sequences(7, seed=2)]
    expected = plain_training(tiny_llama, steps, optimizer=OPTIMIZER)
    with trainer(tiny_llama, commands, config=config_with(zero_stage=stage)) as made:
        metrics = [made.train_step(step, version=i) for i, step in enumerate(steps)]
        assert_same_weights(made.host_copy(), expected.weights)
        assert made.updates == 2
    assert [m.loss for m in metrics] == pytest.approx(expected.losses, abs=1e-5)
    assert [m.grad_norm for m in metrics] == pytest.approx(expected.grad_norms, rel=1e-4)
    assert metrics[0].microbatches > 1


def test_a_trajectory_without_a_token_to_train_is_compared_with_like_the_others(
    tiny_llama: Path, commands: CommandChannel
) -> None:
    """As one is whose tokens have all become too old. Without its reward the others' advantages would be different."""
    step = random_sequences(6, seed=3)
    step[2] = replace(step[2], loss_mask=np.zeros_like(step[2].loss_mask), reward=9.0)
    expected = plain_training(tiny_llama, [step], optimizer=OPTIMIZER)
    with trainer(tiny_llama, commands) as made:
        metrics = made.train_step(step, version=0)
        assert_same_weights(made.host_copy(), expected.weights)
    assert metrics.loss == pytest.approx(expected.losses[0], abs=1e-5)


@pytest.mark.parametrize("divergence", ["sampled", "reverse_kl"])
def test_a_step_of_which_no_token_is_trained_changes_no_weights(
    tiny_llama: Path, commands: CommandChannel, divergence: str
) -> None:
    """As one is whose teacher refuses all of its texts; it says nothing of them."""
    opd = OpdConfig.model_validate({"divergence": divergence})
    unlike = OptimizerConfig(learning_rate=1e-2, weight_decay=0.0)
    step = [
        replace(
            one,
            loss_mask=np.zeros_like(one.loss_mask),
            teacher_logprobs=np.zeros(len(one.token_ids), np.float32),
            candidates=None if divergence == "sampled" else no_candidates(len(one.token_ids), opd.teacher_tokens),
        )
        for one in random_sequences(6, seed=3)
    ]
    with trainer(tiny_llama, commands, algorithm=opd, config=config_with(optimizer=unlike)) as made:
        before = {tensor.name: tensor.value.clone() for tensor in made.host_copy().tensors}
        metrics = made.train_step(step, version=0)
        assert_same_weights(made.host_copy(), before, atol=0)
    assert (metrics.loss, metrics.skipped_updates) == (0.0, 0)


def no_candidates(length: int, count: int) -> Candidates:
    return Candidates(np.zeros((length, count), np.int32), np.zeros((length, count), np.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("stage", "offload"),
    [*((stage, "none") for stage in range(4)), *((stage, "optimizer") for stage in range(1, 4))],
)
def test_an_update_whose_gradient_is_not_finite_is_left_out_and_counted(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path, stage: int, offload: str, dtype: str
) -> None:
    good, bad = random_sequences(20, seed=1), with_a_bad_reward(random_sequences(20, seed=2))
    with trainer(tied_llama, commands, config=config_with(zero_stage=stage, offload=offload, dtype=dtype)) as made:
        made.train_step(good, version=0)
        before = {tensor.name: tensor.value for tensor in made.host_copy().tensors}
        made.save(tmp_path / "checkpoint")
        expected = made.train_step(good, version=1)
        made.load(tmp_path / "checkpoint")
        skipped = [made.train_step(bad, version=1) for _ in range(2)]
        assert_same_weights(made.host_copy(), before, atol=0)
        again = made.train_step(good, version=1)
        assert np.isfinite(made.probe_logprobs([[1, 2, 3]])).all()
    assert [(one.skipped_updates, one.skipped_in_row) for one in (*skipped, again)] == [(1, 1), (1, 2), (0, 0)]
    assert (again.loss, again.grad_norm) == (expected.loss, expected.grad_norm)
    with pytest.raises(NotFinite, match="2 updates in a row"):
        stop_after_skips(skipped[1], most=2)


@pytest.mark.parametrize(("algorithm", "noted"), [(GrpoConfig(), [2]), (PpoConfig(), [2, 2])])
def test_updates_that_were_skipped_in_a_row_still_count_after_a_resume(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path, algorithm: AlgorithmConfig, noted: list[int]
) -> None:
    good, bad = random_sequences(20, seed=1), with_a_bad_reward(random_sequences(20, seed=2))
    with trainer(tied_llama, commands, algorithm=algorithm) as made:
        made.train_step(good, version=0)
        made.train_step(bad, version=1)
        made.train_step(bad, version=2)
        made.save(tmp_path)
    with trainer(tied_llama, commands, algorithm=algorithm) as made:
        made.load(tmp_path)
        assert made.train_step(bad, version=3).skipped_in_row == 3
        progress = json.loads((tmp_path / PROGRESS_FILE).read_text(encoding="utf-8"))
        assert progress.pop("skipped_in_row") == noted
        (tmp_path / PROGRESS_FILE).write_text(json.dumps(progress), encoding="utf-8")
        made.load(tmp_path)
        assert made.train_step(bad, version=3).skipped_in_row == 1, "an older checkpoint begins anew"


def test_only_the_update_that_a_bad_reward_spoils_is_left_out(tied_llama: Path, commands: CommandChannel) -> None:
    sequences = [replace(one, group=number // 10) for number, one in enumerate(random_sequences(20))]
    with trainer(tied_llama, commands, config=config_with(updates_per_step=2)) as made:
        start = made.host_copy()
        metrics = made.train_step(with_a_bad_reward(sequences), version=0)
        moved = zip(start.tensors, made.host_copy().tensors, strict=True)
        assert any(not torch.equal(one.value, other.value) for one, other in moved)
    assert (metrics.updates, metrics.skipped_updates) == (2, 1)


@pytest.mark.parametrize("kind", ["model", "head"])
def test_a_critic_and_what_is_carried_on_survive_a_bad_reward(
    tied_llama: Path, commands: CommandChannel, kind: str
) -> None:
    algorithm = PpoConfig.model_validate({"type": "ppo", "reward_normalisation": "standardise"})
    config = config_with(critic={"kind": kind})
    with trainer(tied_llama, commands, algorithm=algorithm, config=config) as made:
        made.train_step(random_sequences(8, seed=1), version=0)
        spoiled = made.train_step(with_a_bad_reward(random_sequences(8, seed=2)), version=1)
        after = made.train_step(random_sequences(8, seed=1), version=2)
    assert spoiled.skipped_updates == 2
    assert after.skipped_updates == 0
    assert np.isfinite([after.loss, after.means["value_loss"]]).all()


def test_weights_that_are_not_finite_are_neither_published_nor_saved(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path
) -> None:
    with trainer(tied_llama, commands, config=config_with(max_skipped_updates=1)) as made:
        assert isinstance(made._models.trained, PolicyModel)
        weight = made._models.trained.get_parameter("causal_lm.model.norm.weight")
        weight.data[3] = float("inf")
        with pytest.raises(NotFinite, match=r"model\.norm\.weight"):
            made.host_copy()
        with pytest.raises(NotFinite, match="logprobs of the probe"):
            made.probe_logprobs([[1, 2, 3]])
        with pytest.raises(NotFinite, match="not written"):
            made.save(tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize("aggregation", ["token", "sequence_mean", "sequence_sum", "constant"])
def test_the_split_into_microbatches_changes_neither_loss_nor_weights(
    tied_llama: Path, commands: CommandChannel, aggregation: str
) -> None:
    algorithm = GrpoConfig.model_validate({"type": "grpo", "aggregation": aggregation})
    results = []
    for budget in (1, 50, 10_000):
        config = config_with(microbatch_tokens=budget)
        with trainer(tied_llama, commands, algorithm=algorithm, config=config) as made:
            metrics = made.train_step(random_sequences(16), version=0)
            results.append((metrics, {tensor.name: tensor.value for tensor in made.host_copy().tensors}))
    assert [metrics.microbatches for metrics, _ in results][::2] == [16, 1]
    for metrics, weights in results[1:]:
        assert metrics.loss == pytest.approx(results[0][0].loss, abs=1e-5)
        assert metrics.grad_norm == pytest.approx(results[0][0].grad_norm, rel=1e-5)
        for name, value in weights.items():
            torch.testing.assert_close(value, results[0][1][name], rtol=0, atol=1e-5)


def test_metrics_are_those_worked_out_from_the_logprobs(tied_llama: Path, commands: CommandChannel) -> None:
    sequences = random_sequences(16)
    with trainer(tied_llama, commands, config=config_with(temperature=1.0)) as made:
        learner = np.concatenate([_learner_logprobs(made, sequence) for sequence in sequences]).astype(np.float64)
        metrics = made.train_step(sequences, version=3)
    batch = flatten(sequences)
    behavior = batch.behavior_logprobs[batch.loss_mask].astype(np.float64)
    gap = learner - behavior
    ratio = np.exp(gap)
    owner = np.repeat(np.arange(16), batch.lengths)[batch.loss_mask]
    current = (batch.lags[batch.loss_mask] == 0) & ~batch.mixed_versions[owner]
    divergence = np.minimum(ratio - 1 - gap, 10.0)  # what one token counts for at most
    assert metrics.mismatch_kl == pytest.approx(divergence[current].mean(), rel=1e-4)
    assert metrics.behavior_kl == pytest.approx(divergence.mean(), rel=1e-4)
    assert metrics.importance_ratio_mean == pytest.approx(ratio.mean(), rel=1e-4)
    assert metrics.importance_ratio_max == pytest.approx(ratio.max(), rel=1e-4)
    assert metrics.effective_sample_share == pytest.approx(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()), rel=1e-4)
    assert metrics.correction_fraction == pytest.approx((ratio >= 2).mean(), abs=1e-6)
    assert metrics.clip_fraction is None
    assert (metrics.tokens, metrics.trained_tokens) == (batch.lengths.sum(), len(gap))


def _learner_logprobs(made: Trainer, sequence: TrainSequence) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.array(made.probe_logprobs([sequence.token_ids.tolist()]), dtype=np.float32)[sequence.loss_mask[1:]]


def test_several_updates_per_step_keep_the_policy_of_the_steps_start_as_their_anchor(
    tied_llama: Path, commands: CommandChannel
) -> None:
    sequences = random_sequences(16)
    with trainer(tied_llama, commands, config=config_with(updates_per_step=4)) as made:
        metrics = made.train_step(sequences, version=0)
        assert made.updates == metrics.updates == 4
    assert metrics.clip_fraction is not None
    assert metrics.clip_fraction > 0


def test_an_epoch_more_goes_through_the_same_batch_again(tied_llama: Path, commands: CommandChannel) -> None:
    """As a second step on it does, for a loss that has no anchor."""
    ended = []
    for epochs, steps in ((2, 1), (1, 2), (1, 1)):
        config = config_with(updates_per_step=2, epochs_per_step=epochs)
        with trainer(tied_llama, commands, algorithm=SftConfig(), config=config) as made:
            metrics = [made.train_step(random_sequences(16), version=index) for index in range(steps)]
            assert made.updates == 2 * epochs * steps == sum(step.updates for step in metrics)
            assert metrics[0].trained_tokens == metrics[-1].trained_tokens
            ended.append({tensor.name: tensor.value for tensor in made.host_copy().tensors})
    twice, again, once = ended
    assert all(torch.equal(value, again[name]) for name, value in twice.items())
    assert not all(torch.equal(value, once[name]) for name, value in twice.items())


def test_every_epoch_has_the_policy_of_the_steps_start_as_its_anchor(
    tied_llama: Path, commands: CommandChannel
) -> None:
    sequences = random_sequences(16)
    with trainer(tied_llama, commands, config=config_with(epochs_per_step=3), keeps_tokens=True) as made:
        before = [_learner_logprobs(made, sequence) for sequence in sequences]
        metrics = made.train_step(sequences, version=0)
        assert made.tokens is not None
        kept = made.tokens.learner_logprobs
    assert metrics.clip_fraction is not None
    assert metrics.clip_fraction > 0
    trained = np.concatenate([sequence.loss_mask for sequence in sequences])
    np.testing.assert_allclose(kept[trained], np.concatenate(before), atol=1e-5)


@pytest.mark.parametrize(("updates", "epochs"), [(1, 1), (1, 3), (2, 1), (2, 2)])
@pytest.mark.parametrize("mixed", [0, 1, 3, 5], ids=lambda groups: f"{groups} of 5 groups with different rewards")
def test_what_has_no_advantage_is_measured_and_not_learned_from_and_nothing_else_changes(
    tied_llama: Path, commands: CommandChannel, monkeypatch: pytest.MonkeyPatch, mixed: int, updates: int, epochs: int
) -> None:
    sequences = [
        replace(one, group=index // 4, reward=one.reward if index // 4 < mixed else 0.5)
        for index, one in enumerate(random_sequences(20))
    ]
    config = config_with(updates_per_step=updates, epochs_per_step=epochs)
    found, tokens = [], []
    for skips in (True, False):
        with monkeypatch.context() as patch:
            made_preset = GrpoConfig.preset
            patch.setattr(
                GrpoConfig,
                "preset",
                lambda algo, made=made_preset, skips=skips: replace(made(algo), rests_on_advantages=skips),
            )
            with trainer(tied_llama, commands, config=config, keeps_tokens=True) as made:
                metrics = [made.train_step(sequences, version=step) for step in range(2)]
                weights = {tensor.name: tensor.value.clone() for tensor in made.host_copy().tensors}
                assert made.tokens is not None
        found.append((metrics, weights))
        tokens.append(made.tokens)
    (one, weights), (other, expected) = found
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5)
    for step, whole in zip(one, other, strict=True):
        assert step.grad_norm == pytest.approx(whole.grad_norm, rel=1e-4, abs=1e-9)
        assert step.loss == pytest.approx(whole.loss, abs=1e-5)
        assert step.mismatch_kl == pytest.approx(whole.mismatch_kl, abs=1e-5)
        assert step.importance_ratio_mean == pytest.approx(whole.importance_ratio_mean, abs=1e-4)
        if epochs == 1:  # of later ones, what is measured once is as the first one found it
            assert step.entropy == pytest.approx(whole.entropy, abs=1e-5)
        assert (step.trained_tokens, step.sequences, step.updates) == (
            (whole.trained_tokens, whole.sequences, whole.updates)
        )
    np.testing.assert_allclose(tokens[0].learner_logprobs, tokens[1].learner_logprobs, atol=1e-5)
    np.testing.assert_allclose(tokens[0].entropies, tokens[1].entropies, atol=1e-5)


def test_a_group_of_equal_rewards_costs_no_gradient(
    tied_llama: Path, commands: CommandChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences = [
        replace(one, group=index // 4, reward=one.reward if index < 8 else 0.5)
        for index, one in enumerate(random_sequences(20))
    ]
    learned, seen = [], [0]
    with trainer(tied_llama, commands, config=config_with(epochs_per_step=2)) as made:
        engine = made._models.engine
        forward, backward = engine.forward, engine.backward

        def counted_forward(microbatch: Microbatch) -> Output:
            seen.append(len(microbatch.members))
            return forward(microbatch)

        def counted_backward(loss: torch.Tensor, *, last: bool) -> None:
            learned.append(seen[-1])
            backward(loss, last=last)

        monkeypatch.setattr(engine, "forward", counted_forward)
        monkeypatch.setattr(engine, "backward", counted_backward)
        made.train_step(sequences, version=0)
    assert sum(learned) == 2 * 8, "those of the two groups whose rewards differ, in each epoch"


def test_the_penalty_towards_the_initial_model_changes_nothing_at_first_and_then_pulls_back(
    tied_llama: Path, commands: CommandChannel
) -> None:
    def distance(coefficient: float) -> tuple[float, float]:
        algorithm = GrpoConfig(kl_coefficient=coefficient)
        with trainer(tied_llama, commands, algorithm=algorithm) as made:
            start = {tensor.name: tensor.value for tensor in made.host_copy().tensors}
            losses = [made.train_step(random_sequences(16), version=i).loss for i in range(4)]
            end = made.host_copy()
        return losses[0], sum(float((t.value - start[t.name]).square().sum()) for t in end.tensors)

    free_loss, free = distance(0.0)
    held_loss, held = distance(5.0)
    assert held_loss == pytest.approx(free_loss, abs=1e-5)
    assert held < free


def test_supervised_training_lowers_the_loss_and_reports_nothing_about_sampling(
    tiny_llama: Path, commands: CommandChannel
) -> None:
    with trainer(tiny_llama, commands, algorithm=SftConfig()) as made:
        metrics = [made.train_step(random_sequences(16), version=0) for _ in range(10)]
    assert metrics[-1].loss < 0.8 * metrics[0].loss
    assert metrics[0].importance_ratio_mean is None
    assert metrics[0].mismatch_kl is None


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bfloat16_trains_and_keeps_float32_masters(tied_llama: Path, commands: CommandChannel, stage: int) -> None:
    config = config_with(dtype="bfloat16", zero_stage=stage)
    with trainer(tied_llama, commands, algorithm=SftConfig(), config=config) as made:
        losses = [made.train_step(random_sequences(16), version=0).loss for _ in range(10)]
        copy = made.host_copy()
    assert losses[-1] < 0.8 * losses[0]
    assert all(tensor.value.dtype == torch.float32 for tensor in copy.tensors)
    assert any(not torch.equal(tensor.value, tensor.value.bfloat16().float()) for tensor in copy.tensors)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_copy_to_be_published_lies_in_buckets_and_later_steps_do_not_change_it(
    tied_llama: Path, commands: CommandChannel, stage: int
) -> None:
    with trainer(tied_llama, commands, config=config_with(zero_stage=stage)) as made:
        alone, copy = made.host_copy(), made.host_copy(bucket_bytes=100_000)
        made.train_step(random_sequences(20), version=0)
        assert not torch.equal(made.host_copy().tensors[0].value, copy.tensors[0].value)
    assert_same_weights(copy, {tensor.name: tensor.value for tensor in alone.tensors}, atol=0)
    assert 1 < len(copy.buckets) < len(alone.buckets) == len(alone.tensors)
    laid_out = [named for bucket in copy.buckets for named in bucket.named()]
    for (name, value), tensor in zip(laid_out, copy.tensors, strict=True):
        assert (name, value.data_ptr()) == (tensor.name, tensor.value.data_ptr())


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_checkpoint_continues_as_if_nothing_had_happened(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path, stage: int
) -> None:
    config = config_with(
        zero_stage=stage, optimizer={**OPTIMIZER.model_dump(), "schedule": "linear", "total_updates": 5}
    )
    steps = [random_sequences(8, seed=seed) for seed in range(4)]
    with trainer(tied_llama, commands, config=config) as made:
        for step in steps[:2]:
            made.train_step(step, version=0)
        made.save(tmp_path / "checkpoint")
        straight = [made.train_step(step, version=0) for step in steps[2:]][-1]
        expected = {tensor.name: tensor.value for tensor in made.host_copy().tensors}
    with trainer(tied_llama, commands, config=config) as made:
        made.load(tmp_path / "checkpoint")
        resumed = [made.train_step(step, version=0) for step in steps[2:]][-1]
        assert_same_weights(made.host_copy(), expected, atol=1e-7)
    assert resumed.learning_rate == straight.learning_rate
    assert resumed.loss == pytest.approx(straight.loss, abs=1e-7)


def test_a_checkpoint_takes_up_every_random_state(tied_llama: Path, commands: CommandChannel, tmp_path: Path) -> None:
    def drawn() -> list[float]:
        values = [random.random(), random.gauss(), np.random.random(), np.random.normal()]
        return [*values, *torch.rand(3).tolist()]

    with trainer(tied_llama, commands) as made:
        random.gauss()  # one of a pair is kept for the next call
        np.random.normal()
        made.save(tmp_path / "checkpoint")
        expected = drawn()
        assert drawn() != expected
        made.load(tmp_path / "checkpoint")
        assert drawn() == expected


def test_a_full_disk_at_a_checkpoint_is_an_oserror_and_training_goes_on(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path
) -> None:
    with trainer(tied_llama, commands) as made:
        former = resource.getrlimit(resource.RLIMIT_FSIZE)
        for size in (100, 20_000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, former[1]))
            try:
                with pytest.raises(OSError):
                    made.save(tmp_path / f"checkpoint-{size}")
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, former)
        made.train_step(random_sequences(8), version=0)
        made.save(tmp_path / "checkpoint")
        made.load(tmp_path / "checkpoint")


def test_loading_what_is_not_there_says_what_was_expected(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path
) -> None:
    with trainer(tied_llama, commands) as made, pytest.raises(FileNotFoundError, match=r"trainer\.json"):
        made.load(tmp_path)


def test_an_export_is_a_model_directory_with_the_tokenizer_and_the_trained_weights(
    tiny_llama: Path, commands: CommandChannel, tmp_path: Path
) -> None:
    with trainer(tiny_llama, commands) as made:
        made.train_step(random_sequences(8), version=0)
        made.export(tmp_path / "export")
        ours = made.probe_logprobs([[3, 4, 5, 6], [3, 4, 5]])
        assert ours[3:] == pytest.approx(ours[:2], abs=1e-6), "texts do not see one another"
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    with torch.no_grad():
        logits = exported(input_ids=torch.tensor([[3, 4, 5, 6]])).logits[0]
    expected = torch.log_softmax(logits, dim=1)[torch.arange(3), [4, 5, 6]]
    torch.testing.assert_close(torch.tensor(ours[:3]), expected, rtol=0, atol=1e-5)
    assert (tmp_path / "export" / "tokenizer.json").is_file()


def test_a_copy_on_the_host_is_not_changed_by_the_next_step(tied_llama: Path, commands: CommandChannel) -> None:
    with trainer(tied_llama, commands) as made:
        copy = made.host_copy()
        before = [tensor.value.clone() for tensor in copy.tensors]
        made.train_step(random_sequences(8), version=0)
    assert all(torch.equal(tensor.value, value) for tensor, value in zip(copy.tensors, before, strict=True))


def test_a_step_can_be_stopped_between_microbatches_and_leaves_the_weights_alone(
    tied_llama: Path, commands: CommandChannel
) -> None:
    answers = iter([False, False, True])
    made = Trainer(
        tied_llama,
        algorithm=GrpoConfig(),
        config=CONFIG,
        ranks=Ranks(),
        commands=commands,
        should_stop=lambda: next(answers, False),
    )
    before = made.host_copy()
    with pytest.raises(TrainingStopped):
        made.train_step(random_sequences(20), version=0)
    after = made.host_copy()
    pairs = zip(before.tensors, after.tensors, strict=True)
    assert all(torch.equal(one.value, other.value) for one, other in pairs)
    expected = plain_training(tied_llama, [random_sequences(20)], optimizer=OPTIMIZER)
    made.train_step(random_sequences(20), version=0)
    assert_same_weights(made.host_copy(), expected.weights)
    made.close()


OLD, AVX512, AMX = ({"amx_bf16": amx, "avx512_bf16": avx} for amx, avx in ((False, False), (False, True), (True, True)))
ARM = {"arm_bf16": True}


@pytest.mark.parametrize(
    ("dtype", "weights", "device", "cpu", "faster"),
    [
        ("bfloat16", 135_000_000, "cpu", OLD, "float32"),
        ("bfloat16", 600_000, "cpu", OLD, "float32"),
        ("bfloat16", 135_000_000, "cpu", AVX512, "bfloat16"),
        ("bfloat16", 135_000_000, "cpu", AMX, "bfloat16"),
        ("bfloat16", 135_000_000, "cpu", ARM, "bfloat16"),
        ("bfloat16", 135_000_000, "cuda", OLD, "bfloat16"),
        ("float32", 135_000_000, "cpu", OLD, "float32"),
        ("float32", 135_000_000, "cpu", AVX512, "bfloat16"),
        ("float32", 135_000_000, "cpu", AMX, "bfloat16"),
        ("float32", 600_000, "cpu", AMX, "float32"),  # too small to gain
        ("float32", 135_000_000, "cpu", ARM, "float32"),  # not measured
        ("float32", 135_000_000, "cuda", AMX, "float32"),
    ],
)
def test_the_faster_type_follows_what_the_cpu_multiplies_fast(
    dtype: Dtype, weights: int, device: str, cpu: dict[str, bool], faster: Dtype
) -> None:
    assert faster_dtype(dtype, device=torch.device(device), cpu=cpu, weights=weights) == faster


def test_the_learner_says_which_type_would_be_faster(
    tiny_llama: Path, commands: CommandChannel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: AMX)
    caplog.set_level("INFO", "learner.training.trainer")
    with trainer(tiny_llama, commands):
        assert "multiplies bfloat16 fast" not in caplog.text
    monkeypatch.setattr("learner.training.trainer._BOUND_BY_PRODUCTS", 0)
    with trainer(tiny_llama, commands):
        assert "this CPU multiplies bfloat16 fast" in caplog.text
