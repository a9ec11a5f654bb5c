"""Routed experts of a context, put together by hand from parts, turns and generators. Token i of a context went to the
experts i and i + 1 of its only layer, plus 100 where another generator computed it.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from env_service.rollouts import routing
from env_service.rollouts.completions import BadAnswer, Completion, CompletionPiece, rest_of
from env_service.rollouts.routing import TokenRouting, within_limits
from env_service.rollouts.speech import Transcript
from protocol.generation import GeneratePart, GenerateRequest, Sampling
from protocol.routed_experts import RoutedExperts
from protocol.trajectories import RewardRecord, Trajectory
from tests.env_service.bench import MakeBench
from tests.env_service.peers import END, lease, part
from tests.env_service.rollouts.test_conversation import TrajectoryWords, offered
from tests.learner.samples import trajectory

REWARD = RewardRecord(reward=1.0, verifier="test")


def experts(start: int, end: int, *, plus: int = 0) -> RoutedExperts:
    """Of the tokens [start, end)."""
    first = np.arange(start, end) + plus
    return RoutedExperts.of([(start, np.stack([first, first + 1], 1)[:, None].astype(np.uint8))])


def told(part: GeneratePart, start: int, end: int, *, plus: int = 0) -> GeneratePart:
    return part.model_copy(update={"routed_experts": experts(start, end, plus=plus)})


def first_experts(record: RoutedExperts | None) -> list[int]:
    assert record is not None
    found: list[int] = record.rows()[:, 0, 0].tolist()
    return found


def request(*prompt: int) -> GenerateRequest:
    return GenerateRequest(
        request_id="r", prompt_token_ids=prompt, sampling=Sampling(max_tokens=9), routed_experts=True
    )


def sampled(prompt: Sequence[int], *parts: GeneratePart) -> Completion:
    completion = Completion(0)
    piece = CompletionPiece((completion,))
    piece.begin(request(*prompt))
    for each in parts:
        piece.take(each, generator_id="g0")
    return completion


def test_the_last_token_of_a_completion_has_none() -> None:
    parts = [told(part(0, [5, 6], last=False), 0, 4), told(part(0, [5, 6, 7, END]), 4, 6)]
    parts[1] = parts[1].model_copy(update={"token_ids": (7, END), "behavior_logprobs": (-0.5, -0.5)})
    completion = sampled([1, 2, 3], *parts)
    assert completion.token_ids == [5, 6, 7, END]
    assert completion.routing.end == 3 + 4 - 1


def test_what_goes_on_elsewhere_has_the_rows_with_which_each_token_was_sampled() -> None:
    """Of the prompt 1 2 3 and the tokens 5 6 of the first generator, the second one computes all again: the last one
    was no input before, and the others stay as they were.
    """
    completion = sampled([1, 2, 3], told(part(0, [5, 6], last=False), 0, 4))
    (piece,) = rest_of(CompletionPiece((completion,)), request(1).sampling)
    asked = piece.begin(request(1, 2, 3))
    assert asked.prompt_token_ids == (1, 2, 3, 5, 6)
    assert asked.routed_experts
    assert asked.routed_experts_from == 4
    piece.take(told(part(0, [7, END]), 0, 6, plus=100), generator_id="g1")
    assert first_experts(completion.routing.record(7)) == [0, 1, 2, 3, 104, 105]


def test_rows_of_tokens_without_a_version_go_with_them() -> None:
    """The first generator has stamped one of its two tokens: the row with which it sampled the other one is no use."""
    unstamped = part(0, [5], last=False).model_copy(update={"token_ids": (5, 6), "behavior_logprobs": (-0.5, -0.5)})
    completion = sampled([1, 2, 3], told(unstamped, 0, 4))
    (piece,) = rest_of(CompletionPiece((completion,)), request(1).sampling)
    piece.begin(request(1, 2, 3))
    assert completion.routing.end == 3
    piece.take(told(part(0, [8, END]), 0, 5, plus=100), generator_id="g1")
    assert first_experts(completion.routing.record(6)) == [0, 1, 2, 103, 104]


def test_a_completion_that_is_begun_anew_has_forgotten_them() -> None:
    completion = sampled([1, 2, 3], told(part(0, [5, 6], last=False), 0, 4))
    completion.begin_anew()
    assert completion.routing.end == 0


def test_behind_an_end_by_its_text_nothing_is_known() -> None:
    completion = Completion(0, end_of=lambda ids: 2 if len(ids) > 2 else None)
    piece = CompletionPiece((completion,))
    piece.begin(request(1, 2, 3))
    piece.take(told(part(0, [5, 6, 7, 8], last=False), 0, 6), generator_id="g0")
    assert completion.token_ids == [5, 6]
    assert completion.routing.end == 3 + 2 - 1


@pytest.mark.parametrize(
    ("end", "complaint"), [(6, "the routed experts of 6 tokens, and there are 5"), (None, "expected 8, of 4 tokens")]
)
def test_what_cannot_be_is_a_bad_answer(end: int | None, complaint: str) -> None:
    spoiled = experts(0, end or 5)
    if end is None:
        spoiled = spoiled.model_copy(update={"spans": ((0, 4),)})
    answer = part(0, [5, END]).model_copy(update={"routed_experts": spoiled})
    with pytest.raises(BadAnswer, match=complaint):
        sampled([1, 2, 3], answer)


def test_rows_of_another_model_are_refused() -> None:
    known = TokenRouting()
    known.add(experts(0, 2).pieces())
    with pytest.raises(ValueError, match="routed experts of 2 layers, 2 in each, behind those of 1 layers, 2 in each"):
        known.add([(2, np.zeros((1, 2, 2), dtype=np.uint8))])


def said(completion: Completion) -> Completion:
    completion.finish_reason = "stop"
    return completion


def record_of(transcript: Transcript) -> Trajectory:
    return transcript.record(turn_rewards=False, reward=REWARD)


def test_turns_of_one_context_by_hand() -> None:
    """Turn 1 is asked with 1 2 and samples 5 6; the environment says 3 4; turn 2 samples 7 8. The last token of turn 1
    and what was said come with turn 2, which computes turn 1 again.
    """
    transcript = Transcript()
    transcript.begin([1, 2])
    transcript.sampled(said(sampled([1, 2], told(part(0, [5, 6]), 0, 3))), state="")
    transcript.show([3, 4])
    transcript.sampled(said(sampled([1, 2, 5, 6, 3, 4], told(part(0, [7, 8]), 0, 7, plus=100))), state="")
    record = record_of(transcript)
    assert record.token_ids.tolist() == [1, 2, 5, 6, 3, 4, 7, 8]
    assert record.routed_experts is not None
    assert record.routed_experts.spans == ((0, 7),)
    assert first_experts(record.routed_experts) == [0, 1, 2, 103, 104, 105, 106]


def test_a_new_context_begins_anew() -> None:
    transcript = Transcript()
    transcript.begin([1, 2])
    transcript.sampled(said(sampled([1, 2], told(part(0, [5, 6]), 0, 3))), state="")
    transcript.begin([9, 9, 9])
    transcript.sampled(said(sampled([9, 9, 9], told(part(0, [7, 8]), 0, 4, plus=100))), state="")
    record = record_of(transcript)
    assert record.sequence_starts == (4,)
    assert record.routed_experts is not None
    assert record.routed_experts.spans == ((0, 3), (4, 8))
    assert first_experts(record.routed_experts) == [0, 1, 2, 100, 101, 102, 103]


def test_a_turn_of_which_nothing_is_told_leaves_a_gap() -> None:
    """A generator that cannot tell them sampled the second turn."""
    transcript = Transcript()
    transcript.begin([1, 2])
    transcript.sampled(said(sampled([1, 2], told(part(0, [5, 6]), 0, 3))), state="")
    transcript.show([3])
    transcript.sampled(said(sampled([1, 2, 5, 6, 3], part(0, [7, 8]))), state="")
    record = record_of(transcript)
    assert record.routed_experts is not None
    assert record.routed_experts.spans == ((0, 3),)


def held_bytes(rows: np.ndarray) -> int:
    """Bytes that stay in memory because of them."""
    return rows.nbytes if rows.base is None else max(rows.nbytes, getattr(rows.base, "nbytes", 0))


def test_what_is_kept_of_turns_holds_no_more_memory_than_its_own_rows() -> None:
    """Forty turns, each of which tells all tokens so far again: two bytes of each token are kept, of 4 x 40 tokens."""
    transcript = Transcript()
    transcript.begin([1, 2])
    for turn in range(40):
        given = transcript.context
        completion = said(sampled(given, told(part(0, [5, 6]), 0, len(given) + 1)))
        transcript.sampled(completion, state="")
        if turn < 39:
            transcript.show([3, 4])
    kept = [rows for _, rows in transcript._routing.pieces]
    assert sum(map(held_bytes, kept)) == sum(rows.nbytes for rows in kept) == 2 * (4 * 40 - 1)


def test_what_was_cut_off_holds_no_memory() -> None:
    known = TokenRouting()
    known.add(experts(0, 100).pieces())
    known.cut(3)
    assert [held_bytes(rows) for _, rows in known.pieces] == [2 * 3]


def test_what_is_more_than_a_learner_takes_is_left_out_with_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    each = trajectory(1, 1).model_copy(update={"routed_experts": experts(0, 3)})
    assert within_limits((each, each)) == (each, each)
    monkeypatch.setattr(routing, "MAX_GROUP_BYTES", 1)
    assert [one.routed_experts for one in within_limits((each, each))] == [None, None]
    assert "the learner routes its tokens itself" in caplog.text


async def test_a_turn_asks_for_no_more_than_is_unknown(chat_bench: MakeBench, chat_model: Path) -> None:
    """The last token of a turn and what was said behind it come with the next one."""
    words = TrajectoryWords(chat_model, "one two stop")

    def script(asked: GenerateRequest) -> Sequence[GeneratePart]:
        (one,) = words(asked)
        return [told(one, asked.routed_experts_from, len(asked.prompt_token_ids) + len(one.token_ids) - 1)]

    made = await chat_bench(script, extra=[offered()])
    granted = lease(environment="counting", group_size=1).model_copy(update={"routed_experts": True})
    (found,) = (await made.finished(granted)).group.trajectories
    assert first_experts(found.routed_experts) == list(range(len(found.token_ids) - 1))
    asked_from = [each.routed_experts_from for each in made.generators[0].requests]
    assert asked_from == [0, *(turn.end - 1 for turn in found.turns[:-1])]


def test_what_was_not_asked_for_is_not_kept() -> None:
    """A generator that tells all tokens again."""
    completion = Completion(0)
    piece = CompletionPiece((completion,))
    piece.begin(request(1, 2, 3).model_copy(update={"routed_experts_from": 2}))
    piece.take(told(part(0, [5, END]), 0, 4), generator_id="g0")
    assert [(place, held_bytes(rows)) for place, rows in completion.routing.pieces] == [(2, 4)]
    assert completion.routing.end == 4


@pytest.mark.parametrize("asks", [True, False])
async def test_a_lease_asks_for_them_and_its_trajectories_have_them(bench: MakeBench, asks: bool) -> None:
    made = await bench(
        lambda r: [
            told(part(0, [0, 8, END]), 0, len(r.prompt_token_ids) + 2) if r.routed_experts else part(0, [8, END])
        ]
    )
    asked = lease(group_size=1).model_copy(update={"routed_experts": asks})
    (found,) = (await made.finished(asked)).group.trajectories
    assert made.generators[0].requests[0].routed_experts is asks
    if asks:
        assert first_experts(found.routed_experts) == list(range(len(found.token_ids) - 1))
    else:
        assert found.routed_experts is None
