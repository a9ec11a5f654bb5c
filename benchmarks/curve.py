"""Cost of encryption, and of each message's checksum: groups over a socket on loopback, plain and with CURVE.

    .venv/bin/python -m benchmarks.curve [--pairs N] [--seconds S]

Plain and CURVE take turns. A round sends one group after another from a DEALER to a ROUTER in one process, 8 at once;
times are CPU seconds of this process (both sides, ZeroMQ's threads included), which other load disturbs little.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from protocol.codec import decode, encode, sealed
from protocol.messages import FinishedLease
from protocol.trajectories import RewardRecord, Trajectory, TrajectoryGroup, Turn, VersionSpan
from services.secret_files import write_public
from services.zmq.keys import AuthorizedKeys, ClientKeys, CurveKeys, ServerKeys
from services.zmq.sockets import DealerSocket, RouterSocket

_IN_FLIGHT = 8
_SHAPES = ((8, 6, 4), (8, 100, 200), (8, 300, 1000), (16, 500, 4000))


@dataclass(frozen=True)
class CurveCost:
    """CPU microseconds of one group: everything with and without keys, and of that the checksums of both sides."""

    plain: float
    curve: float
    ratios: tuple[float, ...]
    checksums: float


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=0.5, help="of CPU in one round, about")
    arguments = parser.parse_args()
    print(
        "| group | KiB | plain, CPU us | CURVE, CPU us | CURVE/plain, median (quartiles) | checksum, share of plain |"
    )
    print("|---|---|---|---|---|---|")
    for count, prompt, completion in _SHAPES:
        message = _group(count, prompt=prompt, completion=completion)
        cost = asyncio.run(_measure(message, pairs=arguments.pairs, seconds=arguments.seconds))
        low, median, high = statistics.quantiles(cost.ratios, n=4)
        size = sum(map(len, encode(message))) / 1024
        print(
            f"| {count} x ({prompt} + {completion}) | {size:.0f} | {cost.plain:.0f} | {cost.curve:.0f} | "
            f"{median:.2f} ({low:.2f}-{high:.2f}) | {cost.checksums / cost.plain:.2%} |"
        )


async def _measure(message: FinishedLease, *, pairs: int, seconds: float) -> CurveCost:
    with tempfile.TemporaryDirectory() as folder:
        own = CurveKeys.new()
        write_public(Path(folder) / "env.pub", own.public)
        server = ServerKeys(own=CurveKeys.new(), authorized=AuthorizedKeys(Path(folder)))
        client = ClientKeys(own=own, server=server.own.public)
        first = await _round(message, 200, None, None)
        groups = max(_IN_FLIGHT, int(seconds * 1e6 / first))
        plain, curve = [], []
        for _ in range(pairs):
            plain.append(await _round(message, groups, None, None))
            curve.append(await _round(message, groups, server, client))
    ratios = tuple(with_keys / without for with_keys, without in zip(curve, plain, strict=True))
    return CurveCost(statistics.median(plain), statistics.median(curve), ratios, _checksums(message))


async def _round(message: FinishedLease, groups: int, server: ServerKeys | None, client: ClientKeys | None) -> float:
    """CPU microseconds of one group."""
    async with (
        RouterSocket.bind("tcp://127.0.0.1:*", keys=server) as router,
        DealerSocket.connect(router.address, identity="env", keys=client) as dealer,
    ):
        await dealer.send(message)
        await router.receive()
        began = time.process_time()
        for _ in range(0, groups, _IN_FLIGHT):
            for _ in range(_IN_FLIGHT):
                await dealer.send(message)
            for _ in range(_IN_FLIGHT):
                await router.receive()
        return (time.process_time() - began) / (-(-groups // _IN_FLIGHT) * _IN_FLIGHT) * 1e6


def _checksums(message: FinishedLease) -> float:
    """CPU microseconds of sealing a group and of checking it."""
    *frames, _ = encode(message)
    decode(sealed(frames))
    return 2 * min(_timed(lambda: sealed(frames), 200) for _ in range(5))


def _timed(action: Callable[[], object], count: int) -> float:
    began = time.process_time()
    for _ in range(count):
        action()
    return (time.process_time() - began) / count * 1e6


def _group(count: int, *, prompt: int, completion: int) -> FinishedLease:
    length = prompt + completion
    sampled = np.arange(length) >= prompt
    trajectories = tuple(
        Trajectory(
            token_ids=np.arange(length, dtype=np.int32),
            loss_mask=sampled.astype(np.uint8),
            behavior_logprobs=np.where(sampled, -1.0, 0.0).astype(np.float32),
            version_spans=(VersionSpan(version="1.7", start=prompt, end=length),),
            turns=(
                Turn(
                    start=0, completion_start=prompt, end=length, finish_reason="stop", generator_ids=("generator-0",)
                ),
            ),
            reward=RewardRecord(reward=0.5, components={"answer": 1.0}, verifier="math", latency_s=0.2),
            completion_text="word" * completion,
        )
        for _ in range(count)
    )
    group = TrajectoryGroup(
        incarnation=1,
        lease_id=1,
        attempt=1,
        purpose="train",
        environment="addition",
        task_index=1,
        trajectories=trajectories,
    )
    return FinishedLease(group=group)


if __name__ == "__main__":
    main()
