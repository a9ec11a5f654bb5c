"""Reference logprobs are computed once for a model, data and temperature, and never taken from another's file."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import NDArray

from learner.data.examples import TokenizedExample
from learner.data.reference_cache import (
    CacheKey,
    cache_file,
    cached_reference_logprobs,
    fingerprint_model,
    fingerprint_sequences,
)

KEY = CacheKey(model="m", data="d", temperature=1.0, precision="float32")


def sequence(*mask: int) -> TokenizedExample:
    return TokenizedExample(token_ids=np.arange(len(mask), dtype=np.int32), loss_mask=np.array(mask, dtype=np.bool_))


SEQUENCES = (sequence(0, 1, 1), sequence(0, 0, 1), sequence(0, 1, 0, 1))


class CountingReference:
    """Says -(10 i + t) for token t of sequence i, also where nothing is trained, and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, sequences: Sequence[TokenizedExample]) -> list[NDArray[np.float32]]:
        self.asked += 1
        return [-np.arange(10 * i, 10 * i + len(s.token_ids), dtype=np.float32) for i, s in enumerate(sequences)]


EXPECTED = [[0, -1, -2], [0, 0, -12], [0, -21, 0, -23]]


def ask(folder: Path, reference: CountingReference, *, key: CacheKey = KEY) -> list[list[float]]:
    found = cached_reference_logprobs(SEQUENCES, folder=folder, key=key, compute=reference)
    assert all(values.dtype == np.float32 for values in found)
    return [values.tolist() for values in found]


def test_logprobs_are_computed_once_and_are_zero_where_nothing_is_trained(tmp_path: Path) -> None:
    reference = CountingReference()
    assert ask(tmp_path / "cache", reference) == EXPECTED
    assert ask(tmp_path / "cache", reference) == EXPECTED
    assert reference.asked == 1


@pytest.mark.parametrize(
    "other",
    [
        replace(KEY, model="other"),
        replace(KEY, data="other"),
        replace(KEY, temperature=0.7),
        replace(KEY, precision="bfloat16"),
    ],
)
def test_another_model_data_set_temperature_or_precision_has_a_cache_of_its_own(
    tmp_path: Path, other: CacheKey
) -> None:
    reference = CountingReference()
    ask(tmp_path, reference)
    ask(tmp_path, reference, key=other)
    assert reference.asked == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_a_damaged_cache_is_named_and_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reference = CountingReference()
    ask(tmp_path, reference)
    file = cache_file(tmp_path, KEY)
    whole = file.read_bytes()
    flipped = whole[:-1] + bytes([whole[-1] ^ 1])
    for count, damaged in enumerate((whole[:-3], b"", flipped, b"x" * 100), start=2):
        file.write_bytes(damaged)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert ask(tmp_path, reference) == EXPECTED
        assert f"{file} is not used and is rebuilt: damaged" in caplog.text
        assert reference.asked == count
    ask(tmp_path, reference)
    assert reference.asked == 5, "what was made anew is good"


def test_a_foreign_cache_is_named_and_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reference, other = CountingReference(), replace(KEY, model="other")
    ask(tmp_path, reference, key=other)
    file = cache_file(tmp_path, KEY)
    cache_file(tmp_path, other).rename(file)
    assert ask(tmp_path, reference) == EXPECTED
    assert 'foreign: it belongs to {"data": "d", "model": "other"' in caplog.text
    safetensors.numpy.save_file({"weight": np.zeros(2)}, file)
    assert ask(tmp_path, reference) == EXPECTED
    assert "foreign: it is no cache of reference logprobs" in caplog.text
    assert reference.asked == 3


def test_a_cache_that_cannot_be_kept_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert ask(tmp_path / "cache", CountingReference()) == EXPECTED
    assert "cannot be kept in" in caplog.text


def test_fingerprints_tell_tokens_masks_and_order_apart() -> None:
    variants = [SEQUENCES, SEQUENCES[::-1], SEQUENCES[:2], (sequence(0, 1, 0), *SEQUENCES[1:])]
    ids = TokenizedExample(token_ids=np.array([5, 6, 7], dtype=np.int32), loss_mask=SEQUENCES[0].loss_mask)
    variants.append((ids, *SEQUENCES[1:]))
    assert len({fingerprint_sequences(variant) for variant in variants}) == len(variants)
    assert fingerprint_sequences(SEQUENCES) == fingerprint_sequences(list(SEQUENCES))


def test_a_model_is_told_apart_by_its_configuration_and_each_byte_of_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "optimizer.bin").write_bytes(b"left out")
    first = fingerprint_model(tmp_path)
    (tmp_path / "optimizer.bin").write_bytes(b"changed")
    assert fingerprint_model(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"weighty")
    second = fingerprint_model(tmp_path)
    (tmp_path / "config.json").write_text("{ }")
    assert len({first, second, fingerprint_model(tmp_path)}) == 3


def test_a_model_of_pickled_files_is_told_apart_by_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"weights")
    first = fingerprint_model(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"weighty")
    assert fingerprint_model(tmp_path) != first
