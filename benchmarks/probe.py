"""Errors of the probe: real engines of vLLM on a CPU against the real learner's logprobs.

    .venv/bin/python -m benchmarks.probe --model {addition|smollm2} --dtype {float32|bfloat16} [--versions N]

For each model and type the learner trains some versions on what the engine samples (GRPO; what it is rewarded for does
not matter). At each version, as at a publish, the learner says its logprobs of texts of the batch before, under these
weights and under those before; then the engine loads the right weights, those one and ten versions old, the right ones
with one tensor of another layer, and the right ones rounded to eight bits, and is asked for its own. The verdicts are
those of `learner.weights.proofs`: alone after one publish, alone after five in a row, and beside two right generators
of its kind. A table is appended to benchmarks/results/probe.md.
"""

import argparse
import asyncio
import contextlib
import io
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from examples.addition.make_model import CHARACTERS, make_tokenizer
from examples.addition.make_model import make_model as make_addition
from examples.smollm2.make_model import make_model as make_smollm2
from generator.engine.options import EngineOptions, prepare_environment
from learner.algorithms.presets.grpo import GrpoConfig
from learner.training.batch import sequences_of
from learner.training.config import OptimizerConfig, TrainingConfig
from learner.training.ranks import Ranks, close_process_group, open_process_group
from learner.training.trainer import Trainer
from learner.weights.fleet import FleetMember
from learner.weights.probe import Probe, ProbeGap, Texts, texts_of
from learner.weights.process_group import pack_buckets
from learner.weights.proofs import Proof, Proofs
from learner.weights.provenance import Provenance
from learner.weights.published import PackedWeights
from protocol.fleet import Announcement, CommitResult, Fingerprints, Prepare
from protocol.generation import Sampling
from protocol.model import PolicyVersion
from protocol.trajectories import RewardRecord, Trajectory, TrajectoryGroup, Turn, VersionSpan

if TYPE_CHECKING:
    from generator.engine.engine import Engine

Dtype = Literal["float32", "bfloat16"]
KINDS = ("right", "one version old", "ten versions old", "one tensor wrong", "rounded to 8 bits")
RESULTS = Path(__file__).with_name("results") / "probe.md"
OLD_RULE = {"float32": 1e-3, "bfloat16": 1.5}
"""Of the largest gap over the 32 first tokens, which was the rule before."""
IN_A_ROW = 5
OLDEST = 10
TOKENS = 256

Tensors = Mapping[str, torch.Tensor]
HEAD = """# The probe's error rates

How often weights were taken for wrong, by their logprobs alone (checksums are compared besides, and catch what was not
loaded, or is not what like generators loaded). In the row "right" each is a false alarm. A probe is {tokens} tokens of
recent batches, judged by the mean and a high quantile of the gap, against like generators, and by whether the version
before fits better; the rule before was the largest gap of 32 tokens against a bound. Made by
`python -m benchmarks.probe`.

"""


@dataclass(frozen=True)
class Subject:
    """A model, how it is trained, and what it is asked."""

    name: str
    make: Callable[[Path], object]
    learning_rate: float
    max_tokens: int
    prompts: Callable[[PreTrainedTokenizerBase, np.random.Generator], list[list[int]]]
    probes: int
    """Of different texts at each version."""


def _additions(tokenizer: PreTrainedTokenizerBase, random: np.random.Generator) -> list[list[int]]:
    pairs = random.integers(0, 100, (32, 2))
    return [tokenizer.encode(f"{a:02d}+{b:02d}=", add_special_tokens=False) for a, b in pairs]


def _questions(tokenizer: PreTrainedTokenizerBase, random: np.random.Generator) -> list[list[int]]:
    things = random.choice(["apples", "rivers", "kings", "trains", "winter", "chess", "copper", "bread"], 4)
    texts = [f"Write a sentence about {thing} and the number {random.integers(100)}." for thing in things]
    chats = [[{"role": "user", "content": text}] for text in texts]
    return [list(tokenizer.apply_chat_template(c, add_generation_prompt=True)["input_ids"]) for c in chats]


def _write_addition(folder: Path) -> None:
    tokenizer = make_tokenizer(CHARACTERS)
    tokenizer.save_pretrained(folder)
    make_addition(tokenizer, seed=0).save_pretrained(folder)


SUBJECTS = {
    "addition": Subject("addition, 0.6M", _write_addition, 5e-4, 5, _additions, 6),
    "smollm2": Subject("SmolLM2-135M", make_smollm2, 2e-6, 24, _questions, 2),
}


@dataclass
class Verdicts:
    """For one kind of weights: of each trial whether it was caught, by each way of judging."""

    gaps: list[float] = field(default_factory=list)
    before: list[bool] = field(default_factory=list)
    alone: list[bool] = field(default_factory=list)
    in_a_row: list[bool] = field(default_factory=list)
    beside: list[bool] = field(default_factory=list)

    def row(self, kind: str) -> str:
        columns = (_share(caught) for caught in (self.before, self.alone, self.in_a_row, self.beside))
        return f"| {kind} | {np.median(self.gaps):.2g} | {' | '.join(columns)} |"


def _share(caught: Sequence[bool]) -> str:
    return f"{sum(caught)} of {len(caught)}"


class ProbeRig:
    """An engine and a learner of one model."""

    def __init__(self, *, engine: "Engine", trainer: Trainer, folder: Path, subject: Subject, model: Path) -> None:
        self._engine = engine
        self._trainer = trainer
        self._folder = folder
        self._subject = subject
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._random = np.random.default_rng(0)
        self._loads = 0
        self.probes = subject.probes

    def weights(self) -> Tensors:
        return {tensor.name: tensor.value for tensor in self._trainer.host_copy().tensors}

    def says(self, texts: Texts) -> tuple[float, ...]:
        """The learner's logprobs."""
        return tuple(self._trainer.probe_logprobs(texts))

    async def load(self, weights: Tensors) -> None:
        self._loads += 1
        buckets = pack_buckets(list(weights.items()), bucket_bytes=64 << 20)
        paths = []
        for number, bucket in enumerate(buckets):
            path = self._folder / f"{number}.bucket"
            await asyncio.to_thread(path.write_bytes, bucket.data.numpy().tobytes())
            paths.append(str(path))
        version = f"1.{self._loads}"
        plan = Prepare(version=version, epoch=0, buckets=tuple(bucket.spec for bucket in buckets))
        await self._engine.stage_files(plan, paths=paths)
        await self._engine.commit(version=version)

    async def scored(self, texts: Texts) -> NDArray[np.float64]:
        """The engine's logprobs."""
        name = f"score-{self._random.integers(1 << 40)}"
        answers = await asyncio.gather(
            *(self._engine.score(request_id=f"{name}-{n}", token_ids=text) for n, text in enumerate(texts))
        )
        return np.array([logprob for answer in answers for logprob in answer.logprobs])

    async def sampled(self, *, version: int) -> list[TrajectoryGroup]:
        """A batch of groups; their rewards are drawn at random, which moves the policy as other rewards would."""
        prompts = self._subject.prompts(self._tokenizer, self._random)
        return list(await asyncio.gather(*(self._group(n, p, version=version) for n, p in enumerate(prompts))))

    async def _group(self, number: int, prompt: list[int], *, version: int) -> TrajectoryGroup:
        sampling = Sampling(max_tokens=self._subject.max_tokens)
        tokens: list[list[int]] = [[] for _ in range(8)]
        logprobs: list[list[float]] = [[] for _ in range(8)]
        name = f"sample-{version}-{number}"
        async for parts in self._engine.generate(request_id=name, prompt_token_ids=prompt, n=8, sampling=sampling):
            for part in parts:
                tokens[part.index] += part.token_ids
                logprobs[part.index] += part.behavior_logprobs
        rewards = self._random.permutation(8) % 2
        return TrajectoryGroup(
            incarnation=1, lease_id=number, attempt=0, purpose="train", environment="e", task_index=number,
            trajectories=tuple(
                _trajectory(prompt, sampled, behavior, reward=float(reward), version=version)
                for sampled, behavior, reward in zip(tokens, logprobs, rewards, strict=True)
            ),
        )  # fmt: skip

    def train(self, groups: Sequence[TrajectoryGroup], *, version: int) -> None:
        sequences = sequences_of(groups, version=version, max_lag=0, preset=self._trainer.preset)
        self._trainer.train_step(sequences, version=version)


def _trajectory(
    prompt: list[int], tokens: list[int], logprobs: list[float], *, reward: float, version: int
) -> Trajectory:
    start, end = len(prompt), len(prompt) + len(tokens)
    return Trajectory(
        token_ids=np.array([*prompt, *tokens], dtype=np.int32),
        loss_mask=np.array([0] * start + [1] * len(tokens), dtype=np.uint8),
        behavior_logprobs=np.array([0.0] * start + logprobs, dtype=np.float32),
        version_spans=(VersionSpan(version=f"1.{version}", start=start, end=end),),
        turns=(Turn(start=0, completion_start=start, end=end, finish_reason="length", generator_ids=("g",)),),
        reward=RewardRecord(verifier="random", reward=reward),
    )


def spoiled(weights: Tensors, random: np.random.Generator) -> Tensors:
    """The weights with one matrix in the place of another layer's, as a wrong mapping of names would have it."""
    names = [name for name in weights if ".layers.0." in name and name.endswith("proj.weight")]
    first = names[random.integers(len(names))]
    layers = [name for name in weights if name.partition(".layers.")[2].partition(".")[2] == first.partition(".0.")[2]]
    wrong, other = random.choice(layers, 2, replace=False)
    return {**weights, wrong: weights[other]}


def rounded(weights: Tensors) -> Tensors:
    """Each row of each matrix to 255 steps."""
    return {name: _rounded(tensor) if tensor.dim() == 2 else tensor for name, tensor in weights.items()}


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    scale = tensor.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-8) / 127
    return ((tensor.float() / scale).round() * scale).to(tensor.dtype)


async def measure(rig: ProbeRig, *, dtype: Dtype, versions: int) -> dict[str, Verdicts]:
    """Trains, and judges each version from the tenth on."""
    verdicts = {kind: Verdicts() for kind in KINDS}
    rows: dict[tuple[str, int], Proofs] = {}
    caught: dict[tuple[str, int], bool] = {}
    history: list[Tensors] = [rig.weights()]
    texts: list[Texts] = []
    before: list[tuple[float, ...]] = []
    random = np.random.default_rng(1)
    for version in range(1, OLDEST + versions + 1):
        groups = await rig.sampled(version=version - 1)
        rig.train(groups, version=version - 1)
        history = [*history[-OLDEST:], rig.weights()]
        if version > OLDEST:
            probes = [Probe(t, rig.says(t), b) for t, b in zip(texts, before, strict=True)]
            served = {
                "right": history[-1], "one version old": history[-2], "ten versions old": history[0],
                "one tensor wrong": spoiled(history[-1], random), "rounded to 8 bits": rounded(history[-1]),
            }  # fmt: skip
            await _judge(rig, probes, served, version=version, dtype=dtype, verdicts=verdicts, rows=rows, caught=caught)
            if (version - OLDEST) % IN_A_ROW == 0:
                for (kind, _), was_caught in caught.items():
                    verdicts[kind].in_a_row.append(was_caught)
                rows.clear()
                caught.clear()
        await rig.load(history[-1])
        parts = [groups[n :: rig.probes] for n in range(rig.probes)]
        texts = [texts_of(part, tokens=TOKENS) for part in parts]
        before = [rig.says(text) for text in texts]
        print(f"version {version}", flush=True)
    return verdicts


async def _judge(
    rig: ProbeRig, probes: Sequence[Probe], served: Mapping[str, Tensors], *, version: int, dtype: Dtype,
    verdicts: Mapping[str, Verdicts], rows: dict[tuple[str, int], Proofs], caught: dict[tuple[str, int], bool],
) -> None:  # fmt: skip
    right: list[list[NDArray[np.float64]]] = []
    for kind, weights in served.items():
        await rig.load(weights)
        answers = [await rig.scored(probe.texts) for probe in probes]
        if kind == "right":
            again = [await rig.scored(probe.texts) for probe in reversed(probes)][::-1]
            right = [list(pair) for pair in zip(answers, again, strict=True)]
        for number, (probe, theirs) in enumerate(zip(probes, answers, strict=True)):
            of_kind, key = verdicts[kind], (kind, number)
            off = np.abs(theirs - np.array(probe.logprobs))
            of_kind.gaps.append(float(off.mean()))
            of_kind.before.append(bool(off[:31].max() > OLD_RULE[dtype]))
            packed = _packed(version, probe)
            of_kind.alone.append(_faulty(_proofs(dtype), packed, dtype, theirs))
            proofs = rows.setdefault(key, _proofs(dtype))
            caught[key] = _faulty(proofs, packed, dtype, theirs) or caught.get(key, False)
            fresh = _proofs(dtype)
            of_kind.beside.append(_faulty(fresh, packed, dtype, theirs, *right[number]))


def _proofs(dtype: Dtype) -> Proofs:
    return Proofs(probe_tolerance=None, dtype=dtype, provenance=Provenance())


def _packed(version: int, probe: Probe) -> PackedWeights:
    return PackedWeights(version=PolicyVersion(1, version), buckets=(), digest="", probe=probe)


def _faulty(proofs: Proofs, packed: PackedWeights, dtype: Dtype, *answers: NDArray[np.float64]) -> bool:
    """True if the first of these generators is found to be wrong by its logprobs alone: all checksums are equal."""
    made = [_proof(f"g{number}", answer, packed, dtype) for number, answer in enumerate(answers)]
    verdict = proofs.judge(made, packed)
    return "g0" in {member.generator_id for member in (*verdict.outliers, *verdict.doubted)}


def _proof(name: str, answer: NDArray[np.float64], packed: PackedWeights, dtype: Dtype) -> Proof:
    announcement = Announcement(
        generator_id=name, url="http://127.0.0.1", protocol_version=1, backend="gloo", max_model_len=4096, dtype=dtype,
        fingerprints=Fingerprints(model="", tokenizer="", chat_template=""), serving_version=None,
    )  # fmt: skip
    said = tuple(map(float, answer))
    committed = CommitResult(version=str(packed.version), fingerprint="", probe_logprobs=said, load_s=0, pause_s=0)
    member = FleetMember(announcement=announcement, last_seen=0.0)
    return Proof(member=member, answer=committed, gap=ProbeGap.of(packed.probe, said))


@asynccontextmanager
async def _rig(subject: Subject, dtype: Dtype, folder: Path) -> AsyncIterator[ProbeRig]:
    model = folder / "model"
    with contextlib.redirect_stdout(io.StringIO()):
        subject.make(model)
    options = EngineOptions(
        model=str(model), dtype=dtype, max_model_len=128, max_num_seqs=128, kv_cache_gb=0.5, threads=2, tokenizer=False
    )
    prepare_environment(options)
    from generator.engine.engine import Engine  # vllm reads the environment when it is imported

    engine = await Engine.start(options=options)
    try:
        with _trainer(subject, model, dtype) as trainer:
            rig = ProbeRig(engine=engine, trainer=trainer, folder=folder, subject=subject, model=model)
            await rig.load(rig.weights())
            yield rig
    finally:
        await engine.shutdown()


@contextmanager
def _trainer(subject: Subject, model: Path, dtype: Dtype) -> Iterator[Trainer]:
    ranks = Ranks(rank=0, count=1)
    commands = open_process_group(ranks, timeout_s=60.0)
    optimizer = OptimizerConfig(learning_rate=subject.learning_rate, warmup_updates=0)
    config = TrainingConfig(dtype=dtype, publish_dtype=dtype, microbatch_tokens=2048, optimizer=optimizer)
    trainer = Trainer(model, algorithm=GrpoConfig(), config=config, ranks=ranks, commands=commands)
    try:
        yield trainer
    finally:
        close_process_group()


def report(name: str, dtype: str, verdicts: Mapping[str, Verdicts]) -> str:
    """A table of one model and type."""
    head = (
        f"## {name}, {dtype}\n\n| weights | mean gap, nats (median) | rule before | alone, one publish | "
        f"alone, {IN_A_ROW} in a row | beside two right ones |\n|---|---|---|---|---|---|\n"
    )
    return head + "\n".join(verdict.row(kind) for kind, verdict in verdicts.items()) + "\n"


async def main() -> None:
    """Measures what the command line names, and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SUBJECTS), required=True)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], required=True)
    parser.add_argument("--versions", type=int, default=10)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    subject = SUBJECTS[arguments.model]
    with tempfile.TemporaryDirectory() as folder:
        async with _rig(subject, arguments.dtype, Path(folder)) as rig:
            verdicts = await measure(rig, dtype=arguments.dtype, versions=arguments.versions)
    table = report(subject.name, arguments.dtype, verdicts)
    print(table)
    written = arguments.output.read_text(encoding="utf-8") if arguments.output.exists() else HEAD.format(tokens=TOKENS)
    arguments.output.write_text(f"{written.rstrip()}\n\n{table}", encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(main())
