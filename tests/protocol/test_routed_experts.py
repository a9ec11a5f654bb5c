"""Routed experts on the wire, in JSON and on disk: as they were, narrow, and refused by name where they do not fit."""

import zlib
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from protocol.codec import MalformedMessage, decode, encode
from protocol.generation import GeneratePart, GenerateRequest, Sampling
from protocol.messages import FinishedLease
from protocol.routed_experts import RoutedExperts
from protocol.trajectories import TrajectoryGroup, group_of
from tests.learner.samples import group, trajectory


def rows_of(tokens: int, *, experts: int = 128, layers: int = 3, chosen: int = 8, seed: int = 0) -> Any:
    """Distinct experts of each token and layer, by rising number."""
    draws = np.random.default_rng(seed)
    found = np.argsort(draws.random((tokens, layers, experts)), axis=2)[:, :, :chosen]
    return np.sort(found, axis=2).astype(np.uint8 if experts <= 256 else np.uint16)


def told_of(*pieces: tuple[int, int], **of: int) -> RoutedExperts:
    """Of spans of tokens, each with its start and its length."""
    return RoutedExperts.of([(start, rows_of(length, seed=start, **of)) for start, length in pieces])


def test_rows_by_hand() -> None:
    """Two tokens from place 3 on, one at 9; a layer of two experts. Pieces that meet are one span."""
    pieces = [(3, [[[7, 2]]]), (4, [[[0, 255]]]), (9, [[[4, 5]]])]
    told = RoutedExperts.of([(start, np.array(rows, dtype=np.uint8)) for start, rows in pieces])
    assert (told.spans, told.layers, told.chosen, told.wide) == (((3, 5), (9, 10)), 1, 2, False)
    assert zlib.decompress(told.packed.tobytes()) == bytes([2, 0, 4, 7, 255, 5])
    assert told.rows().tolist() == [[[2, 7]], [[0, 255]], [[4, 5]]]
    assert [(start, rows.tolist()) for start, rows in told.pieces()] == [
        (3, [[[2, 7]], [[0, 255]]]), (9, [[[4, 5]]]),
    ]  # fmt: skip
    assert (told.tokens, told.end) == (3, 10)


@pytest.mark.parametrize("experts", [128, 256, 257, 1024])
def test_a_number_is_a_byte_up_to_256_experts_and_two_beyond(experts: int) -> None:
    told = told_of((0, 50), experts=experts)
    assert told.wide is (experts > 256)
    assert (told.rows() == rows_of(50, experts=experts)).all()


def with_experts(told: RoutedExperts) -> TrajectoryGroup:
    return group(3, trajectory(1, 1, 1).model_copy(update={"routed_experts": told}), trajectory(1, 1))


@pytest.mark.parametrize("experts", [128, 300])
def test_a_group_on_the_wire_keeps_them(experts: int) -> None:
    sent = FinishedLease(group=with_experts(told_of((0, 4), experts=experts)))
    first, second = decode(encode(sent)).group.trajectories  # type: ignore[attr-defined]
    assert (first.routed_experts.rows() == rows_of(4, experts=experts)).all()
    assert first.routed_experts.spans == ((0, 4),)
    assert second.routed_experts is None


def test_a_group_without_them_is_sent_as_ever() -> None:
    header, *_ = encode(FinishedLease(group=group(3)))
    assert b"routed" not in bytes(header)


def test_experts_of_more_tokens_than_there_are_are_refused_by_name() -> None:
    complaint = "routed_experts are told of 6 tokens, and there are 5"
    whole = with_experts(told_of((0, 4)))
    longer = whole.trajectories[0].model_copy(update={"routed_experts": told_of((0, 6))})
    spoiled = whole.model_copy(update={"trajectories": (longer,)})
    with pytest.raises(MalformedMessage, match=complaint):
        decode(encode(FinishedLease(group=spoiled)))
    with pytest.raises(ValidationError, match=complaint):
        group_of(spoiled.trajectories, **{name: value for name, value in spoiled if name != "trajectories"})


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"spans": ((0, 3),)},
            r"unpack to more than 72 bytes; expected 72, of 3 tokens in 3 layers with 8 experts each",
        ),
        ({"spans": ((0, 5),)}, r"unpack to 96 bytes; expected 120"),
        ({"wide": True}, r"unpack to 96 bytes; expected 192"),
        ({"packed": np.frombuffer(b"nonsense", dtype=np.uint8)}, "do not unpack"),
    ],
)
def test_bytes_of_another_length_are_refused_by_name(changes: dict[str, Any], complaint: str) -> None:
    told = told_of((0, 4))
    spoiled = RoutedExperts.model_validate({**dict(told), **changes})
    with pytest.raises(ValueError, match=complaint):
        spoiled.rows()


@pytest.mark.parametrize("spans", [((3, 3),), ((0, 4), (3, 5)), ((-1, 2),), ((4, 2),)])
def test_spans_out_of_order_are_refused(spans: Any) -> None:
    with pytest.raises(ValidationError, match="routed experts of tokens"):
        RoutedExperts.model_validate({**dict(told_of((0, 4))), "spans": spans})


def test_a_token_with_too_many_bytes_is_refused() -> None:
    with pytest.raises(ValidationError, match="at most 16384 bytes a token"):
        RoutedExperts(spans=((0, 1),), layers=1024, chosen=64, packed=np.zeros(1, dtype=np.uint8))


def test_a_part_in_json_keeps_them() -> None:
    part = GeneratePart(index=0, token_ids=(4,), behavior_logprobs=(-0.5,), routed_experts=told_of((0, 7)))
    read = GeneratePart.model_validate_json(part.model_dump_json())
    assert read.routed_experts is not None
    assert (read.routed_experts.rows() == rows_of(7)).all()
    with pytest.raises(ValidationError, match="expected bytes in base64"):
        GeneratePart.model_validate_json(part.model_dump_json().replace('"packed":"', '"packed":"?'))


def test_who_does_not_ask_says_nothing_of_it() -> None:
    request = GenerateRequest(request_id="r", prompt_token_ids=(1,), sampling=Sampling(max_tokens=1))
    assert "routed" not in request.model_dump_json()
    assert "routed" not in GeneratePart(index=0).model_dump_json()
