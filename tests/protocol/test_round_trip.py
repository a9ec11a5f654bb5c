"""Any valid message survives the wire unchanged, and its arrays are not copied on the way."""

from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pydantic import ValidationError

from protocol import messages
from protocol.codec import Frame, MalformedMessage, decode, describe, encode, sealed
from protocol.generation import Sampling
from protocol.model import PROTOCOL_VERSION, code_of
from protocol.status import AskedPeer, LoadStatus, Status
from protocol.trajectories import ROWS, RewardRecord, Trajectory, TrajectoryGroup, Turn, VersionSpan

INCARNATIONS = st.integers(1, 1 << 40)
COUNTS = st.integers(0, (1 << 64) - 1)
NAMES = st.text(min_size=1, max_size=12)
PURPOSES = st.sampled_from(["train", "evaluate"])
SECONDS = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
VERSIONS = st.builds("{}.{}".format, st.integers(0, 999_999_999), st.integers(0, 999_999_999))
REWARDS = st.builds(
    RewardRecord,
    reward=st.floats(-1e6, 1e6),
    components=st.dictionaries(st.text(max_size=8), st.floats(allow_nan=False, allow_infinity=False), max_size=3),
    verifier=NAMES,
    verifier_version=st.text(max_size=8),
    service_id=NAMES,
    endpoint=NAMES,
    latency_s=SECONDS,
    attempts=st.integers(1, 99),
    explanation=st.text(max_size=20),
)
REWARD_ERRORS = st.builds(
    RewardRecord,
    verifier=NAMES,
    error_kind=st.sampled_from(["user", "data", "infrastructure", None]),
    error=st.text(max_size=20),
)
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.floats(0, 2),
    max_tokens=st.integers(1, 1 << 20),
    stop_token_ids=st.lists(st.integers(0, (1 << 31) - 1), max_size=3).map(tuple),
    seed=st.none() | st.integers(0, (1 << 63) - 1),
    top_p=st.floats(0, 1, exclude_min=True),
)
LEASES = st.builds(
    messages.Lease,
    incarnation=INCARNATIONS,
    lease_id=COUNTS,
    attempt=COUNTS,
    purpose=PURPOSES,
    environment=NAMES,
    task_index=COUNTS,
    seed=st.integers(0, (1 << 63) - 1),
    group_size=st.integers(1, 4096),
    sampling=SAMPLINGS,
    timeout_s=SECONDS,
)
RUNNING = st.builds(
    messages.RunningLease,
    incarnation=INCARNATIONS,
    lease_id=COUNTS,
    attempt=COUNTS,
    purpose=PURPOSES,
    oldest_version=st.none() | VERSIONS,
)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """A prompt, then a completion under one version or two; some of the completion's tokens may be masked."""
    prompt, completion = draw(st.integers(0, 9)), draw(st.integers(1, 9))
    total = prompt + completion
    mask = np.concatenate(
        [np.zeros(prompt, np.uint8), draw(hnp.arrays(np.uint8, completion, elements=st.integers(0, 1)))]
    )
    logprobs = draw(hnp.arrays(np.float32, total, elements=st.floats(-50, 0, width=32)))
    if draw(st.booleans()):
        logprobs[mask == 0] = 0
    largest = draw(st.sampled_from([(1 << 16) - 1, (1 << 24) - 1, (1 << 31) - 1]))
    cut = draw(st.integers(prompt, total))
    edges = [(prompt, cut), (cut, total)]
    return Trajectory(
        token_ids=draw(hnp.arrays(np.int32, total, elements=st.integers(0, largest))),
        loss_mask=mask,
        behavior_logprobs=logprobs,
        version_spans=tuple(VersionSpan(version=draw(VERSIONS), start=a, end=b) for a, b in edges if a < b),
        turns=(
            Turn(
                start=0,
                completion_start=prompt,
                end=total,
                finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
                generator_ids=draw(st.lists(NAMES, min_size=1, max_size=3).map(tuple)),
                asked_s=draw(st.none() | SECONDS),
                ended_s=draw(st.none() | SECONDS),
            ),
        ),
        reward=draw(REWARDS | REWARD_ERRORS),
        completion_text=draw(st.text(max_size=20)),
    )


GROUPS = st.builds(
    TrajectoryGroup,
    incarnation=INCARNATIONS,
    lease_id=COUNTS,
    attempt=COUNTS,
    purpose=PURPOSES,
    environment=NAMES,
    task_index=COUNTS,
    prompt_text=st.text(max_size=20),
    trajectories=st.lists(trajectories(), min_size=1, max_size=4).map(tuple),
    rollout_s=SECONDS,
    scoring_s=st.none() | st.tuples(SECONDS, SECONDS),
)
ENVIRONMENTS = st.builds(
    messages.EnvironmentInfo, name=NAMES, train_tasks=st.integers(1, 1 << 40), evaluation_tasks=COUNTS
) | st.builds(
    messages.EnvironmentInfo,
    name=NAMES,
    train_tasks=st.just(12),
    evaluation_tasks=COUNTS,
    parts=st.just((messages.TaskPart(places=9, tasks=3), messages.TaskPart(places=3, tasks=3))),
)
GENERATORS = st.builds(messages.ServingGenerator, generator_id=NAMES, url=NAMES, policy_version=VERSIONS)


def rows(elements: st.SearchStrategy[Any], *, min_size: int = 1) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(elements, min_size=min_size, max_size=3).map(tuple)


LOADS = st.builds(
    LoadStatus, over_s=SECONDS, busy_share=st.floats(0, 1), per_s=SECONDS, running=SECONDS, limit=st.none() | COUNTS
)
STATUSES = st.builds(
    Status,
    id=NAMES,
    service=st.sampled_from(("env-service", "reward-service")),
    version=NAMES,
    protocol_version=COUNTS,
    pid=COUNTS,
    host=NAMES,
    uptime_s=SECONDS,
    stopping=st.booleans(),
    waits=st.just(()),
    failures=st.just(()),
    load=st.none() | LOADS,
)
ASKED = st.builds(
    AskedPeer,
    kind=st.just("reward-service"),
    url=NAMES,
    condition=st.sampled_from(("answers", "dead", "hangs", "strange")),
    complaint=NAMES,
    status=st.none() | STATUSES,
    pid=st.none() | COUNTS,
    command=st.text(max_size=20),
    is_stopped=st.booleans(),
)

MESSAGES: dict[str, st.SearchStrategy[messages.Message]] = {
    "hello": st.builds(
        messages.Hello,
        env_id=NAMES,
        capacity=st.integers(1, 1 << 20),
        environments=rows(ENVIRONMENTS),
        tokenizer=st.text(max_size=32),
        chat_template=st.text(max_size=32),
        instance=NAMES,
        run=st.text(max_size=32),
        running=rows(RUNNING, min_size=0),
    ),
    "welcome": st.builds(
        messages.Welcome, run=st.text(max_size=32), incarnation=INCARNATIONS, heartbeat_every_s=SECONDS
    ),
    "refused": st.builds(messages.PeerRefusal, reason=st.text(max_size=20), message=st.text(max_size=20)),
    "granted": st.builds(messages.LeaseGrant, leases=rows(LEASES)),
    "heartbeat": st.builds(messages.Heartbeat, running=rows(RUNNING, min_size=0)),
    "finished": st.builds(messages.FinishedLease, group=GROUPS),
    "failed": st.builds(
        messages.FailedLease,
        incarnation=INCARNATIONS,
        lease_id=COUNTS,
        attempt=COUNTS,
        purpose=PURPOSES,
        data_fault=st.booleans(),
        reason=st.text(max_size=20),
    ),
    "acknowledged": st.builds(
        messages.OutcomeReceipt, incarnation=INCARNATIONS, lease_id=COUNTS, attempt=COUNTS, purpose=PURPOSES
    ),
    "cancelled": st.builds(messages.LeaseCancellation, leases=rows(RUNNING)),
    "fleet": st.builds(messages.Fleet, generators=rows(GENERATORS, min_size=0)),
    "status": st.builds(
        messages.StatusNote, url=st.text(max_size=20), status=STATUSES, rewards=rows(ASKED, min_size=0)
    ),
    "goodbye": st.builds(messages.Goodbye, reason=st.text(max_size=20)),
}


def plain(value: object) -> object:
    """A message's content with arrays as type, length and bytes, so that == compares all of it."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(part) for part in value)
    return value


def as_received(frames: list[Frame]) -> list[Frame]:
    """Fresh memory for each frame, as a socket would deliver it."""
    return [bytes(frame) for frame in frames]


def group_of(message: messages.Message) -> TrajectoryGroup:
    assert isinstance(message, messages.FinishedLease)
    return message.group


def test_there_is_a_strategy_for_every_kind() -> None:
    assert set(MESSAGES) == {message.kind for message in messages.ALL}


@settings(deadline=None)
@given(message=st.one_of(*MESSAGES.values()))
def test_a_message_comes_out_as_it_went_in(message: messages.Message) -> None:
    decoded = decode(as_received(encode(message)))
    assert type(decoded) is type(message)
    assert plain(decoded.model_dump()) == plain(message.model_dump())


@settings(deadline=None, max_examples=30)
@given(group=GROUPS)
def test_a_group_travels_in_few_arrays_however_many_its_trajectories_and_in_no_more_bytes(
    group: TrajectoryGroup,
) -> None:
    _, *arrays, _ = encode(messages.FinishedLease(group=group))
    tokens = sum(len(trajectory.token_ids) for trajectory in group.trajectories)
    assert len(arrays) in (3, 4)
    assert sum(map(len, arrays)) <= 9 * tokens


def test_a_token_of_a_long_completion_takes_six_bytes_or_seven() -> None:
    for largest, expected in ((1 << 16, 6), (1 << 17, 7)):
        token_ids = (np.arange(4000) * 7919 % largest).astype(np.int32)
        group = group_of_one(token_ids=token_ids, sampled_from=10)
        sizes = [len(frame) for frame in encode(messages.FinishedLease(group=group))[1:-1]]
        assert sum(sizes) == expected * 4000 - 40 + 8  # nothing for a prompt's logprobs, and two runs
        assert plain(group_of(decode(encode(messages.FinishedLease(group=group)))).model_dump()) == plain(
            group.model_dump()
        )


def group_of_one(*, token_ids: npt.NDArray[np.int32], sampled_from: int) -> TrajectoryGroup:
    mask = (np.arange(len(token_ids)) >= sampled_from).astype(np.uint8)
    trajectory = Trajectory(
        token_ids=token_ids,
        loss_mask=mask,
        behavior_logprobs=(-0.25 * mask).astype(np.float32) + np.float32(0),
        version_spans=(VersionSpan(version="1.0", start=sampled_from, end=len(token_ids)),),
        turns=(Turn(start=0, completion_start=sampled_from, end=len(token_ids), finish_reason="stop",
                    generator_ids=("g",)),),
        reward=RewardRecord(reward=0.0, verifier="exact_match"),
    )  # fmt: skip
    return TrajectoryGroup(
        incarnation=1, lease_id=0, attempt=0, purpose="train", environment="e", task_index=0, trajectories=(trajectory,)
    )


@settings(deadline=None, max_examples=30)
@given(group=GROUPS)
def test_received_arrays_are_parts_of_one_row_and_cannot_be_written(group: TrajectoryGroup) -> None:
    decoded = group_of(decode(as_received(encode(messages.FinishedLease(group=group)))))
    for name in ROWS:
        first, *others = [getattr(trajectory, name) for trajectory in decoded.trajectories]
        assert not any(array.flags.writeable for array in (first, *others))
        assert all(array.base is not None for array in others)


def on_the_wire(body: dict[str, Any]) -> list[Frame]:
    """The frames of a `finished` message of this body, whatever stands in it."""
    group = dict(body["group"])
    rows = {name: [each[name] for each in group["trajectories"]] for name in ROWS}
    group["trajectories"] = [{k: v for k, v in each.items() if k not in ROWS} for each in group["trajectories"]]
    group["lengths"] = [len(row) for row in rows["token_ids"]]
    arrays = [np.concatenate(row) for row in rows.values()]
    for number, (name, array) in enumerate(zip(rows, arrays, strict=True), start=1):
        group[name] = msgpack.ExtType(1, msgpack.packb([number, code_of(array), len(array)]))
    header = msgpack.packb([PROTOCOL_VERSION, "finished", {**body, "group": group}])
    return sealed([header, *(array.tobytes() for array in arrays)])


SPOILING = st.sampled_from(["nothing", "token", "mask", "logprob", "span", "turn", "starts", "start_mask"])


@settings(deadline=None, max_examples=400)
@given(group=GROUPS, spoiling=SPOILING, which=st.integers(0, 3), at=st.integers(0, 17), to=st.integers(-2, 20))
def test_a_group_is_taken_when_each_of_its_trajectories_would_be_and_refused_with_the_same_words(
    group: TrajectoryGroup, spoiling: str, which: int, at: int, to: int
) -> None:
    body = messages.FinishedLease(group=group).model_dump()
    trajectories = body["group"]["trajectories"]
    spoiled = trajectories[which % len(trajectories)]
    for name in ROWS:
        spoiled[name] = spoiled[name].copy()
    place = at % len(spoiled["token_ids"])
    match spoiling:
        case "token":
            spoiled["token_ids"][place] = to
        case "mask" | "start_mask":
            spoiled["loss_mask"][place if spoiling == "mask" else 0] = abs(to) % 3
        case "logprob":
            spoiled["behavior_logprobs"][place] = [np.nan, np.inf, -np.inf, -3.0][to % 4]
        case "span" if spoiled["version_spans"]:
            spoiled["version_spans"][at % len(spoiled["version_spans"])]["start" if at % 2 else "end"] = to
        case "turn":
            spoiled["turns"][0]["end"] = to
        case "starts":
            spoiled["sequence_starts"] = (at, to)[: 1 + at % 2]
    alone = f"{refusal(lambda: messages.FinishedLease.model_validate(body))}"
    together = refusal(lambda: decode(on_the_wire(body)))
    assert (together is None) == (alone == "None")
    assert together is None or str(together) == f"finished: {alone}"


def refusal(take: Callable[[], object]) -> str | None:
    """Reason of the refusal, None if it is taken."""
    try:
        take()
    except ValidationError as error:
        return describe(error)
    except MalformedMessage as error:
        return str(error)
    return None


@settings(deadline=None, max_examples=30)
@given(trajectory=trajectories())
def test_every_sampled_token_has_a_version_and_no_other_token_has_one(trajectory: Trajectory) -> None:
    versions = trajectory.token_versions()
    assert ((versions >= 0) == (trajectory.loss_mask == 1)).all()
    sampled = versions[versions >= 0]
    assert trajectory.oldest_version == (int(sampled.min()) if sampled.size else None)


@given(group=GROUPS)
def test_the_oldest_version_of_a_group_is_that_of_its_oldest_sampled_token(group: TrajectoryGroup) -> None:
    sampled = [one.token_versions()[one.loss_mask == 1] for one in group.trajectories]
    numbers = np.concatenate(sampled).tolist()
    assert group.oldest_version == (min(numbers) if numbers else None)
    assert [one.oldest_version for one in group.trajectories] == [min(each.tolist(), default=None) for each in sampled]


def test_an_array_that_is_a_slice_with_gaps_is_sent_whole() -> None:
    every_second = np.arange(12, dtype=np.int32)[::2]
    trajectory = Trajectory(
        token_ids=every_second,
        loss_mask=np.zeros(6, dtype=np.uint8),
        behavior_logprobs=np.zeros(6, dtype=np.float32),
        version_spans=(),
        turns=(Turn(start=0, completion_start=6, end=6, finish_reason="abort", generator_ids=("g",)),),
        reward=RewardRecord(reward=0.0, verifier="exact_match"),
    )
    group = TrajectoryGroup(
        incarnation=1, lease_id=0, attempt=0, purpose="train", environment="e", task_index=0, trajectories=(trajectory,)
    )
    decoded = group_of(decode(as_received(encode(messages.FinishedLease(group=group)))))
    assert decoded.trajectories[0].token_ids.tolist() == [0, 2, 4, 6, 8, 10]
