"""Costs of what pieces of work hold: tallied without a line for each, and fitted to the sums."""

import pytest
from pydantic import ValidationError

from headway.fitted_costs import fitted_costs
from protocol.costs import CostSums
from services.costs import CostTally


def clock(*times: float) -> CostTally:
    """A tally of two counts whose clock shows these times."""
    shown = iter(times)
    return CostTally(2, clock=lambda: next(shown))


def test_a_piece_lasts_until_the_next_one_begins() -> None:
    tally = clock(10.0, 10.5, 12.5)
    tally.turn()
    tally.hold(1, 3)
    tally.turn()  # half a second with 3 of them
    tally.hold(1, 5)
    tally.turn()  # two seconds with 5
    found = tally.sums()
    assert found.products == ((2, 3 + 5), (3 + 5, 9 + 25))
    assert found.seconds == pytest.approx((2.5, 3 * 0.5 + 5 * 2.0))


def test_a_piece_that_is_dropped_counts_for_nothing() -> None:
    tally = clock(0.0, 9.0, 9.5)
    tally.turn()
    tally.hold(1, 3)
    tally.drop()
    tally.turn()
    tally.hold(1, 2)
    tally.turn()
    assert tally.sums() == CostSums(products=((1, 2), (2, 4)), seconds=(0.5, 1.0))


def test_sums_that_were_taken_begin_anew() -> None:
    tally = clock()
    tally.add(2.0, 1, 4)
    assert tally.taken().seconds == (2.0, 8.0)
    tally.add(1.0, 1, 1)
    assert tally.taken() == CostSums(products=((1, 1), (1, 1)), seconds=(1.0, 1.0))


def test_sums_of_two_engines_add_up_and_earlier_ones_are_taken_off() -> None:
    one, other = (
        CostSums(products=((1, 2), (2, 4)), seconds=(3, 6)),
        CostSums(products=((1, 5), (5, 25)), seconds=(1, 5)),
    )
    assert one + other == CostSums(products=((2, 7), (7, 29)), seconds=(4, 11))
    assert one + other - other == one


def test_sums_must_be_square() -> None:
    with pytest.raises(ValidationError, match="expected products of 2 counts"):
        CostSums(products=((1.0,),), seconds=(1.0, 2.0))


def tallied(*pieces: tuple[float, ...]) -> CostSums:
    """Of pieces by their counts, the last number being their seconds."""
    tally = CostTally(len(pieces[0]) - 1)
    for *counts, seconds in pieces:
        tally.add(seconds, *counts)
    return tally.sums()


def test_costs_come_out_as_they_went_in() -> None:
    """A step of 6 ms, 0.1 ms for each sequence, and 0.3 ms for each that begins."""
    steps = [(1, 4, 4), (1, 12, 0), (1, 40, 8), (1, 7, 1), (1, 100, 50)]
    pieces = [(*step, 0.006 + 0.0001 * step[1] + 0.0003 * step[2]) for step in steps]
    assert fitted_costs(tallied(*pieces)) == pytest.approx((0.006, 0.0001, 0.0003))


def test_no_cost_is_below_zero() -> None:
    """The line through both begins at -1: the best one without that begins at 0, at (1 * 2 + 5 * 4) / (4 + 16)."""
    assert fitted_costs(tallied((1, 2, 1.0), (1, 4, 5.0))) == pytest.approx((0.0, 22 / 20))


def test_counts_that_cannot_be_told_apart_share_no_cost() -> None:
    """Each step has two sequences: what is the step's, and what is theirs?"""
    first, second = fitted_costs(tallied((1, 2, 1.0), (1, 2, 3.0)))
    assert first + 2 * second == pytest.approx(2.0)
    assert fitted_costs(tallied((1, 0, 2.0), (1, 0, 4.0))) == (3.0, 0.0)
