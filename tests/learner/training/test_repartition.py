"""A run goes on with another number of ranks: the same numbers bit by bit, and the same steps after them."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from learner.journal.manifest import manifest_fault
from learner.training.ranks import CommandChannel
from learner.training.saved_parts import OtherWeights, SavedPart, SavedParts, WeightPiece, saved_weights, sharded_pieces
from tests.learner.training.engine_parts import LORA, config_with, open_parts
from tests.learner.training.ranks_of_a_resume import SEEN, write_uneven_llama

SCRIPT = Path(__file__).parent / "ranks_of_a_resume.py"
ROOT = Path(__file__).parents[3]
EMA = {"mode": "ema", "decay": 0.5}
REFRESH = {"mode": "refresh", "every_steps": 2}
MUON = {"type": "muon", "learning_rate": 1e-2, "max_grad_norm": 0.5}
COUNTS = (1, 2, 4, 2, 1)
CASES: tuple[dict[str, object], ...] = (
    {"zero_stage": 0, "optimizer": MUON},
    {"zero_stage": 1, "dtype": "bfloat16"},
    {"zero_stage": 2, "lora": LORA, "offload": "optimizer", "reference": EMA},
    {"zero_stage": 3, "offload": "optimizer", "reference": EMA},
    {"zero_stage": 3, "dtype": "bfloat16", "lora": LORA, "offload": "all"},
    {"zero_stage": (0, 3, 2, 1, 0), "reference": REFRESH},
    {"zero_stage": (2, 0, 3, 3, 1), "dtype": ("bfloat16", "bfloat16", "bfloat16", "float32", "bfloat16")},
)
"""Training's settings in each life; a tuple has one for each of them."""


def vector(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers)


def part_of_seven(rank: int) -> SavedPart:
    """Of weights a, 7 numbers, and b, 1 number, that 2 ranks cut each by itself: 4 and 3, 1 and none; -1 is padding."""
    pieces = sharded_pieces([{"a": torch.Size([7]), "b": torch.Size([1])}], rank=rank, of=2)
    masters = (vector(0, 1, 2, 3, 70), vector(4, 5, 6, -1, -1))[rank]
    return SavedPart(pieces, [{"masters": masters, "exp_avg": masters * 10}], [{"step": 3}])


def test_each_rank_copies_what_lies_in_its_own_pieces_and_no_padding() -> None:
    saved = SavedParts([part_of_seven(0), part_of_seven(1)])
    # Of 3 ranks each has 3 numbers of a, and the first has b: 0 1 2 70, 3 4 5 ., 6 . . .
    expected = (vector(0, 1, 2, 70), vector(3, 4, 5, 0), vector(6, 0, 0, 0))
    for rank, numbers in enumerate(expected):
        pieces = sharded_pieces([{"a": torch.Size([7]), "b": torch.Size([1])}], rank=rank, of=3)
        found = saved.vectors_of(pieces, size=4, beside="a")
        assert torch.equal(found["masters"], numbers)
        assert torch.equal(found["exp_avg"], numbers * 10)
    assert saved.others_of("b") == {"step": 3}
    assert torch.equal(saved.master_of("a", size=7), vector(0, 1, 2, 3, 4, 5, 6))


def test_weights_that_lie_end_to_end_are_cut_anew_each_by_itself() -> None:
    # Of 3 ranks with 3 numbers each: a is 0 1 2 | 3 4, and b is . . 5 | 6 . .
    first = SavedPart([WeightPiece("a", 0, 0, 0, 3)], [{"masters": vector(0, 1, 2)}], [{}])
    second = SavedPart(
        [WeightPiece("a", 0, 0, 3, 2), WeightPiece("b", 0, 2, 0, 1)], [{"masters": vector(3, 4, 5)}], [{}]
    )
    third = SavedPart([WeightPiece("b", 0, 0, 1, 1)], [{"masters": vector(6, -1, -1)}], [{}])
    saved = SavedParts([first, second, third])
    pieces = sharded_pieces([{"a": torch.Size([5]), "b": torch.Size([2])}], rank=0, of=2)
    assert torch.equal(saved.vectors_of(pieces, size=4, beside="a")["masters"], vector(0, 1, 2, 5))


def test_numbers_that_no_rank_has_and_weights_that_are_not_there_are_named() -> None:
    saved = SavedParts([part_of_seven(0)])
    with pytest.raises(ValueError, match="the checkpoint has 4 of 7 numbers of a"):
        saved.master_of("a", size=7)
    with pytest.raises(ValueError, match="has no weight c: restore"):
        saved.master_of("c", size=1)


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"rank": 8, "alpha": 8.0}, "lora_A.default.weight, 4 x 10 there and 8 x 10 now"),
        ({**LORA, "targets": ["v_proj"]}, "of 14 trained weights, and 2 are trained now; what differs is their number"),
    ],
    ids=["another rank", "fewer layers"],
)
def test_other_adapters_are_refused_by_name(
    commands: CommandChannel, tmp_path: Path, lora: dict[str, object], said: str
) -> None:
    model = write_uneven_llama(tmp_path / "model")
    first = open_parts(model, config_with(lora=LORA))
    first.engine.save(tmp_path / "saved")
    first.engine.close()
    second = open_parts(model, config_with(lora=lora, zero_stage=1))
    with pytest.raises(OtherWeights, match=said):
        second.engine.load(tmp_path / "saved")
    second.engine.close()


@pytest.mark.timeout(900)
def test_runs_go_through_1_2_4_2_and_1_ranks_bit_by_bit(tmp_path: Path) -> None:
    # 13 ranks in all, forked from one process: no smaller number of them gathers parts and cuts them.
    write_uneven_llama(tmp_path / "model")
    texts = [json.dumps([text_of(case, life) for case in CASES]) for life in range(len(COUNTS))]
    argv = [sys.executable, str(SCRIPT), str(tmp_path), ",".join(map(str, COUNTS)), *texts]
    subprocess.run(argv, check=True, timeout=800, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert_trainers_alike([tmp_path / str(life) / "trainer" for life in range(len(COUNTS))])
    for run, case in enumerate(CASES):
        first = load_file(tmp_path / "0" / str(run) / SEEN)
        assert sum(name.startswith(("exp_avg_sq.", "momentum_buffer.")) for name in first) > 3
        assert first["updates"].tolist() == [2.0]
        for life in range(1, len(COUNTS)):
            assert manifest_fault(tmp_path / str(life - 1) / str(run)) is None, "what is taken up is only read"
            seen = load_file(tmp_path / str(life) / str(run) / SEEN)
            assert set(seen) == set(first)
            for name, value in first.items():
                assert_same(name, seen[name], value, said=partial("{}, life {}: {}".format, case, life), case=case)


def assert_trainers_alike(folders: Sequence[Path]) -> None:
    """A policy with dropout, and its critic. Ranks that were there before go on with their random numbers."""
    for folder, former, count, before in zip(folders[1:], folders, COUNTS[1:], COUNTS, strict=False):
        for part in (Path(), Path("critic")):
            expected = saved_weights(former / part)
            assert all(torch.equal(value, expected[name]) for name, value in saved_weights(folder / part).items())
        assert (folder / "trainer.json").read_text() == (former / "trainer.json").read_text()
        states = [load_file(folder / f"random_state_{rank}.safetensors")["torch"] for rank in range(count)]
        assert len({state.numpy().tobytes() for state in states}) == count, "two ranks draw alike"
        for rank in range(min(count, before)):
            assert torch.equal(states[rank], load_file(former / f"random_state_{rank}.safetensors")["torch"])


def text_of(case: dict[str, object], life: int) -> str:
    changes = {key: value[life] if isinstance(value, tuple) else value for key, value in case.items()}
    return config_with(**changes).model_dump_json(exclude_none=True)


def assert_same(
    name: str, seen: torch.Tensor, first: torch.Tensor, *, said: partial[str], case: dict[str, object]
) -> None:
    if name.startswith("trained."):  # bfloat16, in which Muon computes too, rounds sums over other ranks to 8 bits
        atol = 1e-3 if "dtype" in case or case.get("optimizer") == MUON else 1e-6
        torch.testing.assert_close(seen, first, rtol=0, atol=atol, msg=said)
    else:
        assert torch.equal(seen, first), said(f"{name} is another")
