"""Histories of a client that was disturbed, against those of one that was not."""

import math
from typing import Any

from tests.chaos.tinker_run import differences

QUIET = {"losses": [150.0, 9.5], "counts": [1.0], "sampled": 2, "paths": ["step-3"], "greedy": [[[7, 8]]]}


def found(**changed: Any) -> str:
    return "; ".join(differences(QUIET, {**QUIET, **changed}))


def test_what_differs_from_the_undisturbed_history_is_named_be_it_a_bit() -> None:
    assert found() == ""
    assert found(losses=[150.0, math.nextafter(9.5, 10)]) == (
        "1 losses differ, the first is 1: 9.500000000000002, undisturbed 9.5"
    )
    assert found(losses=[float("nan"), 9.5]).startswith("1 losses differ, the first is 0: nan")
    assert found(losses=[150.0]) == "1 losses, undisturbed 2"
    assert found(counts=[2.0]) == "counts: [2.0], undisturbed [1.0]"
    assert found(greedy=[[[7, 9]]]) == "greedy: [[[7, 9]]], undisturbed [[[7, 8]]]"
