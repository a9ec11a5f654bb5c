"""The bytes of one message of each kind, as they were when the kind came into the protocol.

`golden/<kind>.hex` holds a frame per line. A test that fails here means that older peers can no longer read us: either
undo the change, or raise `PROTOCOL_VERSION` and write the vectors anew. `golden/stored/` has groups as former versions
wrote them, which stand in journals.
"""

from pathlib import Path

import numpy as np
import pytest

from protocol import messages
from protocol.codec import WrongProtocolVersion, decode, encode, sealed
from protocol.generation import Sampling
from protocol.status import AskedPeer, FailureStatus, LoadStatus, Status, WaitingItems, WaitStatus
from protocol.trajectories import RewardRecord, Trajectory, TrajectoryGroup, Turn, VersionSpan

GOLDEN = Path(__file__).parent / "golden"


def trajectory(*, mixed: bool) -> Trajectory:
    spans = [
        VersionSpan(version="1.6", start=3, end=4, instance="5891b5b522d5df08"),
        VersionSpan(version="1.7", start=4, end=6, instance="6b51d431df5d7f14"),
    ]
    failed = RewardRecord(verifier="math", error_kind="infrastructure", error="the worker died", attempts=3)
    scored = RewardRecord(
        reward=0.5,
        components={"format": 1.0, "answer": 0.0},
        verifier="math",
        verifier_version="2",
        service_id="rewards-0",
        endpoint="http://127.0.0.1:7320",
        latency_s=0.25,
    )
    return Trajectory(
        token_ids=np.array([5, 6, 7, 260, 70000, 2], dtype=np.int32),
        loss_mask=np.array([0, 0, 0, 1, 1, 1], dtype=np.uint8),
        behavior_logprobs=np.array([0, 0, 0, -0.5, -1.25, -0.0625], dtype=np.float32),
        version_spans=tuple(spans) if mixed else (VersionSpan(version="1.7", start=3, end=6),),
        turns=(
            Turn(
                start=0, completion_start=3, end=6, finish_reason="stop", generator_ids=("generator-0", "generator-1")
            ),
        ),
        reward=scored if mixed else failed,
        completion_text="085 ✓",
    )


GROUP = TrajectoryGroup(
    incarnation=2,
    lease_id=70000,
    attempt=1,
    purpose="train",
    environment="addition",
    task_index=4711,
    prompt_text="37+48=",
    trajectories=(trajectory(mixed=True), trajectory(mixed=False)),
    rollout_s=1.5,
)
LEASE = messages.Lease(
    incarnation=1,
    lease_id=3,
    attempt=0,
    purpose="evaluate",
    environment="addition",
    task_index=12,
    seed=(1 << 63) - 1,
    group_size=8,
    sampling=Sampling(max_tokens=48, stop_token_ids=(2, 0), seed=17, temperature=0.75),
    timeout_s=60.0,
)
RUNNING = messages.RunningLease(
    incarnation=1, lease_id=1 << 40, attempt=2, purpose="train", oldest_version="1.42", waits_for="rewards"
)
WAITING = messages.RunningLease(incarnation=2, lease_id=9, attempt=0, purpose="evaluate")

STATUS = Status(
    id="env-0",
    service="env-service",
    version="0.5.0",
    protocol_version=6,
    pid=4711,
    host="here",
    uptime_s=12.5,
    stopping=False,
    waits=(WaitStatus(whom="the reward service at http://127.0.0.1:7320", since_s=4.5, blocks_readiness=True),),
    failures=(FailureStatus(text="no answer", age_s=1.5),),
    load=LoadStatus(
        over_s=15.0,
        busy_share=0.5,
        per_s=2.0,
        running=1.5,
        limit=64,
        waits=(WaitingItems(whom="rewards", running=1.0),),
    ),
)

EXAMPLES: dict[str, messages.Message] = {
    "hello": messages.Hello(
        env_id="env-0",
        instance="9f86d081884c7d65",
        capacity=64,
        environments=(messages.EnvironmentInfo(name="addition", train_tasks=8000, evaluation_tasks=2000),),
        tokenizer="0123456789abcdef0123456789abcdef",
        chat_template="",
        run="60303ae22b998861",
        running=(RUNNING, WAITING),
    ),
    "welcome": messages.Welcome(run="60303ae22b998861", incarnation=1, heartbeat_every_s=0.5),
    "refused": messages.PeerRefusal(reason="malformed", message="loss_mask has 5 entries for 6 tokens"),
    "granted": messages.LeaseGrant(leases=(LEASE,)),
    "heartbeat": messages.Heartbeat(running=(RUNNING, WAITING)),
    "finished": messages.FinishedLease(group=GROUP),
    "failed": messages.FailedLease(
        incarnation=1,
        lease_id=3,
        attempt=0,
        purpose="train",
        data_fault=True,
        reason="the task's answer is not a number",
    ),
    "status": messages.StatusNote(
        url="http://127.0.0.1:7330",
        status=STATUS,
        rewards=(AskedPeer(kind="reward-service", url="http://127.0.0.1:7320", condition="dead", complaint="gone"),),
    ),
    "acknowledged": messages.OutcomeReceipt(incarnation=1, lease_id=3, attempt=0, purpose="train"),
    "cancelled": messages.LeaseCancellation(leases=(RUNNING,)),
    "fleet": messages.Fleet(
        generators=(
            messages.ServingGenerator(
                generator_id="generator-0", url="http://127.0.0.1:8101", policy_version="999999999.0"
            ),
        )
    ),
    "goodbye": messages.Goodbye(reason="SIGTERM"),
}


def frames_of(kind: str) -> list[bytes]:
    return [bytes.fromhex(line) for line in (GOLDEN / f"{kind}.hex").read_text(encoding="ascii").splitlines()]


def test_every_kind_of_message_has_an_example_and_a_vector() -> None:
    kinds = {message.kind for message in messages.ALL}
    assert set(EXAMPLES) == kinds
    assert {file.stem for file in GOLDEN.glob("*.hex")} == kinds


@pytest.mark.parametrize("kind", EXAMPLES)
def test_a_message_is_encoded_to_its_golden_bytes(kind: str) -> None:
    assert [bytes(frame).hex() for frame in encode(EXAMPLES[kind])] == [frame.hex() for frame in frames_of(kind)]


@pytest.mark.parametrize("kind", EXAMPLES)
def test_golden_bytes_are_decoded_to_their_message(kind: str) -> None:
    decoded = decode(frames_of(kind))
    assert type(decoded) is type(EXAMPLES[kind])
    # repr shows every field, arrays included; == on arrays has no single truth value.
    assert repr(decoded) == repr(EXAMPLES[kind])


@pytest.mark.parametrize("version", [4, 5, 6])
def test_a_group_that_a_former_version_stored_is_read_and_one_that_it_sends_is_not(version: int) -> None:
    lines = (GOLDEN / f"stored/finished-{version}.hex").read_text("ascii").splitlines()
    frames = [bytes.fromhex(line) for line in lines]
    assert repr(decode(frames, stored=True)) == repr(EXAMPLES["finished"])
    with pytest.raises(WrongProtocolVersion, match=f"the peer speaks protocol version {version}, this process 7"):
        decode(frames)


def test_a_group_of_a_version_that_is_not_read_any_more_is_named() -> None:
    header, *rest = frames_of("finished")
    with pytest.raises(WrongProtocolVersion, match="speaks protocol version 3; this one reads 4 to 7"):
        decode(sealed([header.replace(b"\x93\x07", b"\x93\x03", 1), *rest[:-1]]), stored=True)


def test_a_decoded_group_knows_the_versions_of_its_tokens() -> None:
    decoded = decode(frames_of("finished"))
    assert isinstance(decoded, messages.FinishedLease)
    assert decoded.group.trajectories[0].token_versions().tolist() == [-1, -1, -1, 6, 7, 7]
    assert decoded.group.oldest_version == 6
