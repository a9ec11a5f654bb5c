"""A real engine on a tiny model, a real sender over gloo, and transformers as the reference."""

import asyncio
import datetime
import socket
import warnings
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
import xxhash

from generator.engine.options import EngineOptions, prepare_environment
from protocol.fleet import BucketSpec, JoinGroup, Prepare, TensorSpec
from protocol.generation import GeneratePart, Sampling
from protocol.trajectories import VersionSpan

if TYPE_CHECKING:
    import torch

    from generator.engine.engine import Engine

BUCKET_LIMIT_BYTES = 200_000
BUCKET_TIMEOUT_S = 10.0
VOCABULARY = ["<pad>", "<s>", "</s>", *"0123456789+-*/= abcdefghijklm"]
PROMPT = (3, 4, 5, 6, 7)


class Policy:
    """A tiny Llama in float32, in the learner's place: it changes, it is sent, and it says what logprobs should be."""

    def __init__(self, *, folder: Path, tied: bool) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.folder = folder
        config = LlamaConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=128,
            intermediate_size=344,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=1024,
            initializer_range=0.08,
            tie_word_embeddings=tied,
            bos_token_id=None,
            eos_token_id=None,
        )
        self._model = LlamaForCausalLM(config)
        self._tied = tied
        self._model.save_pretrained(folder)

    def change(self, *, seed: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.mul_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))

    def snapshot(self) -> "dict[str, torch.Tensor]":
        return {name: tensor.clone() for name, tensor in self._model.state_dict().items()}

    def restore(self, snapshot: "Mapping[str, torch.Tensor]") -> None:
        self._model.load_state_dict(snapshot)

    def tensors(self) -> "dict[str, torch.Tensor]":
        """The tensors that are sent: checkpoint names, without the head if it is tied."""
        return {
            name: tensor
            for name, tensor in self._model.state_dict().items()
            if not (self._tied and name == "lm_head.weight")
        }

    def logprobs(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Of token_ids[1:], each given those before it."""
        import torch

        with torch.no_grad():
            rows = torch.log_softmax(self._model(torch.tensor([token_ids])).logits[0], -1)
        return tuple(rows[i, token].item() for i, token in enumerate(token_ids[1:]))


@dataclass(frozen=True)
class SentBucket:
    spec: BucketSpec
    payload: "torch.Tensor"


def pack(tensors: "Mapping[str, torch.Tensor]") -> list[SentBucket]:
    """Buckets by the rule of generator.weight_plan, a new one whenever the limit is passed."""
    groups: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if groups[-1] and size + tensor.nbytes > BUCKET_LIMIT_BYTES:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += tensor.nbytes
    return [_bucket(group) for group in groups]


def _bucket(group: "Mapping[str, torch.Tensor]") -> SentBucket:
    import torch

    raw = b""
    specs = []
    for name, tensor in group.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        specs.append(TensorSpec(name=name, dtype=dtype, shape=tuple(tensor.shape), offset=len(raw)))
        raw += tensor.detach().contiguous().numpy().tobytes()
        raw += b"\0" * (-len(raw) % 16)
    spec = BucketSpec(tensors=tuple(specs), nbytes=len(raw), xxh3=xxhash.xxh3_64_hexdigest(raw))
    return SentBucket(spec=spec, payload=torch.frombuffer(bytearray(raw), dtype=torch.uint8))


def plan_of(buckets: Sequence[SentBucket], *, version: str) -> Prepare:
    return Prepare(version=version, epoch=1, buckets=tuple(bucket.spec for bucket in buckets))


def group_at(
    port: int, *, epoch: int, meet_timeout_s: float = BUCKET_TIMEOUT_S, bucket_timeout_s: float = BUCKET_TIMEOUT_S
) -> JoinGroup:
    return JoinGroup(
        epoch=epoch, backend="gloo", host="127.0.0.1", port=port, rank_offset=1, world_size=2,
        meet_timeout_s=meet_timeout_s, bucket_timeout_s=bucket_timeout_s,
    )  # fmt: skip


class Sender:
    """Rank 0 of a gloo group of two, with a store of its own on loopback."""

    def __init__(self, *, epoch: int, bucket_timeout_s: float) -> None:
        import torch.distributed as dist

        self._dist: Any = dist
        self.epoch = epoch
        self._bucket_timeout = datetime.timedelta(seconds=bucket_timeout_s)
        listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        self._timeout = datetime.timedelta(seconds=BUCKET_TIMEOUT_S)
        self._store = self._dist.TCPStore(
            "127.0.0.1",
            self.port,
            2,
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._group: Any = None

    def join(self) -> None:
        options = self._dist.ProcessGroupGloo._Options()
        options._timeout = self._timeout
        options._devices = [self._dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        store = self._dist.PrefixStore(f"headway-{self.epoch}", self._store)
        self._group = self._dist.ProcessGroupGloo(store, 0, 2, options)

    def send(self, buckets: Sequence[SentBucket]) -> None:
        for bucket in buckets:
            options = self._dist.BroadcastOptions()
            options.rootRank = 0
            options.rootTensor = 0
            options.timeout = self._bucket_timeout
            self._group.broadcast([bucket.payload], options).wait()


class Rig:
    """An engine, its policy, and the sender of the current group."""

    def __init__(self, *, engine: "Engine", policy: Policy) -> None:
        self.engine = engine
        self.policy = policy
        self.sender: Sender | None = None
        self._epoch = 0
        self._version = 0
        self._requests = 0

    def next_version(self) -> str:
        self._version += 1
        return f"1.{self._version}"

    def next_request(self) -> str:
        self._requests += 1
        return f"request-{self._requests}"

    async def connect(self, *, bucket_timeout_s: float = BUCKET_TIMEOUT_S) -> Sender:
        """Start a new group, whatever became of the last one."""
        self._epoch += 1
        sender = Sender(epoch=self._epoch, bucket_timeout_s=bucket_timeout_s)
        group = group_at(sender.port, epoch=self._epoch, bucket_timeout_s=bucket_timeout_s)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.to_thread(sender.join))
            tasks.create_task(self.engine.join_group(group))
        self.sender = sender
        return sender

    async def stage(self, buckets: Sequence[SentBucket], *, version: str) -> None:
        sender = self.sender or await self.connect()
        sending = asyncio.create_task(asyncio.to_thread(sender.send, buckets))
        try:
            await self.engine.stage(plan_of(buckets, version=version))
        except BaseException:
            self.sender = None
            raise
        finally:
            await asyncio.wait([sending])
        sending.result()

    async def publish(self) -> str:
        """Send the policy as it is, and commit it."""
        version = self.next_version()
        await self.stage(pack(self.policy.tensors()), version=version)
        await self.engine.commit(version=version)
        return version


@dataclass
class CompletionSoFar:
    """The parts of a completion that have come so far."""

    token_ids: tuple[int, ...] = ()
    behavior_logprobs: tuple[float, ...] = ()
    spans: tuple[VersionSpan, ...] = ()
    finish_reason: str | None = None

    def add(self, part: GeneratePart) -> None:
        self.token_ids += part.token_ids
        self.behavior_logprobs += part.behavior_logprobs
        self.spans = part.version_spans
        self.finish_reason = part.finish_reason


Parts = AsyncIterator[GeneratePart]


async def sample(rig: Rig, *, n: int = 4, max_tokens: int = 40, seed: int | None = None) -> list[CompletionSoFar]:
    sampling = Sampling(max_tokens=max_tokens, seed=seed)
    completions = [CompletionSoFar() for _ in range(n)]
    async for parts in rig.engine.generate(
        request_id=rig.next_request(), prompt_token_ids=PROMPT, n=n, sampling=sampling
    ):
        for part in parts:
            completions[part.index].add(part)
    return completions


def largest_gap(rig: Rig, completion: CompletionSoFar, *, start: int = 0, end: int | None = None) -> float:
    """Of the engine's logprobs against the policy's as it is now, over output tokens start to end."""
    expected = rig.policy.logprobs(PROMPT + completion.token_ids)[len(PROMPT) - 1 :]
    pairs = list(zip(expected, completion.behavior_logprobs, strict=True))[start:end]
    return max(abs(theirs - ours) for theirs, ours in pairs)


def options_for(folder: Path) -> EngineOptions:
    return EngineOptions(
        model=str(folder),
        dtype="float32",
        max_model_len=1024,
        kv_cache_gb=0.25,
        tokenizer=False,
    )


async def start_rig(
    *,
    folder: Path,
    tied: bool,
    change: Callable[[EngineOptions], EngineOptions] | None = None,
    policy: Policy | None = None,
) -> Rig:
    options = options_for(folder)
    options = change(options) if change else options
    prepare_environment(options)
    # vLLM warns at import of things that are not ours to change.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from generator.engine.engine import Engine

        # Not this process's own fork: tests have used its OpenMP threads, which no child of it could use again.
        forkserver.set_forkserver_preload(["generator.engine.engine"])
        forkserver.ensure_running()
        policy = policy or Policy(folder=folder, tied=tied)
        engine = await Engine.start(options=options)
    return Rig(engine=engine, policy=policy)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    """A model with tied embeddings; one engine for the session, whatever version a test leaves in it."""
    rig = await start_rig(folder=tmp_path_factory.mktemp("tied"), tied=True)
    yield rig
    await rig.engine.shutdown()
