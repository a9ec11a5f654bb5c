"""Groups with a single fault: each is refused with a text that names it.

Rows may be sent as they are held, or narrow: both are spoiled.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from protocol.codec import Frame, MalformedMessage, decode, sealed
from protocol.model import PROTOCOL_VERSION

GOLDEN = Path(__file__).parent / "golden"


def vector(name: str) -> list[bytes]:
    return [bytes.fromhex(line) for line in (GOLDEN / name).read_text(encoding="ascii").splitlines()]


HELD, NARROW = vector("stored/finished-5.hex"), vector("finished.hex")


@dataclass
class Draft:
    """A valid `finished` message, taken apart so that a test can spoil one thing."""

    body: Any = field(default_factory=lambda: msgpack.unpackb(HELD[0])[2])
    arrays: list[bytes] = field(default_factory=lambda: list(HELD[1:-1]))

    @classmethod
    def narrow(cls) -> "Draft":
        return cls(body=msgpack.unpackb(NARROW[0])[2], arrays=list(NARROW[1:-1]))

    @property
    def group(self) -> Any:
        return self.body["group"]

    @property
    def trajectory(self) -> Any:
        return self.group["trajectories"][0]

    def frames(self) -> list[Frame]:
        return sealed([msgpack.packb([PROTOCOL_VERSION, "finished", self.body]), *self.arrays])


def reference(*parts: object) -> msgpack.ExtType:
    return msgpack.ExtType(1, msgpack.packb(list(parts)))


def unknown_field(draft: Draft) -> None:
    draft.group["colour"] = "red"


def missing_field(draft: Draft) -> None:
    del draft.group["lease_id"]


def number_as_text(draft: Draft) -> None:
    draft.group["lease_id"] = "70000"


def negative_lease(draft: Draft) -> None:
    draft.group["lease_id"] = -1


def true_as_number(draft: Draft) -> None:
    draft.group["attempt"] = True


def unknown_purpose(draft: Draft) -> None:
    draft.group["purpose"] = "mischief"


def field_with_an_endless_name(draft: Draft) -> None:
    draft.group["x" * 1_000_000] = "red"


def body_is_a_list(draft: Draft) -> None:
    draft.body = [1, 2, 3]
    draft.arrays = []


def list_for_an_array(draft: Draft) -> None:
    draft.group["token_ids"] = [5, 6, 7, 260, 70000, 2] * 2
    draft.group["loss_mask"], draft.group["behavior_logprobs"] = reference(1, "u1", 12), reference(2, "f4", 12)
    draft.arrays = draft.arrays[1:]


def array_for_a_number(draft: Draft) -> None:
    draft.group["task_index"] = reference(4, "i4", 1)
    draft.arrays.append(b"\0\0\0\0")


def array_of_another_length(draft: Draft) -> None:
    draft.arrays[1] = draft.arrays[1] + b"\0"


def length_that_the_others_lack(draft: Draft) -> None:
    draft.group["loss_mask"] = reference(2, "u1", 13)
    draft.arrays[1] = draft.arrays[1] + b"\0"


def negative_length(draft: Draft) -> None:
    draft.group["loss_mask"] = reference(2, "u1", -12)


def enormous_length(draft: Draft) -> None:
    draft.group["loss_mask"] = reference(2, "u1", (1 << 64) - 1)


def array_of_another_type(draft: Draft) -> None:
    draft.group["token_ids"] = reference(1, "f4", 12)


def missing_array(draft: Draft) -> None:
    del draft.group["behavior_logprobs"]
    draft.arrays.pop()


def missing_lengths(draft: Draft) -> None:
    del draft.group["lengths"]


def lengths_of_something_else(draft: Draft) -> None:
    draft.group["lengths"] = "66"


def length_below_zero(draft: Draft) -> None:
    draft.group["lengths"] = [13, -1]


def true_as_length(draft: Draft) -> None:
    draft.group["lengths"] = [11, True]


def length_for_one_only(draft: Draft) -> None:
    draft.group["lengths"] = [12]


def lengths_of_more_tokens(draft: Draft) -> None:
    draft.group["lengths"] = [6, 7]


def trajectories_that_end_elsewhere(draft: Draft) -> None:
    draft.group["lengths"] = [5, 7]


def trajectory_that_is_a_number(draft: Draft) -> None:
    draft.group["trajectories"][1] = 7


def trajectory_with_an_array_of_its_own(draft: Draft) -> None:
    draft.group["trajectories"][1]["loss_mask"] = reference(4, "u1", 6)
    draft.arrays.append(bytes(6))


def unknown_element_code(draft: Draft) -> None:
    draft.group["token_ids"] = reference(1, "O8", 6)


def same_frame_twice(draft: Draft) -> None:
    draft.group["loss_mask"] = reference(1, "i4", 12)


def frame_that_did_not_come(draft: Draft) -> None:
    draft.arrays.pop()


def header_named_as_an_array(draft: Draft) -> None:
    draft.group["token_ids"] = reference(0, "u1", 6)


def negative_frame(draft: Draft) -> None:
    draft.group["token_ids"] = reference(-1, "i4", 6)


def frame_that_nobody_names(draft: Draft) -> None:
    draft.arrays.append(b"surplus")


def reference_of_two_parts(draft: Draft) -> None:
    draft.group["token_ids"] = reference(1, "i4")


def reference_that_is_nested_deeply(draft: Draft) -> None:
    draft.group["token_ids"] = msgpack.ExtType(1, b"\x91" * 1000 + b"\x90")


def unknown_extension(draft: Draft) -> None:
    draft.group["token_ids"] = msgpack.ExtType(7, b"")


def timestamp(draft: Draft) -> None:
    draft.group["task_index"] = msgpack.Timestamp(1, 2)


def byte_string_for_text(draft: Draft) -> None:
    draft.group["environment"] = b"addition"


def byte_string_for_a_field(draft: Draft) -> None:
    draft.group[b"lease_id"] = draft.group.pop("lease_id")


def nan_logprob(draft: Draft) -> None:
    draft.arrays[2] = np.array([0, 0, 0, -1, -1, -1, 0, 0, 0, -1, np.nan, -1], dtype="<f4").tobytes()


def infinite_logprob(draft: Draft) -> None:
    draft.arrays[2] = np.array([0, 0, 0, -1, -np.inf, -1] * 2, dtype="<f4").tobytes()


def nan_reward(draft: Draft) -> None:
    draft.trajectory["reward"]["reward"] = float("nan")


def infinite_component(draft: Draft) -> None:
    draft.trajectory["reward"]["components"] = {"length": float("inf")}


def enormous_reward(draft: Draft) -> None:
    draft.trajectory["reward"]["reward"] = 1e6 + 1


def reward_and_error(draft: Draft) -> None:
    draft.trajectory["reward"]["error"] = "also"


def negative_token(draft: Draft) -> None:
    draft.arrays[0] = np.array([5, 6, 7, 260, 70000, 2, 5, 6, 7, 260, -1, 2], dtype="<i4").tobytes()


def mask_of_two(draft: Draft) -> None:
    draft.arrays[1] = bytes([0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 2, 1])


def no_tokens(draft: Draft) -> None:
    draft.group["lengths"] = [0, 12]


def mark_beyond_the_stamps(draft: Draft) -> None:
    draft.arrays[1] = bytes([0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1])


def token_without_a_stamp(draft: Draft) -> None:
    draft.trajectory["version_spans"].pop()


def overlapping_spans(draft: Draft) -> None:
    draft.trajectory["version_spans"][1]["start"] = 3


def span_beyond_the_end(draft: Draft) -> None:
    draft.trajectory["version_spans"][1]["end"] = 1 << 62


def empty_span(draft: Draft) -> None:
    draft.trajectory["version_spans"][0]["start"] = 4


def version_that_is_no_version(draft: Draft) -> None:
    draft.trajectory["version_spans"][0]["version"] = "seven"


def version_beyond_an_int32(draft: Draft) -> None:
    draft.trajectory["version_spans"][0]["version"] = "1.9999999999"


def turn_backwards(draft: Draft) -> None:
    draft.trajectory["turns"][0]["completion_start"] = 7


def turn_beyond_the_end(draft: Draft) -> None:
    draft.trajectory["turns"][0]["end"] = 7


def no_trajectories(draft: Draft) -> None:
    draft.group["trajectories"], draft.group["lengths"] = [], []
    for name in ("token_ids", "loss_mask", "behavior_logprobs"):
        del draft.group[name]
    draft.arrays = []


SPOILED: list[tuple[Callable[[Draft], None], str]] = [
    (unknown_field, r"group\.colour: Extra inputs"),
    (field_with_an_endless_name, r"finished: group\.xxx"),
    (missing_field, r"group\.lease_id: Field required"),
    (number_as_text, r"group\.lease_id: Input should be a valid integer"),
    (negative_lease, r"group\.lease_id: .*greater than or equal to 0"),
    (true_as_number, r"group\.attempt: Input should be a valid integer"),
    (unknown_purpose, r"group\.purpose: Input should be 'train' or 'evaluate'"),
    (body_is_a_list, r"finished: message: Input should be a valid dictionary"),
    (list_for_an_array, r"group\.token_ids: expected a numpy array, got tuple"),
    (array_for_a_number, r"group\.task_index: Input should be a valid integer"),
    (array_of_another_length, r"frame 2 has 13 bytes, 12 elements of u1 were announced"),
    (length_that_the_others_lack, r"group\.loss_mask has 13 entries for 12 tokens"),
    (negative_length, r"frame 2 has 12 bytes, -12 elements"),
    (enormous_length, r"frame 2 has 12 bytes"),
    (array_of_another_type, r"group\.token_ids: expected a row of int32, got 1-d float32"),
    (missing_array, r"group\.behavior_logprobs: expected a numpy array, got NoneType"),
    (missing_lengths, r"group\.lengths: expected numbers of tokens, got None"),
    (lengths_of_something_else, r"group\.lengths: expected numbers of tokens, got '66'"),
    (length_below_zero, r"group\.lengths: expected numbers of tokens, got \(13, -1\)"),
    (true_as_length, r"group\.lengths: expected numbers of tokens, got \(11, True\)"),
    (length_for_one_only, r"group\.lengths: 1 lengths for 2 trajectories"),
    (lengths_of_more_tokens, r"group\.token_ids has 12 entries for 13 tokens"),
    (trajectories_that_end_elsewhere, r"trajectories\.0: .*exceeds 5 tokens|trajectories\.0: .*beyond the 5 tokens"),
    (trajectory_that_is_a_number, r"group\.trajectories\.1: expected a dictionary, got int"),
    (trajectory_with_an_array_of_its_own, r"group\.trajectories\.1: arrays of its own"),
    (unknown_element_code, r"\[1, 'O8', 6\] does not name an array frame"),
    (same_frame_twice, r"\[1, 'i4', 12\] does not name an array frame"),
    (frame_that_did_not_come, r"\[3, 'f4', 12\] does not name an array frame"),
    (header_named_as_an_array, r"\[0, 'u1', 6\] does not name an array frame"),
    (negative_frame, r"\[-1, 'i4', 6\] does not name an array frame"),
    (frame_that_nobody_names, r"4 array frames arrived, the header names 3"),
    (reference_of_two_parts, r"\[1, 'i4'\] does not name an array frame"),
    (reference_that_is_nested_deeply, r"\[\[\[.*does not name an array frame"),
    (unknown_extension, r"extension type 7 is not known"),
    (timestamp, r"group\.task_index: Input should be a valid integer"),
    (byte_string_for_text, r"group\.environment: Input should be a valid string"),
    (byte_string_for_a_field, r"Keys should be strings"),
    (nan_logprob, r"trajectories\.1: .*behavior_logprobs holds a value that is not finite"),
    (infinite_logprob, r"behavior_logprobs holds a value that is not finite"),
    (nan_reward, r"verifier .* gave a reward of nan, expected a finite number"),
    (infinite_component, r"verifier .* gave a component 'length' of inf, expected a finite number"),
    (enormous_reward, r"verifier .* gave a reward of 1000001.0, expected one of at most 1e\+06"),
    (reward_and_error, r"either a reward or an error"),
    (negative_token, r"trajectories\.1: .*no negative id"),
    (mask_of_two, r"trajectories\.1: .*loss_mask holds something other than 0 and 1"),
    (no_tokens, r"trajectories\.0: .*at least one token"),
    (mark_beyond_the_stamps, r"trajectories\.1: .*a sampled token has no version stamp"),
    (token_without_a_stamp, r"a sampled token has no version stamp"),
    (overlapping_spans, r"overlaps another"),
    (span_beyond_the_end, r"exceeds 6 tokens"),
    (empty_span, r"version span \[4, 4\) is empty"),
    (version_that_is_no_version, r"version: String should match pattern"),
    (version_beyond_an_int32, r"version: String should match pattern"),
    (turn_backwards, r"samples from 7 on"),
    (turn_beyond_the_end, r"a turn ends beyond the 6 tokens"),
    (no_trajectories, r"trajectories: .*at least 1 item"),
]


@pytest.mark.parametrize(("spoil", "complaint"), SPOILED, ids=[spoil.__name__ for spoil, _ in SPOILED])
def test_a_spoiled_group_is_refused_with_a_text_that_says_why(spoil: Callable[[Draft], None], complaint: str) -> None:
    draft = Draft()
    decode(draft.frames())
    spoil(draft)
    with pytest.raises(MalformedMessage, match=complaint) as caught:
        decode(draft.frames())
    assert len(str(caught.value)) < 600


def third_bytes_of_other_tokens(draft: Draft) -> None:
    draft.group["token_ids_high"] = reference(2, "u1", 11)
    draft.arrays[1] = draft.arrays[1][:-1]


def third_bytes_of_another_type(draft: Draft) -> None:
    draft.group["token_ids_high"] = reference(2, "i4", 12)
    draft.arrays[1] = bytes(48)


def third_bytes_beside_whole_ids(draft: Draft) -> None:
    draft.group["token_ids"] = reference(1, "i4", 12)
    draft.arrays[0] = bytes(48)


def with_runs(draft: Draft, *runs: int) -> None:
    del draft.group["loss_mask"]
    draft.group["mask_runs"] = reference(3, "i4", len(runs))
    draft.arrays[2] = np.array(runs, dtype="<i4").tobytes()


def runs_of_fewer_tokens(draft: Draft) -> None:
    with_runs(draft, 3, 3, 3, 2)


def runs_of_endless_tokens(draft: Draft) -> None:
    with_runs(draft, *[(1 << 31) - 1] * 1000)


def run_below_zero(draft: Draft) -> None:
    with_runs(draft, 13, -1)


def runs_beside_a_mask(draft: Draft) -> None:
    mask = draft.group["loss_mask"]
    with_runs(draft, 3, 3, 3, 3)
    draft.group["loss_mask"] = mask._replace(data=mask.data.replace(b"\x03", b"\x05", 1))
    draft.arrays.append(bytes(12))


def fewer_logprobs_than_sampled(draft: Draft) -> None:
    draft.group["sampled_logprobs"] = reference(4, "f4", 5)
    draft.arrays[3] = draft.arrays[3][:-4]


def logprobs_of_both_kinds(draft: Draft) -> None:
    draft.group["behavior_logprobs"] = reference(5, "f4", 12)
    draft.arrays.append(bytes(48))


SPOILED_NARROW: list[tuple[Callable[[Draft], None], str]] = [
    (third_bytes_of_other_tokens, r"group\.token_ids_high has 11 entries for 12 tokens"),
    (third_bytes_of_another_type, r"group\.token_ids_high: expected a row of uint8, got 1-d int32"),
    (third_bytes_beside_whole_ids, r"group\.token_ids_high beside token_ids of int32"),
    (runs_of_fewer_tokens, r"group\.mask_runs are of 11 entries for 12 tokens"),
    (runs_of_endless_tokens, r"group\.mask_runs are of 2147483647000 entries for 12 tokens"),
    (run_below_zero, r"group\.mask_runs are of 12 entries for 12 tokens, or below 0"),
    (runs_beside_a_mask, r"group\.mask_runs beside loss_mask: expected one of them"),
    (fewer_logprobs_than_sampled, r"group\.sampled_logprobs has 5 entries for 6 sampled tokens"),
    (logprobs_of_both_kinds, r"group\.sampled_logprobs beside behavior_logprobs: expected one of them"),
]


@pytest.mark.parametrize(("spoil", "complaint"), SPOILED_NARROW, ids=[spoil.__name__ for spoil, _ in SPOILED_NARROW])
def test_a_group_whose_narrow_rows_are_spoiled_is_refused(spoil: Callable[[Draft], None], complaint: str) -> None:
    draft = Draft.narrow()
    decode(draft.frames())
    spoil(draft)
    with pytest.raises(MalformedMessage, match=complaint):
        decode(draft.frames())


def test_runs_say_the_same_as_a_mask() -> None:
    draft = Draft.narrow()
    expected = repr(decode(draft.frames()))
    with_runs(draft, 3, 3, 3, 3)
    assert repr(decode(draft.frames())) == expected
