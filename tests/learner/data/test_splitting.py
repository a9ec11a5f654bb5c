"""The held-out part of data, and the data's length."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.data.examples import TokenizedExample, length_statistics, prompt_of, split
from learner.data.sources import RecordError

Item = tuple[int, int]


def prompt(item: Item) -> bytes:
    return bytes([item[0]])


ITEMS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 1000)), min_size=2, max_size=60, unique=True)


@given(items=ITEMS, share=st.floats(0, 0.5), seed=st.integers(0, 2**32))
def test_a_prompt_is_on_one_side_and_nothing_is_lost_whatever_the_order(
    items: list[Item], share: float, seed: int
) -> None:
    prompts = {item[0] for item in items}
    if len(prompts) < 2:
        return
    parts = split(items, prompt=prompt, share=share, seed=seed)
    assert sorted([*parts.training, *parts.held_out]) == sorted(items)
    out = {item[0] for item in parts.held_out}
    assert not out & {item[0] for item in parts.training}
    assert len(out) == (max(1, round(share * len(prompts))) if share > 0 else 0)
    turned = split(items[::-1], prompt=prompt, share=share, seed=seed)
    assert sorted(turned.held_out) == sorted(parts.held_out)


def test_another_seed_holds_out_something_else() -> None:
    items = [(number, 0) for number in range(100)]
    drawn = {tuple(split(items, prompt=prompt, share=0.2, seed=seed).held_out) for seed in range(5)}
    assert len(drawn) == 5


def test_data_of_one_prompt_cannot_be_split() -> None:
    with pytest.raises(RecordError, match=r"holding out 0\.1 of 1 prompts leaves nothing to train on"):
        split([(1, 1), (1, 2)], prompt=prompt, share=0.1, seed=0)


def tokens(length: int, *, trained: int) -> TokenizedExample:
    ids = np.arange(length, dtype=np.int32)
    return TokenizedExample(token_ids=ids, loss_mask=ids >= length - trained)


def test_lengths_are_counted_in_tokens() -> None:
    found = length_statistics([tokens(2, trained=1), tokens(4, trained=2), tokens(9, trained=3)])
    # Lengths 2, 4, 9: the mean is 5; p90 lies 0.8 of the way from the second to the third, 4 + 0.8 * 5 = 8.
    assert (found.count, found.total, found.trained, found.longest) == (3, 15, 6, 9)
    assert (found.mean, found.median, found.p90) == pytest.approx((5.0, 4.0, 8.0))
    assert "3 sequences, 15 tokens (6 trained)" in str(found)


def test_the_prompt_of_two_completions_is_the_same() -> None:
    first, second = tokens(5, trained=2), tokens(4, trained=1)
    assert prompt_of(first) == prompt_of(second) == np.arange(3, dtype=np.int32).tobytes()
