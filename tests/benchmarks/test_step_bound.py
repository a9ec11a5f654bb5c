"""The arithmetic of a step."""

import json
from pathlib import Path

from benchmarks.step_bound import weights, work


def test_a_step_costs_two_operations_a_weight_and_token_in_sampling_and_three_times_that_in_training() -> None:
    step = work(layers=100, head=10, prompt=5, completion=2)
    assert step.sampling == 2 * (4 * 5 * 100 + 32 * 2 * 110)
    assert step.training == 3 * step.sampling


def test_the_weights_are_those_of_the_matrices(tmp_path: Path) -> None:
    shape = {
        "model_type": "llama", "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 2, "vocab_size": 11,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    assert weights(tmp_path) == (2 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 6), 88)
