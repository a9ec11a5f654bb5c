"""Ranks that share rows compute what one rank does that has them whole."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from learner.config import LearnerConfig
from learner.training.layouts import plain_attention
from learner.training.policy import load_causal_lm
from learner.training.ranks import CommandChannel, Ranks
from learner.training.row_parts import check_shareable
from learner.training.sequence_groups import ALONE, GatheredTargets, SequenceGroup
from tests.learner.training.ranks_of_rows import CASES, EVERY_ALGORITHM, OF_FOUR, OF_TWO, opened, seen_of
from tests.learner.training.tiny_model import write_tiny_llama
from tests.learner.training.tiny_models import write_tiny_model

SCRIPT = Path(__file__).parent / "ranks_of_rows.py"
ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("count", "numbers"),
    [
        pytest.param(2, OF_TWO, id="two"),
        pytest.param(4, OF_FOUR, id="four"),
        pytest.param(2, EVERY_ALGORITHM, id="every algorithm", marks=pytest.mark.whole),
    ],
)
def test_ranks_that_share_rows_train_like_one(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path, count: int, numbers: Sequence[int]
) -> None:
    teacher = write_tiny_llama(tmp_path / "teacher", tied=False)
    for name in {CASES[number].model for number in numbers} - {""}:
        write_tiny_model(name, tmp_path / name)
    argv = [sys.executable, str(SCRIPT), str(tied_llama), str(tmp_path), str(count), str(teacher), *map(str, numbers)]
    subprocess.run(argv, check=True, timeout=900, env={**os.environ, "PYTHONPATH": str(ROOT)})
    for number in numbers:
        case = CASES[number]
        model = tmp_path / case.model if case.model else tied_llama
        trainer = opened(model, case, ranks=Ranks(), commands=commands, shared=1, teacher=teacher)
        expected, weights = seen_of(trainer, case)
        trainer.close()
        found = json.loads((tmp_path / f"{number}.json").read_text())
        for step, other in zip(found, expected, strict=True):
            assert step == pytest.approx(other, rel=1e-5, abs=1e-5), case
        for name, value in load_file(tmp_path / f"{number}.safetensors").items():
            torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-5, msg=f"{case}: {name}")


def test_each_token_is_dealt_to_one_rank_and_the_last_fills_the_row_up() -> None:
    dealt = [SequenceGroup(size=4, place=place).own_tokens(6, device=torch.device("cpu")) for place in range(4)]
    assert [each.tolist() for each in dealt] == [[0, 4], [1, 5], [2, 5], [3, 5]]


def test_targets_come_back_in_their_own_order_from_whichever_rank_has_them() -> None:
    rows = torch.tensor([5, 0, 4, 2, 2])
    targets = [GatheredTargets(rows, SequenceGroup(size=2, place=place)) for place in range(2)]
    assert [each.own.tolist() for each in targets] == [[1, 2, 3, 4], [0]]
    padded = torch.full((2, targets[0].most), -1)
    for place, each in enumerate(targets):
        padded[place, : len(each.own)] = each.own
    assert padded.flatten()[targets[0].order].tolist() == [0, 1, 2, 3, 4]


def test_models_whose_rows_cannot_be_shared_are_refused_by_name(tied_llama: Path, tmp_path: Path) -> None:
    model = load_causal_lm(tied_llama, dtype=torch.float32)
    check_shareable(model, tied_llama, SequenceGroup(size=4))
    with pytest.raises(
        ValueError, match=r"sequence_parallel is 3, and LlamaForCausalLM has 4 attention heads.*divisor"
    ):
        check_shareable(model, tied_llama, SequenceGroup(size=3))
    folder = write_tiny_model("qwen3-next", tmp_path)
    recurrent = load_causal_lm(folder, dtype=torch.float32)
    check_shareable(recurrent, folder, ALONE)
    with pytest.raises(ValueError, match="sequence_parallel is 2, and Qwen3NextForCausalLM takes no packed rows"):
        check_shareable(recurrent, folder, SequenceGroup(size=2))
    with plain_attention(model), pytest.raises(ValueError, match="takes no packed rows"):
        check_shareable(model, tied_llama, SequenceGroup(size=2))


def test_ranks_that_would_be_left_over_are_named(commands: CommandChannel) -> None:
    with pytest.raises(ValueError, match=r"sequence_parallel is 2, and the learner has 1 ranks.*a multiple of 2"):
        SequenceGroup.opened(2, timeout_s=10)
    settings = {"model": "nowhere", "training": {"sequence_parallel": 2}}
    assert LearnerConfig.model_validate({**settings, "ranks": 4}).ranks == 4
    with pytest.raises(ValidationError, match="sequence_parallel is 2 and ranks is 3"):
        LearnerConfig.model_validate({**settings, "ranks": 3})
