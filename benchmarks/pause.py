"""Parts of the pause in which a generator takes new weights, and what it does beside serving.

    .venv/bin/python -m benchmarks.pause [--workers 1 2] [--layers 12] [--rounds 7]

A real vLLM engine on this machine's CPU holds a random Llama in bfloat16, of one worker or cut in several, and samples
four completions all the time. The learner's side broadcasts new weights over gloo; the engine stages them beside the
old ones, or receives them within the pause (`engine.staging`). Medians of the rounds, by the clock. The table goes to
benchmarks/results/pause.md.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.machine import described_machine
from benchmarks.result_files import print_and_write
from generator.engine.options import EngineOptions, prepare_environment
from learner.weights.process_group import BroadcastGroup, Bucket, Meeting, pack_buckets
from protocol.fleet import JoinGroup, Prepare
from protocol.generation import Sampling
from services.network import LOOPBACK

if TYPE_CHECKING:
    from generator.engine.engine import Engine

RESULT = Path(__file__).with_name("results") / "pause.md"
TIMEOUT_S = 120.0
BUCKET_BYTES = 16 << 20
COMPLETIONS = 4
PARTS = ("receive", "pause", "load", "wait", "rest", "fingerprint")


def config_of(layers: int) -> LlamaConfig:
    """A small Llama."""
    return LlamaConfig(
        vocab_size=8192, hidden_size=768, intermediate_size=2048, num_hidden_layers=layers, num_attention_heads=12,
        num_key_value_heads=4, max_position_embeddings=2048, tie_word_embeddings=False,
    )  # fmt: skip


@asynccontextmanager
async def started(folder: str, *, workers: int, staging: Literal["staging", "none"]) -> "AsyncIterator[Engine]":
    """An engine with random weights."""
    options = EngineOptions(
        model=folder, dtype="bfloat16", max_model_len=2048, kv_cache_gb=0.25, tokenizer=False, load_format="dummy",
        tensor_parallel_size=workers, staging=staging, stall_timeout_s=TIMEOUT_S,
    )  # fmt: skip
    prepare_environment(options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from generator.engine.engine import Engine

        forkserver.set_forkserver_preload(["generator.engine.engine"])
        engine = await Engine.start(options=options)
    try:
        yield engine
    finally:
        await engine.shutdown()


async def joined(engine: "Engine", *, workers: int) -> BroadcastGroup:
    """The learner's end of a group with the engine's workers."""
    meeting = Meeting(host=LOOPBACK, epoch=1, world_size=1 + workers, timeout_s=TIMEOUT_S)
    spec = JoinGroup(
        epoch=1, backend="gloo", host=LOOPBACK, port=meeting.port, rank_offset=1, world_size=1 + workers,
        meet_timeout_s=TIMEOUT_S, bucket_timeout_s=TIMEOUT_S,
    )  # fmt: skip
    group, _ = await asyncio.gather(asyncio.to_thread(lambda: meeting.join(backend="gloo")), engine.join_group(spec))
    return group


@contextmanager
def sampling(engine: "Engine") -> Iterator[None]:
    """Completions run while the body does."""

    async def run(number: int) -> None:
        for again in range(1 << 20):
            async for _ in engine.generate(
                request_id=f"{number}-{again}", prompt_token_ids=(3, 4, 5), n=1, sampling=Sampling(max_tokens=1000)
            ):
                pass

    tasks = [asyncio.ensure_future(run(number)) for number in range(COMPLETIONS)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


async def published(
    engine: "Engine", group: BroadcastGroup, buckets: list[Bucket], *, version: str, staged: bool
) -> dict[str, float]:
    """Seconds of a publish by its parts."""
    plan = Prepare(version=version, epoch=1, buckets=tuple(bucket.spec for bucket in buckets))
    sending = asyncio.to_thread(group.send, buckets, timeout_s=TIMEOUT_S)
    start = time.perf_counter()
    if staged:
        await asyncio.gather(engine.stage(plan), sending)
        receive_s = time.perf_counter() - start
        report = await engine.commit(version=version)
    else:
        receive_s = 0.0
        await engine.stage(plan)
        report, _ = await asyncio.gather(engine.commit(version=version), sending)
    hashing = time.perf_counter()
    await engine.fingerprint(version=version)
    return {
        "receive": receive_s, "pause": report.pause_s, "load": report.load_s - report.wait_s, "wait": report.wait_s,
        "rest": report.pause_s - report.load_s, "fingerprint": time.perf_counter() - hashing,
    }  # fmt: skip


async def row_of(given: argparse.Namespace, *, workers: int, staging: Literal["staging", "none"]) -> str:
    """A row of the table."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(given.layers), dtype=torch.bfloat16)
    tensors = [(name, value.detach().clone()) for name, value in model.state_dict().items()]
    seen: dict[str, list[float]] = {part: [] for part in PARTS}
    with tempfile.TemporaryDirectory() as folder:
        config_of(given.layers).save_pretrained(folder)
        async with started(folder, workers=workers, staging=staging) as engine:
            group = await joined(engine, workers=workers)
            with sampling(engine):
                for number in range(given.rounds + 1):
                    buckets = pack_buckets([(n, v + 0.01 * number) for n, v in tensors], bucket_bytes=BUCKET_BYTES)
                    took = await published(
                        engine, group, buckets, version=f"1.{number + 1}", staged=staging == "staging"
                    )
                    for part, seconds in took.items():
                        if number:
                            seen[part].append(seconds)
            group.close()
    nbytes = sum(value.nbytes for _, value in tensors)
    cells = [f"{1e3 * statistics.median(seen[part]):.0f}" for part in PARTS]
    where = "staged" if staging == "staging" else "within the pause"
    row = f"| {nbytes / 1e6:.0f} MB, {where}, {workers} | {' | '.join(cells)} |"
    print(row, flush=True)
    return row


def main() -> None:
    """Measures, prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    ways: tuple[Literal["staging", "none"], ...] = ("staging", "none")
    rows = [asyncio.run(row_of(given, workers=workers, staging=way)) for workers in given.workers for way in ways]
    lines = [
        "# What a generator pauses for",
        "",
        f"`python -m benchmarks.pause`: ms, medians of {given.rounds} publishes, while {COMPLETIONS} completions are "
        "sampled.",
        "",
        "- `received and verified beside serving`: until all buckets are there, and their XXH3 hashes are those of the "
        "plan.",
        "- `pause`: no token is sampled. Of that: `load` by vLLM into the model; `waits` for buckets that are not "
        "staged, each verified before it is loaded; and `rest`, the step that runs, the calls to the workers, and the "
        "new version's stamp.",
        "- `checksum beside serving`: the hash of what was loaded.",
        "",
        "| weights, where they come, workers | received and verified beside serving | pause | load | waits | rest | "
        "checksum beside serving |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
        f"{described_machine()}.",
        "",
    ]
    print_and_write("\n".join(lines), RESULT)


if __name__ == "__main__":
    main()
