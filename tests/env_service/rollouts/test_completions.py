"""Completions that begin at one generator and go on at another."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from env_service.rollouts.completions import Completion, CompletionPiece, RolloutProgress, rest_of
from protocol.generation import GeneratePart, GenerateRequest, Sampling
from protocol.messages import FinishedLease
from protocol.trajectories import VersionSpan
from tests.env_service.bench import TEXT, MakeBench, Script, prefix_of, well
from tests.env_service.peers import END, eventually, lease, part


def spans(*bounds: tuple[str, int, int]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(version=version, start=start, end=end) for version, start, end in bounds)


def newer(request: GenerateRequest) -> Sequence[GeneratePart | None]:
    """The answer of `well`, under a newer version."""
    return [part(index, TEXT[prefix_of(request) :], version="1.4") for index in range(request.n)]


def handed_back(index: int, tokens: Sequence[int]) -> GeneratePart:
    return part(index, tokens).model_copy(update={"finish_reason": "abort"})


async def test_a_lost_completion_goes_on_behind_its_tokens_with_their_versions_and_logprobs(bench: MakeBench) -> None:
    made = await bench(lambda r: [part(0, [0, 8], last=False), None], newer)

    (trajectory,) = (await made.finished(lease(group_size=1))).group.trajectories

    (asked,) = made.generators[1].requests
    assert asked.prompt_token_ids == (*made.generators[0].requests[0].prompt_token_ids, 0, 8)
    assert (asked.n, asked.sampling.max_tokens) == (1, 2)
    assert trajectory.token_ids[6:].tolist() == list(TEXT)
    assert trajectory.version_spans == spans(("1.3", 6, 8), ("1.4", 8, 10))
    assert trajectory.behavior_logprobs[6:].tolist() == [-0.5] * 4
    assert trajectory.turns[0].generator_ids == ("g0", "g1")


async def test_two_spans_of_one_version_become_one(bench: MakeBench) -> None:
    made = await bench(lambda r: [part(0, [0, 8], last=False), None], well)

    (trajectory,) = (await made.finished(lease(group_size=1))).group.trajectories

    assert trajectory.version_spans == spans(("1.3", 6, 10))


async def test_finished_completions_stay_and_those_without_a_token_are_asked_for_together(bench: MakeBench) -> None:
    made = await bench(lambda r: [part(1, [7, END]), part(3, [0], last=False), None], newer)

    group = (await made.finished(lease(group_size=5))).group

    assert [trajectory.turns[0].generator_ids for trajectory in group.trajectories] == [
        ("g1",), ("g0",), ("g1",), ("g0", "g1"), ("g1",)
    ]  # fmt: skip
    assert group.trajectories[1].token_ids[6:].tolist() == [7, END]
    assert sorted((asked.n, prefix_of(asked)) for asked in made.generators[1].requests) == [(1, 1), (3, 0)]


async def test_what_a_draining_generator_hands_back_goes_on_elsewhere(bench: MakeBench) -> None:
    made = await bench(lambda r: [handed_back(0, [0, 8]), part(1, [7, END])], newer)

    first, second = (await made.finished(lease(group_size=2))).group.trajectories

    assert first.version_spans == spans(("1.3", 6, 8), ("1.4", 8, 10))
    assert first.turns[0].finish_reason == "stop"
    assert second.turns[0].generator_ids == ("g0",)


async def test_tokens_of_two_processes_stay_apart_though_both_were_of_one_version(bench: MakeBench) -> None:
    """Each of the two has to prove that it served this version."""

    def signed(one: GeneratePart, instance: str) -> GeneratePart:
        (span,) = one.version_spans
        return one.model_copy(update={"version_spans": (span.model_copy(update={"instance": instance}),)})

    made = await bench(lambda r: [signed(handed_back(0, [0, 8]), "a")], lambda r: [signed(part(0, [7, END]), "b")])

    (trajectory,) = (await made.finished(lease(group_size=1))).group.trajectories

    assert [(span.start, span.end, span.instance) for span in trajectory.version_spans] == [(6, 8, "a"), (8, 10, "b")]


async def test_tokens_that_saw_older_keys_and_values_stay_apart_and_say_so(bench: MakeBench) -> None:
    def cached(one: GeneratePart, version: str) -> GeneratePart:
        (span,) = one.version_spans
        return one.model_copy(update={"version_spans": (span.model_copy(update={"cache": version}),)})

    made = await bench(lambda r: [cached(handed_back(0, [0, 8]), "1.2")], lambda r: [part(0, [7, END])])

    (trajectory,) = (await made.finished(lease(group_size=1))).group.trajectories

    assert [(span.start, span.end, span.cache) for span in trajectory.version_spans] == [(6, 8, "1.2"), (8, 10, None)]
    assert trajectory.versions == {"1.2", "1.3"}
    assert trajectory.oldest_version == 3, "the lag is that of its tokens"


async def test_tokens_without_a_version_are_sampled_again(bench: MakeBench) -> None:
    unstamped = GeneratePart(index=0, token_ids=(1, 1), behavior_logprobs=(-1.0, -1.0))
    made = await bench(lambda r: [part(0, [0], last=False), unstamped, None], well)

    (trajectory,) = (await made.finished(lease(group_size=1))).group.trajectories

    assert trajectory.token_ids[6:].tolist() == list(TEXT)
    assert [prefix_of(asked) for asked in made.generators[1].requests] == [1]


async def test_a_completion_that_had_all_its_tokens_is_finished(bench: MakeBench) -> None:
    made = await bench(lambda r: [part(0, [0, 0, 0, 0], last=False), None], well)

    (trajectory,) = (await made.finished(lease(group_size=1))).group.trajectories

    assert trajectory.turns[0].finish_reason == "length"
    assert made.generators[1].requests == []


async def test_a_completion_that_moves_again_and_again_is_one_row(bench: MakeBench) -> None:
    def one_token(request: GenerateRequest) -> Sequence[GeneratePart | None]:
        index = prefix_of(request)
        return [part(0, [TEXT[index]], version=f"1.{index}", last=index == 3), None]

    made = await bench(one_token, one_token)

    (trajectory,) = (await made.finished(lease(group_size=1))).group.trajectories

    assert trajectory.token_ids[6:].tolist() == list(TEXT)
    assert trajectory.token_versions()[6:].tolist() == [0, 1, 2, 3]
    assert trajectory.turns[0].generator_ids == ("g0", "g1", "g0", "g1")
    assert made.pauses == []


async def test_failures_count_only_as_long_as_no_token_comes(bench: MakeBench) -> None:
    requests: Counter[str] = Counter()

    def every_third(request: GenerateRequest) -> Sequence[GeneratePart | None] | int:
        requests["all"] += 1
        if requests["all"] % 3:
            return 500
        index = prefix_of(request)
        return [part(0, [TEXT[index]], last=index == 3), None]

    made = await bench(every_third)

    (trajectory,) = (await made.finished(lease(group_size=1))).group.trajectories

    assert trajectory.token_ids[6:].tolist() == list(TEXT)
    assert len(made.generators[0].requests) > 8


async def test_with_the_only_generator_gone_the_tokens_wait_for_one_that_serves(bench: MakeBench) -> None:
    made = await bench(lambda r: 503 if prefix_of(r) else [part(0, [0, 8], last=False), None], newer)
    first, second = made.fleet.serving
    made.fleet.replace([first])
    progress = RolloutProgress()
    rollout = asyncio.create_task(made.rollout.run(lease(group_size=1), progress))
    await eventually(lambda: made.generators[0].requests)
    made.fleet.replace([])
    await eventually(lambda: progress.oldest_version() == "1.3")
    assert not (await asyncio.wait([rollout], timeout=0.1))[0]
    assert progress.oldest_version() == "1.3"
    made.fleet.replace([second])
    async with asyncio.timeout(60):
        outcome = await rollout

    assert isinstance(outcome, FinishedLease)
    assert outcome.group.trajectories[0].turns[0].generator_ids == ("g0", "g1")


async def test_a_cancelled_rollout_does_not_wait_on(bench: MakeBench) -> None:
    made = await bench()
    made.fleet.replace([])
    rollout = asyncio.create_task(made.rollout.run(lease(), RolloutProgress()))
    await asyncio.sleep(0.01)
    rollout.cancel()
    async with asyncio.timeout(60):
        await asyncio.wait([rollout])
    assert rollout.cancelled()


async def test_a_generator_that_takes_nothing_is_waited_for_beyond_all_attempts(bench: MakeBench) -> None:
    answers = [503] * 10

    def late(request: GenerateRequest) -> Sequence[GeneratePart | None] | int:
        return answers.pop() if answers else well(request)

    made = await bench(late)

    assert (await made.finished(lease())).group.trajectories[0].token_ids[6:].tolist() == list(TEXT)


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(lambda r: [part(0, [0], last=False), None], id="connection lost"),
        pytest.param(lambda r: [part(0, [0], last=False)], id="ends early"),
        pytest.param(lambda r: [part(0, [0]), part(0, [END])], id="goes on after the end"),
    ],
)
async def test_after_every_kind_of_end_nothing_that_was_received_is_lost(bench: MakeBench, broken: Script) -> None:
    made = await bench(broken, well)

    first, second = (await made.finished(lease())).group.trajectories

    assert first.token_ids[6:].tolist()[0] == 0
    assert first.turns[0].generator_ids[0] == "g0"
    assert second.turns[0].generator_ids == ("g1",)


def completions(*tokens: Sequence[int]) -> CompletionPiece:
    made = CompletionPiece(tuple(Completion(index) for index in range(len(tokens))))
    for index, row in enumerate(tokens):
        if row:
            made.take(part(index, row, last=False), generator_id="g")
    return made


def whole(sampling: Sampling, *, n: int) -> GenerateRequest:
    return GenerateRequest(request_id="r", prompt_token_ids=(1,), n=n, sampling=sampling, purpose="evaluate")


def test_a_stop_token_at_the_end_of_a_prefix_is_the_end() -> None:
    piece = completions([5, 7], [5, 7, 6])
    rest = rest_of(piece, Sampling(max_tokens=9, stop_token_ids=(7,)))
    assert [[completion.index for completion in each.completions] for each in rest] == [[1]]
    assert piece.completions[0].finish_reason == "stop"


def test_the_least_number_of_tokens_shrinks_with_the_prefix() -> None:
    sampling = Sampling(max_tokens=9, min_tokens=3)
    asked = [each.begin(whole(sampling, n=2)).sampling for each in rest_of(completions([5, 7], [5, 7, 6, 6]), sampling)]
    assert [(each.max_tokens, each.min_tokens) for each in asked] == [(7, 1), (5, 0)]


def test_with_a_seed_no_two_requests_draw_alike() -> None:
    sampling = Sampling(max_tokens=9, seed=40)
    rest = rest_of(completions([], [5], [], [], [5], [5, 6]), sampling)
    asked = [each.begin(whole(sampling, n=6)) for each in rest]
    assert [(each.n, each.sampling.seed) for each in asked[:2]] == [(1, 40), (2, 42)]
    drawn = [each.sampling.seed + i for each in asked if each.sampling.seed is not None for i in range(each.n)]
    assert len(set(drawn)) == 6


def test_a_completion_that_goes_on_does_not_repeat_the_draws_that_it_began_with() -> None:
    sampling = Sampling(max_tokens=9, seed=40)
    seeds = set()
    for received in range(5):
        (rest,) = rest_of(completions([5] * received), sampling)
        seeds.add(rest.begin(whole(sampling, n=1)).sampling.seed)
    assert len(seeds) == 5


def test_a_penalty_on_sampled_tokens_has_all_sampled_anew() -> None:
    sampling = Sampling(max_tokens=9, frequency_penalty=0.5)
    piece = completions([5], [], [6])
    piece.completions[0].finish_reason = "stop"
    (rest,) = rest_of(piece, sampling)
    asked = rest.begin(whole(sampling, n=3))
    assert (asked.n, len(asked.prompt_token_ids), rest.received) == (3, 1, 0)
    assert all(completion.finish_reason is None for completion in rest.completions)


async def test_deaths_at_random_moments_leave_the_distribution_of_lengths_as_it_is(bench: MakeBench) -> None:
    """Each token ends a completion with probability 1/2. A generator dies after some token that all have in common;
    had the finished ones been kept and the others drawn anew, the mean length would be 1.44 and not 1.875.
    """
    chance = random.Random(5)

    def sampler(request: GenerateRequest, *, dies_after: int) -> Sequence[GeneratePart | None]:
        parts: list[GeneratePart | None] = []
        for index in range(request.n):
            tokens: list[int] = []
            while len(tokens) < dies_after and len(tokens) < request.sampling.max_tokens and END not in tokens:
                tokens.append(END if chance.random() < 0.5 else 1)
            ended = END in tokens or len(tokens) == request.sampling.max_tokens
            parts.append(part(index, tokens, last=ended))
        return [*parts, None]

    made = await bench(lambda r: sampler(r, dies_after=1), lambda r: sampler(r, dies_after=99))

    lengths: list[int] = []
    for number in range(6):
        group = (await made.finished(lease(number, group_size=200))).group
        lengths += [trajectory.token_ids.shape[0] - 6 for trajectory in group.trajectories]
    # One standard error is 1.05 / sqrt(1200) = 0.03.
    assert sum(lengths) / len(lengths) == pytest.approx(1.875, abs=0.13)
