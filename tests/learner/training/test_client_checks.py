"""Wrong operations: an error names the datum, the field, and what was expected."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from learner.algorithms.client_graphs import LossGraph
from learner.training.client_checks import BaseDescription, check_operation, check_step
from learner.training.client_operations import AdamStep, ClientDatum, ForwardBackward, OperationError
from tests.learner.training.client_work import operation

BASE = BaseDescription(name="tiny", context_length=32, vocabulary_size=40)
GRAPHS = Path(__file__).parents[1] / "algorithms" / "client_graphs"


def changed(of: ForwardBackward, number: int, **inputs: np.ndarray | None) -> ForwardBackward:
    """The operation with some inputs of a datum replaced, or left out."""
    data = list(of.data)
    known = {**data[number].inputs, **inputs}
    data[number] = replace(data[number], inputs={name: value for name, value in known.items() if value is not None})
    return replace(of, data=tuple(data))


def of_tokens(*tokens: int) -> ForwardBackward:
    ids = np.array(tokens, dtype=np.int64)
    return ForwardBackward("a", (ClientDatum(ids, {"target_tokens": ids}),), "cross_entropy")


def refused(of: ForwardBackward, match: str) -> None:
    with pytest.raises(OperationError, match=match):
        check_operation(of, BASE)


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling", "ppo", "gspo", "dro", "stable_reinforce"])
def test_what_is_right_passes(loss: str) -> None:
    check_operation(operation("a", 1, loss=loss), BASE)


def test_wrong_data_are_refused_with_number_and_field() -> None:
    good = operation("a", 1, loss="ppo")
    refused(replace(good, data=()), "data is empty")
    refused(changed(good, 2, advantages=None), "datum 2: advantages is missing: ppo wants logprobs, advantages")
    refused(changed(good, 0, advantages=floats(1, 2)), r"datum 0: advantages has the shape \[2\]: expected \[3\]")
    refused(changed(good, 0, advantages=floats(1, np.nan, 2)), r"datum 0: advantages\[1\] is nan: expected a finite")
    refused(changed(good, 0, advantages=floats(1, 2, -np.inf)), r"datum 0: advantages\[2\] is -inf")
    refused(changed(good, 0, logprobs=floats(1, np.inf, 2)), r"datum 0: logprobs\[1\] is inf")
    refused(changed(good, 0, advantages=np.array(["a"] * 3)), "datum 0: advantages is of type <U1: expected float32")
    refused(changed(good, 1, target_tokens=None), "datum 1: target_tokens is missing")
    refused(
        changed(good, 0, advantage=floats(1, 2, 3)), "datum 0: the input advantage is not known: expected some of ad"
    )
    check_operation(changed(good, 0, logprobs=floats(-1, -np.inf, 0)), BASE)


def test_wrong_tokens_are_refused() -> None:
    refused(of_tokens(), "datum 0: model_input has 0 tokens: expected 1 to 32, the context of tiny")
    refused(of_tokens(*range(33)), "model_input has 33 tokens")
    refused(of_tokens(1, 40), "model_input has the token 40: expected 0 to 39. Is the tokenizer that of tiny")
    refused(of_tokens(1, -1), "model_input has the token -1")
    good = operation("a", 1)
    refused(changed(good, 0, target_tokens=np.array([1, 2, 99])), "target_tokens has the token 99")
    refused(changed(good, 0, target_tokens=np.array([1, 2])), r"target_tokens has the shape \[2\]: expected \[3\] or")
    refused(changed(good, 0, target_tokens=floats(1, 2, 3)), "target_tokens is of type float32: expected int64")
    refused(changed(good, 0, target_tokens=np.ones((3, 0), np.int64)), "target_tokens has 0 targets a position")
    refused(changed(good, 0, target_tokens=np.ones((3, 300), np.int64)), "300 targets a position: expected 1 to 256")


def test_several_targets_are_for_losses_that_take_them() -> None:
    check_operation(operation("a", 1, width=3), BASE)
    refused(
        operation("a", 1, width=3, loss="ppo"), r"target_tokens has the shape \[3, 3\], and ppo takes one of a posi"
    )


def test_losses_and_settings_that_are_not_known_are_refused() -> None:
    refused(operation("a", 1, loss="sac"), "no loss is named 'sac'")
    refused(operation("a", 1, loss="ppo", beta=1.0), "ppo has no setting 'beta'")
    refused(operation("a", 1, loss="ppo", headway="custom"), "custom loads code by its path, which a client cannot")
    refused(operation("a", 1, loss="custom"), "the loss custom came without a graph")


def test_a_loss_that_rests_on_lags_wants_them_or_versions() -> None:
    of = operation("a", 1, loss="ppo", headway="grpo", proximal="interpolate")
    refused(of, "datum 0: lags is missing: headway:grpo wants logprobs, advantages, lags. Send spans of sequences")
    one = replace(of, data=of.data[:1])
    counts = np.array([0, 1, 2])
    for name in ("lags", "versions"):
        check_operation(changed(one, 0, **{name: counts}), BASE)
        refused(changed(one, 0, **{name: counts[:2]}), rf"datum 0: {name} has the shape \[2\]: expected \[3\]")
        refused(changed(one, 0, **{name: counts - 1}), rf"datum 0: {name}\[0\] is below 0: expected a number of opti")


def test_a_graph_takes_no_setting_of_ours() -> None:
    told = json.loads((GRAPHS / "preference.json").read_text(encoding="utf-8"))
    graph = LossGraph.parse(name="preference", inputs=told["inputs"], graph=told["graph"])
    of = replace(operation("a", 1, loss="custom", loss_id="l", headway="grpo"), graph=graph)
    refused(of, "the loss custom has no setting 'headway': expected loss_id alone")


def test_inputs_of_a_graph_have_its_ranks() -> None:
    told = json.loads((GRAPHS / "preference.json").read_text(encoding="utf-8"))
    graph = LossGraph.parse(name="preference", inputs=told["inputs"], graph=told["graph"])
    good = replace(operation("a", 1, lengths=(3,)), loss="custom", graph=graph)
    good = changed(good, 0, reference=floats(1, 2, 3), beta=np.array(0.1, dtype=np.float32))
    check_operation(good, BASE)
    refused(changed(good, 0, beta=None), "datum 0: beta is missing: the loss preference takes it")
    refused(changed(good, 0, beta=floats(1)), "datum 0: beta has 1 dimensions, and preference takes it with 0")
    refused(changed(good, 0, reference=floats(1, np.nan, 2)), r"reference\[1\] is nan")
    refused(changed(good, 0, target_tokens=np.ones((3, 2), np.int64)), "target_tokens has 2 dimensions")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", float("nan")),
        ("learning_rate", -1e-4),
        ("learning_rate", float("inf")),
        ("beta1", 1.0),
        ("beta2", 1.5),
        ("eps", -1.0),
        ("weight_decay", -0.1),
        ("grad_clip_norm", float("nan")),
    ],
)
def test_steps_out_of_bounds_are_refused(name: str, value: float) -> None:
    check_step(AdamStep("a"))
    with pytest.raises(OperationError, match=f"{name} is {value}: expected at least 0 and less than"):
        check_step(AdamStep("a", **{name: value}))
