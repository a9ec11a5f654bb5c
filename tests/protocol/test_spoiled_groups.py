"""One thing wrong in a group that is right otherwise: each is refused with a text that says what."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from protocol.codec import Frame, MalformedMessage, decode, sealed
from protocol.model import PROTOCOL_VERSION

VECTOR = [
    bytes.fromhex(line)
    for line in (Path(__file__).parent / "golden" / "finished.hex").read_text(encoding="ascii").splitlines()
]


@dataclass
class Draft:
    """A valid `finished` message, taken apart so that a test can spoil one thing."""

    body: Any = field(default_factory=lambda: msgpack.unpackb(VECTOR[0])[2])
    arrays: list[bytes] = field(default_factory=lambda: list(VECTOR[1:-1]))

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
    draft.trajectory["token_ids"] = [5, 6, 7, 260, 70000, 2]
    draft.arrays = draft.arrays[1:]
    draft.trajectory["loss_mask"], draft.trajectory["behavior_logprobs"] = reference(1, "u1", 6), reference(2, "f4", 6)
    draft.group["trajectories"] = draft.group["trajectories"][:1]
    draft.arrays = draft.arrays[:2]


def array_for_a_number(draft: Draft) -> None:
    draft.group["task_index"] = reference(7, "i4", 1)
    draft.arrays.append(b"\0\0\0\0")


def array_of_another_length(draft: Draft) -> None:
    draft.arrays[1] = draft.arrays[1] + b"\0"


def length_that_the_others_lack(draft: Draft) -> None:
    draft.trajectory["loss_mask"] = reference(2, "u1", 7)
    draft.arrays[1] = draft.arrays[1] + b"\0"


def negative_length(draft: Draft) -> None:
    draft.trajectory["loss_mask"] = reference(2, "u1", -6)


def enormous_length(draft: Draft) -> None:
    draft.trajectory["loss_mask"] = reference(2, "u1", (1 << 64) - 1)


def array_of_another_type(draft: Draft) -> None:
    draft.trajectory["token_ids"] = reference(1, "f4", 6)


def unknown_element_code(draft: Draft) -> None:
    draft.trajectory["token_ids"] = reference(1, "O8", 3)


def same_frame_twice(draft: Draft) -> None:
    draft.group["trajectories"][1]["token_ids"] = reference(1, "i4", 6)


def frame_that_did_not_come(draft: Draft) -> None:
    draft.arrays.pop()


def header_named_as_an_array(draft: Draft) -> None:
    draft.trajectory["token_ids"] = reference(0, "u1", 6)


def negative_frame(draft: Draft) -> None:
    draft.trajectory["token_ids"] = reference(-1, "i4", 6)


def frame_that_nobody_names(draft: Draft) -> None:
    draft.arrays.append(b"surplus")


def reference_of_two_parts(draft: Draft) -> None:
    draft.trajectory["token_ids"] = reference(1, "i4")


def reference_that_is_nested_deeply(draft: Draft) -> None:
    draft.trajectory["token_ids"] = msgpack.ExtType(1, b"\x91" * 1000 + b"\x90")


def unknown_extension(draft: Draft) -> None:
    draft.trajectory["token_ids"] = msgpack.ExtType(7, b"")


def timestamp(draft: Draft) -> None:
    draft.group["task_index"] = msgpack.Timestamp(1, 2)


def byte_string_for_text(draft: Draft) -> None:
    draft.group["environment"] = b"addition"


def byte_string_for_a_field(draft: Draft) -> None:
    draft.group[b"lease_id"] = draft.group.pop("lease_id")


def nan_logprob(draft: Draft) -> None:
    draft.arrays[2] = np.array([0, 0, 0, -1, np.nan, -1], dtype="<f4").tobytes()


def infinite_logprob(draft: Draft) -> None:
    draft.arrays[2] = np.array([0, 0, 0, -1, -np.inf, -1], dtype="<f4").tobytes()


def nan_reward(draft: Draft) -> None:
    draft.trajectory["reward"]["reward"] = float("nan")


def infinite_component(draft: Draft) -> None:
    draft.trajectory["reward"]["components"] = {"length": float("inf")}


def enormous_reward(draft: Draft) -> None:
    draft.trajectory["reward"]["reward"] = 1e6 + 1


def reward_and_error(draft: Draft) -> None:
    draft.trajectory["reward"]["error"] = "also"


def negative_token(draft: Draft) -> None:
    draft.arrays[0] = np.array([5, 6, 7, 260, -1, 2], dtype="<i4").tobytes()


def mask_of_two(draft: Draft) -> None:
    draft.arrays[1] = bytes([0, 0, 0, 1, 2, 1])


def no_tokens(draft: Draft) -> None:
    for name, code, index in (("token_ids", "i4", 1), ("loss_mask", "u1", 2), ("behavior_logprobs", "f4", 3)):
        draft.trajectory[name] = reference(index, code, 0)
        draft.arrays[index - 1] = b""


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
    draft.group["trajectories"] = []
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
    (list_for_an_array, r"token_ids: .*expected a numpy array, got tuple"),
    (array_for_a_number, r"group\.task_index: Input should be a valid integer"),
    (array_of_another_length, r"frame 2 has 7 bytes, 6 elements of u1 were announced"),
    (length_that_the_others_lack, r"loss_mask has 7 entries for 6 tokens"),
    (negative_length, r"frame 2 has 6 bytes, -6 elements"),
    (enormous_length, r"frame 2 has 6 bytes"),
    (array_of_another_type, r"token_ids: .*expected a row of int32, got 1-d float32"),
    (unknown_element_code, r"\[1, 'O8', 3\] does not name an array frame"),
    (same_frame_twice, r"\[1, 'i4', 6\] does not name an array frame"),
    (frame_that_did_not_come, r"\[6, 'f4', 6\] does not name an array frame"),
    (header_named_as_an_array, r"\[0, 'u1', 6\] does not name an array frame"),
    (negative_frame, r"\[-1, 'i4', 6\] does not name an array frame"),
    (frame_that_nobody_names, r"7 array frames arrived, the header names 6"),
    (reference_of_two_parts, r"\[1, 'i4'\] does not name an array frame"),
    (reference_that_is_nested_deeply, r"\[\[\[.*does not name an array frame"),
    (unknown_extension, r"extension type 7 is not known"),
    (timestamp, r"group\.task_index: Input should be a valid integer"),
    (byte_string_for_text, r"group\.environment: Input should be a valid string"),
    (byte_string_for_a_field, r"Keys should be strings"),
    (nan_logprob, r"behavior_logprobs holds a value that is not finite"),
    (infinite_logprob, r"behavior_logprobs holds a value that is not finite"),
    (nan_reward, r"verifier .* gave a reward of nan, expected a finite number"),
    (infinite_component, r"verifier .* gave a component 'length' of inf, expected a finite number"),
    (enormous_reward, r"verifier .* gave a reward of 1000001.0, expected one of at most 1e\+06"),
    (reward_and_error, r"either a reward or an error"),
    (negative_token, r"no negative id"),
    (mask_of_two, r"loss_mask holds something other than 0 and 1"),
    (no_tokens, r"at least one token"),
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
