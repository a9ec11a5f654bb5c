"""Training models beside each other: each must come out as if it were alone, whatever the others do."""

import gc
import json
import math
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors
from torch import Tensor
from transformers import AutoModelForCausalLM

from learner.algorithms.client_graphs import LossGraph
from learner.algorithms.client_losses import LOSS_NAMES
from learner.training import adapter_layers, adapter_trainer, low_rank
from learner.training.adapter_trainer import AdapterTrainer
from learner.training.client_operations import (
    AdamStep,
    AdapterShape,
    ClientDatum,
    ForwardBackward,
    OperationError,
    OperationResult,
)
from tests.learner.training.client_work import (
    LENGTHS,
    PlainModel,
    gradients_of,
    operation,
    plain_loss,
    preset_loss,
    shape_of,
    with_models,
)
from tests.learner.training.tiny_models import write_tiny_model

TOLERANCE = 1e-6
GRAPHS = Path(__file__).parents[1] / "algorithms" / "client_graphs"


@pytest.fixture
def trainer(tiny_llama: Path) -> AdapterTrainer:
    return AdapterTrainer.open(tiny_llama, name="tiny")


def done(results: Sequence[OperationResult | OperationError]) -> list[OperationResult]:
    for result in results:
        if isinstance(result, OperationError):
            raise result
    return [result for result in results if isinstance(result, OperationResult)]


def test_an_operation_without_memory_keeps_nothing_of_its_pass(
    trainer: AdapterTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = with_models(trainer, 1)
    passes: list[weakref.ref[Tensor]] = []

    kinds = [RuntimeError] * 3 + [OperationError] * 3

    def failing(row: object) -> list[Tensor]:
        hidden = torch.zeros(8)
        passes.append(weakref.ref(hidden))
        raise kinds[len(passes) - 1]("no memory")

    monkeypatch.setattr(trainer._model, "logprobs", failing)
    monkeypatch.setattr(adapter_trainer.logger, "disabled", True)  # pytest keeps what is logged
    for _ in range(2):
        gc.disable()
        try:
            results = trainer.run_round([operation(one, 1), operation(one, 2)])
            assert [each() for each in passes] == [None] * len(passes)
        finally:
            gc.enable()
        assert all(isinstance(result, OperationError) for result in results)
    assert len(passes) == 6


def graph(name: str) -> LossGraph:
    told = json.loads((GRAPHS / f"{name}.json").read_text(encoding="utf-8"))
    return LossGraph.parse(name=name, inputs=told["inputs"], graph=told["graph"])


def custom(name: str, of: ForwardBackward) -> ForwardBackward:
    return replace(of, loss="custom", graph=graph(name))


def states_of(trainer: AdapterTrainer, names: Sequence[str]) -> dict[str, dict[str, np.ndarray]]:
    return {name: trainer.state(name) for name in names}


def assert_equal(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    """Bit by bit."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.tobytes() == theirs[name].tobytes(), name


def assert_near(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], *, to: float = TOLERANCE) -> None:
    """By the global norm of the gradients of an adapter, and of each factor to ten times as much."""
    assert ours.keys() == theirs.keys()
    assert ours
    gaps = {name: float(np.linalg.norm(value - theirs[name])) for name, value in ours.items()}
    norms = {name: float(np.linalg.norm(value)) for name, value in theirs.items()}
    assert math.hypot(*gaps.values()) <= to * math.hypot(*norms.values())
    assert {name: gap for name, gap in gaps.items() if gap > 10 * to * norms[name]} == {}


@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_losses_and_gradients_are_those_of_plain_torch(trainer: AdapterTrainer, tiny_llama: Path, loss: str) -> None:
    (name,) = with_models(trainer, 1)
    asked = operation(name, 1, loss=loss)
    plain = PlainModel.load(tiny_llama)
    factors = plain.factors(trainer.state(name))
    logprobs = [plain.logprobs(factors, datum, scale=16.0 / 4) for datum in asked.data]
    expected = torch.stack([plain_loss(loss, p, d) for p, d in zip(logprobs, asked.data, strict=True)]).sum()
    slopes = torch.autograd.grad(expected, list(factors.values()))

    (result,) = done(trainer.run_round([asked]))

    assert result.metrics == {"loss:sum": pytest.approx(float(expected.detach()), rel=1e-5)}
    for output, p in zip(result.outputs, logprobs, strict=True):
        np.testing.assert_allclose(output.arrays["logprobs"], p.detach().numpy(), rtol=1e-5, atol=1e-5)
    found = gradients_of(trainer.state(name))
    assert_near(found, {f"{k}.gradient": s.numpy() for k, s in zip(factors, slopes, strict=True)}, to=1e-5)


@pytest.mark.parametrize("width", [1, 3])
def test_several_targets_of_a_position_are_those_of_plain_torch(
    trainer: AdapterTrainer, tiny_llama: Path, width: int
) -> None:
    (name,) = with_models(trainer, 1)
    wide, narrow = operation(name, 1, width=width), operation(name, 2)
    mixed = replace(wide, data=(*wide.data, *narrow.data))
    plain = PlainModel.load(tiny_llama)
    factors = plain.factors(trainer.state(name))
    logprobs = [plain.logprobs(factors, datum, scale=4.0) for datum in mixed.data]
    expected = torch.stack([plain_loss("cross_entropy", p, d) for p, d in zip(logprobs, mixed.data, strict=True)]).sum()
    slopes = torch.autograd.grad(expected, list(factors.values()))

    (result,) = done(trainer.run_round([mixed]))

    assert result.metrics["loss:sum"] == pytest.approx(float(expected.detach()), rel=1e-5)
    assert result.outputs[1].arrays["logprobs"].shape == (LENGTHS[1], width)
    np.testing.assert_allclose(result.outputs[1].arrays["logprobs"], logprobs[1].detach(), rtol=1e-5, atol=1e-5)
    found = gradients_of(trainer.state(name))
    assert_near(found, {f"{k}.gradient": s.numpy() for k, s in zip(factors, slopes, strict=True)}, to=1e-5)


def alone(trainer: AdapterTrainer, asked: Sequence[ForwardBackward]) -> list[dict[str, np.ndarray]]:
    """The gradients of each operation, done alone on models that have accumulated nothing."""
    found = []
    for each in asked:
        before = trainer.state(each.model_id)
        done(trainer.run_round([each]))
        found.append(gradients_of(trainer.state(each.model_id)))
        trainer.restore(each.model_id, shape_of(int(each.model_id.split("-")[1])), before)
    return found


@pytest.mark.parametrize(("count", "at_once"), [(2, True), (8, True), (8, False)])
def test_tenants_in_one_pass_are_as_each_alone(
    trainer: AdapterTrainer, count: int, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All adapters' terms at once, as here, where rows are short, and one after another."""
    for module in (low_rank, adapter_layers):
        monkeypatch.setattr(module, "at_once", lambda *_, **__: at_once)
    names = with_models(trainer, count)
    asked = [operation(name, number, loss=LOSS_NAMES[number % 7]) for number, name in enumerate(names)]
    expected = alone(trainer, asked)
    losses = [done(trainer.run_round([replace(each, forward_only=True)]))[0].metrics["loss:sum"] for each in asked]
    fresh = states_of(trainer, names)
    orders: list[Sequence[int]] = [range(count), range(count - 1, -1, -1)]
    orders += [np.random.default_rng(seed).permutation(count).tolist() for seed in range(4)]
    for order in orders:
        trainer.passes = 0
        results = done(trainer.run_round([asked[place] for place in order]))
        assert trainer.passes == 1
        for place, result in zip(order, results, strict=True):
            assert result.metrics["loss:sum"] == pytest.approx(losses[place], rel=1e-6, abs=3e-5)
            assert_near(gradients_of(trainer.state(names[place])), expected[place])
            trainer.restore(names[place], shape_of(place), fresh[names[place]])


@pytest.mark.parametrize("other", range(4))
def test_other_data_of_a_tenant_changes_nobody_elses(trainer: AdapterTrainer, other: int) -> None:
    names = with_models(trainer, 4)
    fresh = states_of(trainer, names)

    def gradients(seed: int) -> list[dict[str, np.ndarray]]:
        asked = [operation(name, seed if number == other else number) for number, name in enumerate(names)]
        done(trainer.run_round(asked))
        found = [gradients_of(trainer.state(name)) for name in names]
        for number, name in enumerate(names):
            trainer.restore(name, shape_of(number), fresh[name])
        return found

    first, second = gradients(50), gradients(51)
    assert all(value.any() for value in first[other].values())
    assert any(value.tobytes() != second[other][name].tobytes() for name, value in first[other].items())
    for number in {0, 1, 2, 3} - {other}:
        assert_equal(first[number], second[number])


def test_calls_add_up_until_a_step_and_a_step_spends_them(trainer: AdapterTrainer) -> None:
    (name,) = with_models(trainer, 1)
    first, second = operation(name, 1), operation(name, 2, loss="ppo")
    one, two = alone(trainer, [first, second])
    done(trainer.run_round([first]))
    done(trainer.run_round([second]))
    apart = gradients_of(trainer.state(name))
    assert_near(apart, {key: one[key] + two[key] for key in one})
    before = trainer.state(name)
    metrics = trainer.step(AdamStep(name, learning_rate=1e-2))
    after = trainer.state(name)
    norm = np.sqrt(sum(float((value.astype(np.float64) ** 2).sum()) for value in apart.values()))
    assert metrics == {"grad_norm:mean": pytest.approx(norm, rel=1e-6), "step:max": 1.0}
    assert gradients_of(after) == {}
    assert int(after["steps"]) == 1
    moved = {key for key in before if key.endswith((".up", ".down")) and before[key].tobytes() != after[key].tobytes()}
    assert moved == {key for key in before if key.endswith((".up", ".down"))}


def test_a_round_may_have_several_calls_of_a_model(trainer: AdapterTrainer) -> None:
    (name,) = with_models(trainer, 1)
    asked = [operation(name, 1), operation(name, 2, forward_only=True), operation(name, 3)]
    one, _, three = alone(trainer, [replace(each, forward_only=False) for each in asked])
    trainer.passes = 0
    results = done(trainer.run_round(asked))
    assert trainer.passes == 2  # one with gradients, one without
    assert [len(each.outputs) for each in results] == [5, 5, 5]
    assert_near(gradients_of(trainer.state(name)), {key: one[key] + three[key] for key in one})


def test_forward_only_gives_the_same_numbers_and_no_gradient(trainer: AdapterTrainer) -> None:
    (name,) = with_models(trainer, 1)
    asked = operation(name, 4, loss="gspo")
    (only,) = done(trainer.run_round([replace(asked, forward_only=True)]))
    assert gradients_of(trainer.state(name)) == {}
    (both,) = done(trainer.run_round([asked]))
    assert only.metrics == both.metrics
    for ours, theirs in zip(only.outputs, both.outputs, strict=True):
        np.testing.assert_array_equal(ours.arrays["logprobs"], theirs.arrays["logprobs"])


def test_many_small_rows_are_as_one_large_one(tiny_llama: Path) -> None:
    large = AdapterTrainer.open(tiny_llama)
    small = AdapterTrainer.open(tiny_llama, microbatch_tokens=20)
    found = []
    for trainer in (large, small):
        names = with_models(trainer, 3)
        asked = [operation(name, number, loss="importance_sampling") for number, name in enumerate(names)]
        results = done(trainer.run_round([*asked, custom("squares", operation(names[0], 9))]))
        found.append(([each.metrics for each in results], [gradients_of(trainer.state(name)) for name in names]))
    assert large.passes == 1
    assert small.passes > 5
    for ours, theirs in zip(found[0][0], found[1][0], strict=True):
        assert dict(ours) == pytest.approx(dict(theirs), rel=1e-6, abs=3e-5)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert_near(one, other)


@pytest.mark.parametrize("shorter", [False, True], ids=["one row", "many rows"])
def test_an_operation_that_fails_adds_nothing_and_spoils_nothing(tiny_llama: Path, shorter: bool) -> None:
    trainer = AdapterTrainer.open(tiny_llama, microbatch_tokens=20 if shorter else 16384)
    names = with_models(trainer, 4)
    good = [operation(name, number, loss="ppo") for number, name in enumerate(names)]
    expected = alone(trainer, good)
    wrong = custom("weighted", operation(names[1], 5))
    data = list(wrong.data)
    data[2] = replace(data[2], inputs={**data[2].inputs, "weights": np.full(9, -np.inf, dtype=np.float32)})
    cut = custom("clipped", operation(names[3], 6))  # its input `old` is missing
    fails = [replace(wrong, data=tuple(data)), cut, replace(good[2], model_id="nobody")]
    results = trainer.run_round([good[0], *fails, *good[1:]])
    errors = [str(each) for each in results if isinstance(each, OperationError)]
    assert len(errors) == 3
    assert errors[0].startswith("datum 2: the loss weighted: the loss is ")
    assert errors[1] == "datum 0: old is missing: the loss clipped takes it"
    assert errors[2].startswith("no training model nobody is loaded")
    for number, name in enumerate(names):
        assert_near(gradients_of(trainer.state(name)), expected[number])


def test_a_tenant_whose_weights_have_grown_too_large_fails_alone(trainer: AdapterTrainer) -> None:
    names = with_models(trainer, 3)
    asked = [operation(name, number) for number, name in enumerate(names)]
    expected = alone(trainer, asked)
    broken = trainer.state(names[0])
    for key, value in broken.items():
        if key.endswith((".up", ".down")):
            broken[key] = np.full_like(value, 1e30)
    trainer.restore(names[0], shape_of(0), broken)
    results = trainer.run_round(asked)
    assert isinstance(results[0], OperationError)
    assert "datum 0: its logprobs are not numbers" in str(results[0])
    assert gradients_of(trainer.state(names[0])) == {}
    done(results[1:])
    for number in (1, 2):
        assert_near(gradients_of(trainer.state(names[number])), expected[number])


def test_a_gradient_that_leaves_the_numbers_in_the_model_is_one_tenants_alone(trainer: AdapterTrainer) -> None:
    names = with_models(trainer, 3)
    asked = [operation(name, number) for number, name in enumerate(names)]
    expected = alone(trainer, asked)
    data = [
        replace(each, inputs={**each.inputs, "weights": np.full_like(each.inputs["weights"], 3e38)})
        for each in asked[0].data
    ]
    results = trainer.run_round([replace(asked[0], data=tuple(data)), *asked[1:]])
    assert "the gradient through the model is not finite" in str(results[0])
    assert gradients_of(trainer.state(names[0])) == {}
    done(results[1:])
    for number in (1, 2):
        assert_near(gradients_of(trainer.state(names[number])), expected[number])


def test_parking_in_the_middle_changes_no_bit(trainer: AdapterTrainer) -> None:
    names = with_models(trainer, 3)
    twin = names[1]

    def history(*, parked: bool) -> dict[str, np.ndarray]:
        start = fresh
        trainer.restore(twin, shape_of(1), start)
        for number in range(8):
            done(trainer.run_round([operation(twin, number, loss=LOSS_NAMES[number % 7])]))
            if parked:
                state = load_tensors(save_tensors(trainer.state(twin)))
                trainer.remove(twin)
                with pytest.raises(OperationError, match="no training model model-1 is loaded"):
                    trainer.state(twin)
                trainer.restore(twin, shape_of(1), state)
            if number % 3 == 2:
                trainer.step(AdamStep(twin, learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=1.0))
        return trainer.state(twin)

    fresh = trainer.state(twin)
    undisturbed, parked = history(parked=False), history(parked=True)
    assert int(undisturbed["steps"]) == 2
    assert gradients_of(undisturbed)
    assert_equal(undisturbed, parked)


def test_weights_alone_are_restored_without_optimizer(trainer: AdapterTrainer) -> None:
    (name,) = with_models(trainer, 1)
    done(trainer.run_round([operation(name, 1)]))
    trainer.step(AdamStep(name, learning_rate=1e-2))
    done(trainer.run_round([operation(name, 2)]))
    state = trainer.state(name)
    trainer.restore("copy", shape_of(0), state, optimizer=False)
    copied = trainer.state("copy")
    assert int(copied["steps"]) == 0
    assert {key for key in copied if key != "steps"} == {key for key in state if key.endswith((".up", ".down"))}
    assert all(copied[key].tobytes() == state[key].tobytes() for key in copied if key != "steps")
    with pytest.raises(OperationError, match=r"the state has .* expected \(5, 64\) for rank 5 on tiny"):
        trainer.restore("other", replace(shape_of(0), rank=5), state)


def test_a_copy_does_not_follow_the_model(trainer: AdapterTrainer) -> None:
    (name,) = with_models(trainer, 1)
    done(trainer.run_round([operation(name, 1)]))
    state = trainer.state(name)
    before = {key: value.copy() for key, value in state.items()}
    done(trainer.run_round([operation(name, 2)]))
    trainer.step(AdamStep(name, learning_rate=1.0))
    assert_equal(state, before)


def test_custom_losses_have_metrics_and_gradients(trainer: AdapterTrainer) -> None:
    (name,) = with_models(trainer, 1)
    asked = custom("weighted", operation(name, 3))
    plain, fresh = operation(name, 3), trainer.state(name)
    (ours,) = done(trainer.run_round([asked]))
    found = gradients_of(trainer.state(name))
    trainer.restore(name, shape_of(0), fresh)
    (theirs,) = alone(trainer, [plain])
    (same,) = done(trainer.run_round([replace(plain, forward_only=True)]))
    assert ours.metrics["loss:sum"] == pytest.approx(same.metrics["loss:sum"], rel=1e-6, abs=1e-5)
    assert ours.metrics["custom/neg_ll:sum"] == pytest.approx(same.metrics["loss:sum"], rel=1e-6, abs=1e-5)
    lengths = [float(datum.inputs["weights"].sum()) / len(datum.token_ids) for datum in asked.data]
    assert ours.metrics["custom/length:mean"] == pytest.approx(sum(lengths) / len(lengths), rel=1e-5)
    assert_near(found, theirs)


@pytest.mark.parametrize("preset", ["grpo", "dapo", "gspo", "gmpo", "sapo", "cispo", "topr", "kimi", "dppo", "vespo"])
def test_presets_of_ours_are_those_of_plain_torch(trainer: AdapterTrainer, tiny_llama: Path, preset: str) -> None:
    """Of all data in one call of the preset, and of one row each in the trainer."""
    (name,) = with_models(trainer, 1)
    asked = operation(name, 3, loss="ppo", headway=preset)
    plain = PlainModel.load(tiny_llama)
    factors = plain.factors(trainer.state(name))
    logprobs = [plain.logprobs(factors, datum, scale=16.0 / 4) for datum in asked.data]
    expected = preset_loss(preset, logprobs, asked.data)
    slopes = torch.autograd.grad(expected, list(factors.values()), allow_unused=True)

    (result,) = done(trainer.run_round([asked]))

    assert result.metrics == {"loss:sum": pytest.approx(float(expected.detach()), rel=1e-5, abs=1e-5)}
    made = {
        f"{k}.gradient": torch.zeros_like(factors[k]) if s is None else s for k, s in zip(factors, slopes, strict=True)
    }
    assert_near(gradients_of(trainer.state(name)), {key: each.numpy() for key, each in made.items()}, to=1e-5)


def test_versions_become_lags_by_the_steps_that_the_model_has_taken(trainer: AdapterTrainer) -> None:
    (name,) = with_models(trainer, 1)
    for _ in range(3):
        trainer.step(AdamStep(name, learning_rate=0.0))
    asked = operation(name, 3, loss="ppo", headway="grpo", proximal="interpolate")

    def loss(key: str, *counts: int) -> float:
        data = tuple(
            replace(each, inputs={**each.inputs, key: np.resize(np.array(counts), len(each.token_ids))})
            for each in asked.data
        )
        (result,) = done(trainer.run_round([replace(asked, data=data, forward_only=True)]))
        return result.metrics["loss:sum"]

    assert loss("versions", 1, 2, 3, 7) == loss("lags", 2, 1, 0, 0)
    assert loss("versions", 0) != loss("versions", 3)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("shape", [shape_of(0), shape_of(2), shape_of(3), AdapterShape(rank=4, mlp=False)], ids=str)
def test_peft_loads_what_is_exported(
    trainer: AdapterTrainer, tiny_llama: Path, tmp_path: Path, shape: AdapterShape
) -> None:
    trainer.create("a", shape)
    state = trainer.state("a")
    random = np.random.default_rng(5)
    changed = {key: random.normal(scale=0.1, size=value.shape) for key, value in state.items() if key.endswith("up")}
    trainer.restore("a", shape, {**state, **{key: value.astype(np.float32) for key, value in changed.items()}})
    tensors, config = trainer.peft("a")
    (tmp_path / "adapter_model.safetensors").write_bytes(save_tensors(tensors))
    (tmp_path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    asked = operation("a", 1, forward_only=True)
    (result,) = done(trainer.run_round([asked]))
    for datum, output in zip(asked.data, result.outputs, strict=True):
        logits = loaded(input_ids=torch.from_numpy(datum.token_ids)[None]).logits[0]
        targets = torch.from_numpy(datum.inputs["target_tokens"])
        expected = logits.detach().log_softmax(dim=-1).gather(1, targets[:, None])[:, 0]
        np.testing.assert_allclose(output.arrays["logprobs"], expected, rtol=1e-4, atol=1e-5)


def test_seeds_make_the_same_adapter_and_none_another(trainer: AdapterTrainer) -> None:
    for name, seed in (("a", 7), ("b", 7), ("c", 8), ("d", None), ("e", None)):
        trainer.create(name, AdapterShape(rank=4, seed=seed))
    a, b, c, d, e = (trainer.state(name) for name in "abcde")
    assert_equal(a, b)
    key = "model.layers.0.self_attn.q_proj.down"
    assert len({each[key].tobytes() for each in (a, c, d, e)}) == 4
    assert float(np.abs(a[key]).max()) <= 1 / 8  # 64 inputs
    assert not any(value.any() for name, value in a.items() if name.endswith(".up"))


@pytest.mark.parametrize(
    ("shape", "match"),
    [
        (AdapterShape(rank=-1), "rank is -1: expected 1 to 1024"),
        (AdapterShape(rank=2000), "rank is 2000: expected 1 to 1024"),
        (AdapterShape(rank=4, alpha=float("nan")), "alpha is nan: expected a number above 0"),
        (AdapterShape(rank=4, seed=-1), "seed is -1"),
        (AdapterShape(rank=4, attention=False, mlp=False, unembed=False), "are all false"),
    ],
)
def test_shapes_that_cannot_be_are_refused(trainer: AdapterTrainer, shape: AdapterShape, match: str) -> None:
    with pytest.raises(OperationError, match=match):
        trainer.create("a", shape)
    trainer.create("b", AdapterShape(rank=1))
    with pytest.raises(OperationError, match="the training model b is there already"):
        trainer.create("b", AdapterShape(rank=1))


@pytest.mark.parametrize(
    "name", ["qwen2 with a window", "qwen3", "gemma2", "phi3", "olmo2", "granite", "cohere2", "gpt-oss"]
)
def test_windows_sinks_and_caps_stay_right_beside_other_tenants(name: str, tmp_path: Path) -> None:
    path = write_tiny_model(name, tmp_path)
    trainer = AdapterTrainer.open(path)
    shape = AdapterShape(rank=4, seed=1, mlp=name != "gpt-oss")
    for model_id in "ab":
        trainer.create(model_id, replace(shape, seed=ord(model_id)))
        state = trainer.state(model_id)
        random = np.random.default_rng(ord(model_id))
        for key, value in state.items():
            if key.endswith(".up"):
                state[key] = random.normal(scale=0.1, size=value.shape).astype(np.float32)
        trainer.restore(model_id, shape, state)
    asked = [operation(model_id, ord(model_id)) for model_id in "ab"]
    results = done(trainer.run_round(asked))
    plain = PlainModel.load(path)
    for each, result in zip(asked, results, strict=True):
        factors = plain.factors(trainer.state(each.model_id))
        logprobs = [plain.logprobs(factors, datum, scale=8.0) for datum in each.data]
        for output, expected in zip(result.outputs, logprobs, strict=True):
            np.testing.assert_allclose(output.arrays["logprobs"], expected.detach(), rtol=1e-4, atol=1e-4)
        total = torch.stack([plain_loss("cross_entropy", p, d) for p, d in zip(logprobs, each.data, strict=True)]).sum()
        slopes = torch.autograd.grad(total, list(factors.values()))
        found = gradients_of(trainer.state(each.model_id))
        assert_near(found, {f"{k}.gradient": s.numpy() for k, s in zip(factors, slopes, strict=True)}, to=1e-4)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("mamba2", "takes no packed rows"),
        ("lfm2", "takes no packed rows"),
        ("gpt2", "no linear layers"),
        ("phimoe", "router_jitter_noise"),
    ],
)
def test_models_that_are_not_trained_so_are_refused_by_name(name: str, match: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=match):
        AdapterTrainer.open(write_tiny_model(name, tmp_path))


def test_a_mixture_of_experts_trains_its_attention(tmp_path: Path) -> None:
    trainer = AdapterTrainer.open(write_tiny_model("qwen3 moe", tmp_path), name="moe")
    with pytest.raises(OperationError, match="moe is a mixture of experts, which have no adapters here: expected trai"):
        trainer.create("a", AdapterShape(rank=4))
    trainer.create("a", AdapterShape(rank=4, mlp=False))
    done(trainer.run_round([operation("a", 1)]))
    assert {key.split(".")[-3] for key in gradients_of(trainer.state("a"))} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "lm_head"
    }  # fmt: skip


def test_bfloat16_keeps_its_factors_in_float32(tied_llama: Path) -> None:
    trainer = AdapterTrainer.open(tied_llama, dtype="bfloat16")
    names = with_models(trainer, 2)
    done(trainer.run_round([operation(name, 1, loss="ppo") for name in names]))
    for name in names:
        trainer.step(AdamStep(name))
        assert all(value.dtype == np.float32 for key, value in trainer.state(name).items() if key != "steps")


def test_the_base_is_described_and_bounds_data(trainer: AdapterTrainer) -> None:
    assert (trainer.base.name, trainer.base.context_length, trainer.base.vocabulary_size) == ("tiny", 128, 40)
    tokens = np.zeros(129, dtype=np.int64)
    with pytest.raises(OperationError, match="datum 0: model_input has 129 tokens: expected 1 to 128"):
        trainer.check(ForwardBackward("a", (ClientDatum(tokens, {"target_tokens": tokens}),), "cross_entropy"))


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-45, 1e-320])
def test_a_temperature_next_to_0_draws_the_most_probable_token(trainer: AdapterTrainer, temperature: float) -> None:
    (name,) = with_models(trainer, 1)
    tokens = np.array([3, 4, 5], dtype=np.int64)
    greedy, expected = trainer.draw(name, tokens, count=2, temperature=0.0, seed=1)
    ids, logprobs = trainer.draw(name, tokens, count=2, temperature=temperature, seed=1)
    assert ids.tolist() == greedy.tolist()
    assert logprobs.tolist() == expected.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("weight", [math.nan, 1e30])
def test_nothing_is_drawn_from_logits_that_are_not_finite(
    trainer: AdapterTrainer, temperature: float, weight: float
) -> None:
    (name,) = with_models(trainer, 1)
    state = trainer.state(name)
    broken = {key: np.full_like(value, weight) if key.endswith(".up") else value for key, value in state.items()}
    trainer.restore(name, shape_of(0), broken)
    with pytest.raises(OperationError, match=r"not finite.*load an earlier checkpoint"):
        trainer.draw(name, np.array([3, 4, 5], dtype=np.int64), count=2, temperature=temperature, seed=1)
    trainer.create("other", shape_of(1))
    ids, logprobs = trainer.draw("other", np.array([3], dtype=np.int64), count=2, temperature=1.0)
    assert ids.shape == logprobs.shape == (1, 2)
    assert np.isfinite(logprobs).all()
