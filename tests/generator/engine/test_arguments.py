"""The arguments that vLLM is started with, and those that a user may give beside them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from generator.engine.options import EngineOptions, extra_fault
from tests.generator.engine.test_packing import as_a_generator

with as_a_generator():
    from generator.engine import arguments

Given = Callable[[EngineOptions], dict[str, Any]]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Given:
    """The arguments by their names, in place of vLLM's record of them."""
    monkeypatch.setattr(arguments, "AsyncEngineArgs", dict)
    made: Given = arguments.engine_args
    return made


def folder_of(folder: Path, **config: object) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_whatever_is_set_here_is_refused_as_a_further_argument(given: Given) -> None:
    """But for hf_overrides, which are added to ours."""
    names = set(given(EngineOptions(model="none", adapter_slots=2)))
    assert {"model", "enable_chunked_prefill", "enable_lora", "seed"} <= names
    assert {name for name in names if extra_fault({name: None}) is None} == {"hf_overrides"}


def test_a_users_changes_of_the_config_leave_the_window_right(given: Given, tmp_path: Path) -> None:
    model = folder_of(tmp_path, model_type="cohere2", sliding_window=8)
    assert given(EngineOptions(model=model))["hf_overrides"] == {"sliding_window": 7}
    extra = {"hf_overrides": {"rope_theta": 5.0}, "block_size": 16}
    both = given(EngineOptions(model=model, extra=extra))
    assert both["hf_overrides"] == {"sliding_window": 7, "rope_theta": 5.0}
    assert both["block_size"] == 16
    own = given(EngineOptions(model=model, extra={"hf_overrides": {"sliding_window": 3}}))
    assert own["hf_overrides"] == {"sliding_window": 3}
    assert given(EngineOptions(model="none"))["hf_overrides"] == {}


def test_nobody_can_ask_for_more_of_the_likeliest_tokens_than_there_are(given: Given, tmp_path: Path) -> None:
    """Asked for more, an engine ends, with all that it samples for others."""
    sizes = {15: 15, 128: 128, 151936: 128}
    for size, most in sizes.items():
        model = folder_of(tmp_path, model_type="llama", vocab_size=size)
        assert given(EngineOptions(model=model))["max_logprobs"] == most
    assert given(EngineOptions(model="none"))["max_logprobs"] == 128


def test_unrounded_logits_are_a_change_of_the_config(given: Given, tmp_path: Path) -> None:
    model = folder_of(tmp_path, model_type="llama")
    extra = {"hf_overrides": {"rope_theta": 5.0}}
    found = given(EngineOptions(model=model, head_dtype="float32", extra=extra))
    assert found["hf_overrides"] == {"rope_theta": 5.0, "head_dtype": "float32"}


@pytest.mark.parametrize(
    ("slots", "rank", "policy_rank", "expected"),
    [
        (0, 32, 0, {}),
        (3, 20, 0, {"max_loras": 4, "max_lora_rank": 32}),
        (0, 32, 8, {"max_loras": 2, "max_lora_rank": 8}),
    ],
)
def test_there_is_one_slot_more_than_is_used(
    given: Given, slots: int, rank: int, policy_rank: int, expected: dict[str, int]
) -> None:
    found = given(EngineOptions(model="none", adapter_slots=slots, max_adapter_rank=rank, policy_rank=policy_rank))
    assert {name: found[name] for name in ("max_loras", "max_lora_rank") if name in found} == expected
    assert ("enable_lora" in found) == bool(expected)
