"""`headway plan`: what a run will need, how fast it will be and what it will cost, before money is spent.

    model, devices, lengths, times ──▶ rates of sampling and training ──▶ splits of the devices, by their bound
                                       the best of them ──▶ the simulator: the real ledger and pacing, in virtual time

Rates come from the devices' numbers and from shares of them that are usually reached (`SHARES`): where a run like the
planned one exists, its measured rates are better. Where all processes of that run shared the cores of one machine, they
do so in the simulator (`headway/shared_machine.py`, `benchmarks/planner.py`). What pacing and `max_lag` make of the
rates is not calculated here: the learner's own code decides it.
"""

import json
import math
import random
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from env_service.config import EnvServiceConfig
from generator.config import EngineConfig
from headway.measured_rates import MeasuredRates, measured_rates, warm
from headway.model_shape import Shape, shape_of
from headway.own_options import own_options
from headway.recorded_texts import GroupTexts, group_texts
from headway.report import read_run
from headway.shared_machine import BEFORE_ENGINE, GROUP_AS_COMPLETIONS, SharedMachine
from learner.training.config import TrainingConfig
from services.config.options import nearest
from services.config.sources import ConfigError

Steps = Sequence[Mapping[str, Any]]
SHARES: Mapping[str, float] = {"bandwidth": 0.6, "sampling": 0.5, "training": 0.35}
"""Of a device's bandwidth and flops: what is usually reached while sampling, and while training."""
_STATE_BYTES = 16
"""Of each parameter in a trainer, beside the weights: float32 gradients, master weights and two moments."""
_FORMER_BYTES = 4
"""Of each parameter of the policy, where consecutive gradients are compared; each rank has the weights whole then."""
_MUON_BYTES, _BESIDE_MUON_BYTES = 12, 16
"""Of each parameter, float32 weights and gradients included: with one mean for those that Muon moves, AdamW's two for
the others. Each rank has all of them, since Muon needs matrices whole.
"""
_MUONS = (
    f"{_MUON_BYTES} bytes for a parameter of layers' matrices and {_BESIDE_MUON_BYTES} for others, all in each rank"
)
_MICROBATCH_TOKENS = 8192
_FORWARDS = 5
"""Forwards' work that a trained token costs: logprobs at the step's start, forward, recomputed, backward twice."""
_RESERVED_GB = 2.0
_USABLE = 0.92
_TOKENS_SIMULATED = 8
_MAX_SIMULATED = 48
_TRIED = 2
_LINK_LATENCY_S = 1e-5
"""Of one all-reduce between the devices of an engine, whatever its size."""
_NETWORK = 400.0
"""Gb/s between the machines of GPUs, where none is given."""
_NETWORK_SHARE = 0.9
_PUBLISH_S = 0.05
"""Of each publish, beside the transfer: pauses, the proof, and the commit's messages."""
_STEPS = 16
_LONGEST_STEP_S = 3.0
_SIMULATED_PUBLISH_S = 0.036
"""Of each publish in the simulator, whatever its weights: looks and messages of the real publisher."""
_LINK_S = 0.0002
"""Of a message between processes, at least."""
_WORDS = (
    "model parameters active layers hidden kv-width vocabulary device memory-gb tflops bandwidth link devices lengths "
    "run prompt groups group-size steps max-lag at-once in-flight environment-s reward-s price generator-devices "
    "network calibrate optimizer sequence-parallel"
)
_FLAGS = ("reference", "critic", "greedy", "alignment", "json")
_OPTIONS: Mapping[str, bool] = {f"--{word}": True for word in _WORDS.split()} | {f"--{word}": False for word in _FLAGS}
_COUNTS: Mapping[str, int] = {
    "--devices": 1, "--prompt": 0, "--groups": 1, "--group-size": 1, "--steps": 1, "--max-lag": 0, "--at-once": 1,
    "--in-flight": 1, "--generator-devices": 1, "--sequence-parallel": 1,
}  # fmt: skip
OPTIMIZERS = ("adamw", "muon")
_AMOUNTS = ("--environment-s", "--reward-s", "--price", "--network")


@dataclass(frozen=True)
class Device:
    """An accelerator, or a core: memory in GB, dense TFLOPS in the dtype that it trains in, GB/s of memory, and GB/s of
    the link to its neighbours, in one direction.
    """

    memory_gb: float
    tflops: float
    bandwidth_gb_s: float
    link_gb_s: float = 32
    number_bytes: int = 2


DEVICES: Mapping[str, Device] = {
    "H100": Device(memory_gb=80, tflops=989, bandwidth_gb_s=3350, link_gb_s=450),
    "H200": Device(memory_gb=141, tflops=989, bandwidth_gb_s=4800, link_gb_s=450),
    "A100": Device(memory_gb=80, tflops=312, bandwidth_gb_s=2039, link_gb_s=300),
    "L40S": Device(memory_gb=48, tflops=362, bandwidth_gb_s=864, link_gb_s=32),
    "CPU": Device(memory_gb=8, tflops=0.05, bandwidth_gb_s=10, link_gb_s=5, number_bytes=4),
}
"""Of the makers' data sheets (SXM, bfloat16 without sparsity); CPU is one core, roughly."""


@dataclass(frozen=True)
class Plan:
    """A plan's question. Times in seconds; lengths in tokens; `price` for a device and an hour; `network` in Gb/s.

    `texts`: those of the run that lengths are of, if it kept them. `reference` and `critic`: there is such a model, of
    the policy's size, beside it on the learner's devices. `greedy`: each group has one more answer, sampled at
    temperature 0 for its reward alone. `alignment`: consecutive gradients are compared.
    """

    shape: Shape
    device: Device
    devices: int
    lengths: tuple[int, ...]
    prompt: int = 256
    groups: int = 32
    group_size: int = 8
    steps: int = 1000
    max_lag: int = 4
    at_once: int = 256
    in_flight: int = 0
    environment_s: float = 0.0
    reward_s: float = 0.05
    price: float = 0.0
    generator_devices: int = 0
    network: float = _NETWORK
    reference: bool = False
    critic: bool = False
    greedy: bool = False
    alignment: bool = False
    optimizer: str = "adamw"
    sequence_parallel: int = 1
    measured: MeasuredRates | None = None
    texts: GroupTexts | None = None

    @property
    def length(self) -> float:
        """Tokens of a completion, on average."""
        return sum(self.lengths) / len(self.lengths)

    @property
    def sampled_size(self) -> int:
        """Completions that are sampled for a group."""
        return self.group_size + self.greedy

    @property
    def kept_share(self) -> float:
        """Share of the sampled tokens that is in trajectories."""
        return self.group_size / self.sampled_size

    @property
    def context(self) -> float:
        """Tokens that a sequence has behind it, on average, while it is sampled."""
        squares = sum(length * length for length in self.lengths)
        return self.prompt + squares / sum(self.lengths) / 2

    @property
    def trained_context(self) -> float:
        """Tokens of the sequence that a trained token is in, on average."""
        whole = [self.prompt + length for length in self.lengths]
        return sum(length * length for length in whole) / sum(whole)


@dataclass(frozen=True)
class DeviceSplit:
    """So many devices for generators of `engine_devices` each, the others for the learner's ranks."""

    generator_devices: int
    learner_devices: int
    engine_devices: int
    generator_gb: float
    learner_gb: float
    token_s: float
    sequence_s: float
    train_s: float
    publish_s: float
    pause_s: float
    at_once: int

    @property
    def engines(self) -> int:
        """Number of generators."""
        return self.generator_devices // self.engine_devices

    @property
    def idle_devices(self) -> int:
        """Number of devices for generators that are left over, too few for one more."""
        return self.generator_devices % self.engine_devices

    def sampling(self, plan: Plan) -> float:
        """Tokens a second of all generators while each has all the sequences that it has room for; those of greedy
        answers are sampled, and not counted.
        """
        step_s = self.token_s + _of_sequence(plan, self.sequence_s) * self.at_once
        return self.engines * self.at_once * plan.kept_share / step_s

    def training(self, plan: Plan) -> float:
        """Sampled tokens a second that the learner can train on."""
        return plan.groups * plan.group_size * plan.length / self.train_s

    def sharing(self, plan: Plan) -> float:
        """Sampled tokens a second for which the cores suffice that all processes share; infinite where none do."""
        machine = plan.measured.machine if plan.measured is not None else None
        if machine is None:
            return math.inf
        at_once = min(self.at_once, (plan.in_flight or self.at_once) * plan.sampled_size / self.engines)
        around_s = machine.of_group(plan.sampled_size) * (machine.before_s + sum(machine.others_s.values()))
        sampled_s = plan.length * (self.token_s / max(1.0, at_once) + _of_sequence(plan, self.sequence_s))
        trained_s = self.train_s / (plan.groups * plan.group_size)
        completion_s = (around_s + sampled_s) / plan.kept_share + trained_s
        return machine.cores * plan.length / completion_s

    def bound(self, plan: Plan) -> float:
        """The slower side's rate, or that of the cores which both share."""
        return min(self.sampling(plan), self.training(plan), self.sharing(plan))


@dataclass(frozen=True)
class Forecast:
    """Of one split. Rates in sampled tokens a second; `share` is of the slower side's rate; lag in policy versions."""

    split: DeviceSplit
    tokens_per_s: float
    share: float
    step_s: float
    lag_mean: float
    lag_p90: int
    lag_max: int
    hours: float
    cost: float


def _of_sequence(plan: Plan, sequence_s: float) -> float:
    """Seconds that a sequence adds to a step, with those of its beginning shared out to its tokens."""
    return sequence_s + (0.0 if plan.measured is None else plan.measured.begin_s) / plan.length


def generator_bytes(plan: Plan, devices: int, at_once: int) -> float:
    """Of one device of an engine: its part of the weights, the ones that are loaded next, and the cache.

    The cache holds what so many sequences take on average, and never less than the longest one.
    """
    return _weights_bytes(plan, devices) + max(at_once * plan.context, _longest(plan)) * kv_bytes(plan) / devices


def sequences_at_once(plan: Plan, devices: int, room: float) -> int:
    """Sequences that an engine has room for, of those that it may sample at once; 0 if not even the longest one fits.

    More than fit on average would be put off and sampled again.
    """
    left = (room - _weights_bytes(plan, devices)) * devices / kv_bytes(plan)
    return 0 if left < _longest(plan) else min(plan.at_once, max(1, int(left / plan.context)))


def _weights_bytes(plan: Plan, devices: int) -> float:
    return 2 * plan.device.number_bytes * plan.shape.parameters / devices + _RESERVED_GB * 1e9


def _longest(plan: Plan) -> int:
    return plan.prompt + max(plan.lengths)


def learner_bytes(plan: Plan, devices: int) -> float:
    """Of one rank: its part of weights and optimizer, and a microbatch's activations (checkpointed) and logits, or its
    part of the longest sequence's; those of a critic as of the policy, and of a reference the weights.
    """
    width = _trained_bytes(plan)
    each = 2 if plan.critic else 1
    whole = devices if _zero_stage(plan) < 3 else 1
    if plan.optimizer == "muon":
        matrices = plan.shape.matrices
        trained = each * (_MUON_BYTES * matrices + _BESIDE_MUON_BYTES * (plan.shape.parameters - matrices))
    else:
        trained = each * (width * whole + _STATE_BYTES) * plan.shape.parameters / devices
    if plan.alignment:
        trained += _FORMER_BYTES * plan.shape.parameters / (1 if plan.optimizer == "muon" else devices)
    shared = trained + (width * whole * plan.shape.parameters if plan.reference else 0) / devices
    tokens = max(_MICROBATCH_TOKENS, math.ceil(_longest(plan) / plan.sequence_parallel))
    own = tokens * 2 * width * plan.shape.layers * plan.shape.hidden
    own += _MICROBATCH_TOKENS * 4 * plan.shape.vocabulary  # however long it is: they are made in chunks
    return shared + own + _RESERVED_GB * 1e9


def _zero_stage(plan: Plan) -> int:
    """The highest stage that the plan's settings can have."""
    return 0 if plan.optimizer == "muon" else 2 if plan.alignment else 3


def _trained_bytes(plan: Plan) -> int:
    """Of a number in the passes of training; Muon takes float32 alone."""
    return 4 if plan.optimizer == "muon" else plan.device.number_bytes


def kv_bytes(plan: Plan) -> float:
    """Of one token in the cache of keys and values."""
    return 2 * plan.shape.layers * plan.shape.kv_width * plan.device.number_bytes


def engine_times(plan: Plan, devices: int, at_once: int) -> tuple[float, float]:
    """Seconds of a token of one engine: what its weights cost, and what each sequence that is sampled at once adds.

    The weights are read once for all sequences (experts that none of them meets are not), each one's cache by itself;
    its arithmetic, attention's included, and its share of the prompts' (which a group has in common) come on top.
    Devices of an engine add up their results twice a layer, which takes a moment, and time for each sequence.
    """
    known = plan.measured
    if known is not None and known.token_s is not None and known.sequence_s is not None:
        return known.token_s, known.sequence_s
    bandwidth = devices * plan.device.bandwidth_gb_s * 1e9 * SHARES["bandwidth"]
    flops = devices * plan.device.tflops * 1e12 * SHARES["sampling"]
    read_s = plan.context * kv_bytes(plan) / bandwidth
    prompt_share = plan.prompt / plan.sampled_size / plan.length
    attention = 4 * plan.shape.layers * plan.shape.hidden * plan.context
    arithmetic_s = (2 * plan.shape.computed * (1 + prompt_share) + attention) / flops
    added_up, sent_s = _added_up(plan, devices)
    weights_s = plan.device.number_bytes * plan.shape.read(at_once) / bandwidth
    return weights_s + added_up, read_s + arithmetic_s + sent_s


def _added_up(plan: Plan, devices: int) -> tuple[float, float]:
    """Seconds of the all-reduces of an engine's step, and of what they send for each sequence."""
    if devices == 1:
        return 0.0, 0.0
    sums = 2 * plan.shape.layers
    sent = sums * plan.shape.hidden * plan.device.number_bytes * 2 * (devices - 1) / devices
    return sums * _LINK_LATENCY_S, sent / (plan.device.link_gb_s * 1e9)


def train_seconds(plan: Plan, devices: int) -> float:
    """Of one step: forward and backward with recomputed activations, and the logprobs at its start; the same of a
    critic, and a forward of a reference.
    """
    sequences = plan.groups * plan.group_size
    tokens = sequences * (plan.prompt + plan.length)
    known = plan.measured
    if known is not None and known.learned is not None:
        texts = plan.texts or known.learned.texts
        learned_s = known.learned.of_step(texts, groups=plan.groups, group_size=plan.group_size)
        return known.step_s + learned_s / devices
    if known is not None and known.train_s is not None:
        measured = tokens if known.prompt is not None else sequences * plan.length
        return known.step_s + measured * known.train_s / devices
    forward = 2 * plan.shape.computed + 2 * plan.shape.layers * plan.shape.hidden * plan.trained_context
    forwards = _FORWARDS * (2 if plan.critic else 1) + (1 if plan.reference else 0)
    computed_s = forwards * forward / (plan.device.tflops * 1e12 * SHARES["training"])
    return tokens * (computed_s + forwards * _exchange_seconds(plan)) / devices


def _exchange_seconds(plan: Plan) -> float:
    """Of a token in one pass between ranks that share rows: queries, keys and values there, and results back."""
    width = 2 * plan.shape.hidden + 2 * plan.shape.kv_width
    sent = plan.shape.layers * width * plan.device.number_bytes * (1 - 1 / plan.sequence_parallel)
    return sent / (plan.device.link_gb_s * 1e9)


def publish_seconds(plan: Plan) -> tuple[float, float]:
    """Of a publish to all generators over the network, and of the pause in which each loads it."""
    known = plan.measured
    if known is not None and known.publish_s is not None and known.pause_s is not None:
        return known.publish_s, known.pause_s
    size = plan.device.number_bytes * plan.shape.parameters
    pause_s = size / (plan.device.bandwidth_gb_s * 1e9 * SHARES["bandwidth"] / 2)  # read and written
    return size / (plan.network * 1e9 / 8 * _NETWORK_SHARE) + pause_s + _PUBLISH_S, pause_s


def splits(plan: Plan) -> list[DeviceSplit]:
    """All that fit into memory, of each width of an engine, the one with the highest bound first. Raises ConfigError
    if none does.
    """
    room = _USABLE * plan.device.memory_gb * 1e9
    most = plan.generator_devices or plan.devices - 1
    sizes = [1 << power for power in range(most.bit_length())]
    fit = {count: found for count in sizes if (found := sequences_at_once(plan, count, room))}
    if not fit:
        least = generator_bytes(plan, sizes[-1], 1) / 1e9
        raise ConfigError([_too_small("a generator", least, plan, "shorter --lengths, or more or larger devices")])
    made = [
        _split(plan, devices, engine, at_once)
        for engine, at_once in fit.items()
        for devices in ([plan.generator_devices] if plan.generator_devices else range(engine, plan.devices, engine))
        if learner_bytes(plan, plan.devices - devices) <= room
        and (plan.devices - devices) % plan.sequence_parallel == 0
    ]
    left = plan.devices - (plan.generator_devices or min(fit))
    if not made and left < plan.sequence_parallel:
        expected = f"expected at most the learner's devices, {left} of --devices {plan.devices}"
        raise ConfigError([f"headway plan: --sequence-parallel: got {plan.sequence_parallel}, {expected}"])
    if not made:
        least = learner_bytes(plan, left) / 1e9
        raise ConfigError([_too_small("the learner", least, plan, "more or larger devices")])
    return sorted(made, key=lambda split: -split.bound(plan))


def _too_small(who: str, needed_gb: float, plan: Plan, remedy: str) -> str:
    have = f"{_USABLE:.0%} of {plan.device.memory_gb:g} GB can be used, with {plan.devices} devices for both"
    return f"{who} does not fit: it needs {needed_gb:.1f} GB on each device, and {have}; take {remedy}"


def _split(plan: Plan, generator_devices: int, engine: int, at_once: int) -> DeviceSplit:
    learner = plan.devices - generator_devices
    token_s, sequence_s = engine_times(plan, engine, at_once)
    publish_s, pause_s = publish_seconds(plan)
    return DeviceSplit(
        generator_devices=generator_devices, learner_devices=learner, engine_devices=engine,
        generator_gb=generator_bytes(plan, engine, at_once) / 1e9, learner_gb=learner_bytes(plan, learner) / 1e9,
        token_s=token_s, sequence_s=sequence_s, train_s=train_seconds(plan, learner), publish_s=publish_s,
        pause_s=pause_s, at_once=at_once,
    )  # fmt: skip


def hastened(plan: Plan, split: DeviceSplit) -> float:
    """Times as fast as everything is simulated: what processes do by the clock in a long step would take long."""
    step_s = plan.groups * plan.group_size * plan.length / split.bound(plan)
    return max(1.0, step_s / _LONGEST_STEP_S)


def rehearsal_of(plan: Plan, split: DeviceSplit) -> dict[str, Any]:
    """The simulator's scenario. One token of it stands for several of a long completion, so that it stays quick. Each
    sequence has its part of the group's greedy answer, if there is one, in the time and the room that it takes.
    """
    faster = hastened(plan, split)
    scale = max(1.0, plan.length / _TOKENS_SIMULATED, max(plan.lengths) / _MAX_SIMULATED)
    dice = random.Random(1)
    lengths = tuple(max(1, int(length / scale + dice.random())) for length in plan.lengths)
    scale = plan.length / (sum(lengths) / len(lengths))
    in_flight = groups_in_flight(plan, split)
    beside_s = split.publish_s - split.pause_s
    return {
        "settings": {
            "generators": split.engines, "steps": min(plan.steps, _STEPS), "groups_per_step": plan.groups,
            "group_size": plan.group_size, "max_lag": plan.max_lag, "capacity": in_flight,
            "max_tokens": _MAX_SIMULATED, "checkpoint_every": 10**6, "straggler_timeout_s": 600.0,
        },
        "train_s": [split.train_s / faster], "lengths": lengths, "token_s": split.token_s * scale / faster,
        "sequence_s": split.sequence_s * scale / faster / plan.kept_share,
        "at_once": max(1, round(split.at_once * plan.kept_share)),
        "begin_s": 0.0 if plan.measured is None else plan.measured.begin_s / faster / plan.kept_share,
        "environment_s": plan.environment_s / faster, "reward_s": plan.reward_s / faster,
        "load_s": split.pause_s / faster, "score_s": max(0.0, beside_s / faster - _SIMULATED_PUBLISH_S),
        "link_s": _LINK_S / faster, **_on_cores(plan, faster),
    }  # fmt: skip


def _on_cores(plan: Plan, faster: float) -> dict[str, Any]:
    machine = plan.measured.machine if plan.measured is not None else None
    if machine is None:
        return {}
    of_group = machine.of_group(plan.sampled_size) / plan.kept_share / faster
    return {
        "cores": machine.cores, "request_s": machine.before_s * of_group,
        "computed_s": {thread: seconds * of_group for thread, seconds in machine.others_s.items()},
    }  # fmt: skip


def rehearsed(rehearsals: Iterable[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
    """The steps of each, as its learner's metrics.jsonl has them. Raises RuntimeError if a run did not go well."""
    text = "".join(json.dumps(one) + "\n" for one in rehearsals)
    command = [sys.executable, "-m", "simulation", "--rehearse"]  # it takes hold of the clock of its process
    ended = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"the simulation ended with {ended.returncode}: {ended.stderr.strip()[-1000:]}")
    return [json.loads(line) for line in ended.stdout.splitlines()]


def seconds(steps: Steps) -> float:
    """Seconds that these steps took."""
    return float(sum(step["wait_s"] + step["train_s"] + step["copy_s"] for step in steps))


def lags(steps: Steps) -> list[int]:
    """Of every trajectory that was trained on, in order."""
    counts = [pair for step in steps for pair in (step.get("lag_counts") or {}).items()]
    return sorted(int(lag) for lag, count in counts for _ in range(count))


def forecast(plan: Plan, split: DeviceSplit, steps: Steps) -> Forecast:
    """The meaning of the simulated steps in the planned run's tokens and hours."""
    kept = warm(steps)
    step_s, found = hastened(plan, split) * seconds(kept) / len(kept), lags(kept)
    rate = plan.groups * plan.group_size * plan.length / step_s
    hours = plan.steps * step_s / 3600
    return Forecast(
        split=split, tokens_per_s=rate, share=rate / split.bound(plan), step_s=step_s,
        lag_mean=sum(found) / len(found), lag_p90=found[int(0.9 * (len(found) - 1))], lag_max=found[-1],
        hours=hours, cost=hours * plan.devices * plan.price,
    )  # fmt: skip


def plan_run(words: Sequence[str]) -> int:
    """Prints the forecast of the best split, and the bounds of the others. Raises ConfigError."""
    own, rest = own_options(words, _OPTIONS)
    if rest:
        guess = nearest(rest[0], tuple(_OPTIONS))
        raise ConfigError([f"headway plan: {rest[0]!r}: {f'did you mean {guess}?' if guess else 'see its --help'}"])
    plan = plan_of({name: values[-1] for name, values in own.items()})
    every = splits(plan)
    try:
        steps = rehearsed(rehearsal_of(plan, split) for split in every[:_TRIED])
    except RuntimeError as error:
        raise ConfigError([f"headway plan: {error}"]) from error
    found = [forecast(plan, split, one) for split, one in zip(every, steps, strict=False)]
    found.sort(key=lambda one: -one.tokens_per_s)
    sys.stdout.write(as_json(plan, found, every) if "--json" in own else as_text(plan, found, every))
    return 0


def plan_of(given: Mapping[str, str]) -> Plan:
    """Raises ConfigError that names what is missing or wrong."""
    wanted: dict[str, Any] = {}
    for name in given.keys() & {*_COUNTS, *_AMOUNTS}:
        value = _number(given, name, _COUNTS.get(name, 0))
        wanted[name.strip("-").replace("-", "_")] = int(value) if name in _COUNTS else value
    if wanted.get("devices", 0) < 2:
        raise ConfigError(
            ["headway plan: --devices: expected 2 or more, of which generators and learner have each some"]
        )
    if wanted.get("generator_devices", 0) >= wanted["devices"]:
        raise ConfigError(["headway plan: --generator-devices: expected fewer than --devices: the learner needs one"])
    device = _device(given)
    on_cores = device.number_bytes == 4
    wanted.setdefault("network", 8 * device.link_gb_s if on_cores else _NETWORK)
    known = measured_rates(Path(given["--calibrate"]), on_cores=on_cores) if "--calibrate" in given else None
    if known is not None and known.prompt is not None:
        wanted.setdefault("prompt", round(known.prompt))
    if known is not None and known.reward_s is not None:
        wanted.setdefault("reward_s", known.reward_s)
    return Plan(
        shape=_shape(given), device=device, lengths=_lengths(given), reference="--reference" in given,
        critic="--critic" in given, greedy="--greedy" in given or (known is not None and known.greedy),
        optimizer=_optimizer(given, known), measured=known,
        alignment="--alignment" in given or (known is not None and known.alignment),
        texts=group_texts(Path(given["--run"])) if "--run" in given else None, **wanted,
    )  # fmt: skip


def _optimizer(given: Mapping[str, str], known: MeasuredRates | None) -> str:
    optimizer = given.get("--optimizer", "adamw" if known is None else known.optimizer)
    if optimizer not in OPTIMIZERS:
        raise ConfigError([f"headway plan: --optimizer: got {optimizer!r}, expected {' or '.join(OPTIMIZERS)}"])
    return optimizer


def _number(given: Mapping[str, str], flag: str, least: float) -> float:
    try:
        value = float(given[flag])
    except KeyError:
        raise ConfigError([f"headway plan: {flag} is missing, and --model names no folder that says it"]) from None
    except ValueError:
        value = math.nan
    if not least <= value < math.inf:
        raise ConfigError([f"headway plan: {flag}: got {given[flag]!r}, expected a number of at least {least:g}"])
    return value


def _shape(given: Mapping[str, str]) -> Shape:
    if "--model" in given:
        return shape_of(Path(given["--model"]))
    flags = ("--parameters", "--layers", "--hidden", "--kv-width", "--vocabulary")
    parameters, *rest = (_number(given, flag, 1) for flag in flags)
    if "--active" not in given:
        return Shape(parameters, *map(int, rest))
    active = _number(given, "--active", 1)
    if active > parameters:
        raise ConfigError([f"headway plan: --active: got {active:g}, expected at most --parameters {parameters:g}"])
    return replace(Shape(parameters, *map(int, rest)), active=active, met=active / parameters)


def _device(given: Mapping[str, str]) -> Device:
    kind = given.get("--device")
    if kind is not None and kind not in DEVICES:
        names = ", ".join(DEVICES)
        expected = f"expected one of {names}, or --memory-gb, --tflops and --bandwidth (GB/s)"
        raise ConfigError([f"headway plan: --device: got {kind!r}, {expected}"])
    known = DEVICES[kind] if kind is not None else None
    own = {"memory_gb": "--memory-gb", "tflops": "--tflops", "bandwidth_gb_s": "--bandwidth", "link_gb_s": "--link"}
    values = {} if known is None else asdict(known)
    for name, flag in own.items():
        if flag in given or (known is None and flag != "--link"):
            values[name] = _number(given, flag, 1e-6)
    return Device(**values)


def _lengths(given: Mapping[str, str]) -> tuple[int, ...]:
    if ("--run" in given) == ("--lengths" in given):
        raise ConfigError(["headway plan: expected one of --lengths 200,400,800 (each as likely) and --run FOLDER"])
    if "--run" in given:
        return lengths_of(Path(given["--run"]))
    try:
        found = tuple(int(word) for word in given["--lengths"].split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise ConfigError([f"headway plan: --lengths: got {given['--lengths']!r}, expected tokens such as 200,400,800"])
    return found


def lengths_of(folder: Path) -> tuple[int, ...]:
    """Of the completions in a run's samples.jsonl, or the mean of its steps. Raises ConfigError if it has neither."""
    run = read_run(folder)
    found = [
        int(one["tokens"]) for sample in run.samples for one in sample.get("completions") or () if one.get("tokens")
    ]
    found = found or [max(1, round(step["length_mean"])) for step in run.steps if step.get("length_mean")]
    if not found:
        raise ConfigError([f"{folder} has neither samples nor steps with lengths: give --lengths"])
    return tuple(found[:: max(1, len(found) // 1000)])


def as_json(plan: Plan, found: Sequence[Forecast], every: Sequence[DeviceSplit]) -> str:
    """All of it."""
    told = {
        "plan": {**asdict(plan), "lengths": {"mean": plan.length, "max": max(plan.lengths)}},
        "best": asdict(found[0]),
        "tried": [asdict(one) for one in found],
        "bounds": [{**asdict(split), "tokens_per_s": split.bound(plan)} for split in every],
        "assumed": assumed(plan, found[0].split),
    }
    return json.dumps(told, indent=2) + "\n"


def as_text(plan: Plan, found: Sequence[Forecast], every: Sequence[DeviceSplit]) -> str:
    """For people."""
    best = found[0]
    split = best.split
    shared = plan.measured is not None and plan.measured.machine is not None
    ideal = "the least of these rates" if shared else "the slower side's rate"
    idle = f", {split.idle_devices} of them idle," if split.idle_devices else ""
    rows = [
        ("best split", f"{split.generator_devices} devices{idle} for {split.engines} generators of "
                       f"{split.engine_devices}, {split.learner_devices} for the learner"),
        ("memory", f"{split.generator_gb:.1f} GB on a generator's device, with {split.at_once} sequences at once; "
                   f"{split.learner_gb:.1f} GB on a learner's"),
        ("sampling alone", f"{split.sampling(plan):,.0f} tokens/s"),
        ("training alone", f"{split.training(plan):,.0f} tokens/s ({split.train_s:.3g} s a step)"),
        *([("cores", f"enough for {split.sharing(plan):,.0f} tokens/s, shared by all processes")] if shared else []),
        ("a publish", f"{split.publish_s:.3g} s, of which generators pause for {split.pause_s:.3g} s"),
        ("both at once", f"{best.tokens_per_s:,.0f} tokens/s ({best.step_s:.3g} s a step)"),
        ("share of ideal", f"{best.share:.0%} of {ideal}"),
        ("lag", f"mean {best.lag_mean:.2f}, p90 {best.lag_p90}, max {best.lag_max} of at most {plan.max_lag}"),
        ("duration", f"{best.hours:.2f} hours for {plan.steps} steps"),
        ("cost", f"{best.cost:,.2f}" if plan.price else "give --price for a device and an hour"),
    ]  # fmt: skip
    lines = [f"{name:<15}  {value}" for name, value in rows]
    others = [
        f"  {one.generator_devices} ({one.engines} of {one.engine_devices}"
        f"{f', {one.idle_devices} idle' if one.idle_devices else ''}) + {one.learner_devices}: at most "
        f"{one.bound(plan):,.0f} tokens/s (sampling {one.sampling(plan):,.0f}, training {one.training(plan):,.0f})"
        for one in every
    ]
    told = [f"  {line}" for line in assumed(plan, split)]
    return "\n".join([*lines, "", "generators + learner, by their bound:", *others[:8], "",
                      f"Assumed (the best {len(found)} were simulated):", *told, ""])  # fmt: skip


def assumed(plan: Plan, split: DeviceSplit) -> list[str]:
    """Everything that was not given, measured or simulated."""
    machine = plan.measured.machine if plan.measured is not None else None
    own = _MUONS if plan.optimizer == "muon" else f"{_STATE_BYTES} bytes of state for a parameter, sharded"
    if plan.alignment:
        own += f", and of the former gradient {_FORMER_BYTES} more; the weights are whole in each rank"
    beside = [name for name, is_there in (("a reference", plan.reference), ("a critic", plan.critic)) if is_there]
    idle = (
        f"of --generator-devices {split.generator_devices} there is nothing to do for {split.idle_devices}, since "
        f"each generator takes {split.engine_devices}: give a multiple of {split.engine_devices}"
    )
    greedy = (
        f"a group's greedy answer is as long as the others: 1 in {plan.sampled_size} of the sampled tokens is not "
        "trained on, nor counted in tokens/s"
    )
    return [
        *([idle] if split.idle_devices else []),
        *([greedy] if plan.greedy else []),
        *_assumed_rates(plan),
        *([] if machine is None else [_assumed_of(machine)]),
        *_assumed_of_texts(plan),
        f"beside the policy the learner has {' and '.join(beside) or 'neither a reference nor a critic'}",
        f"a trainer keeps {own}, and has microbatches of {_MICROBATCH_TOKENS} tokens{_sharing_of_rows(plan)}",
        f"{_USABLE:.0%} of a device's memory can be used, of which {_RESERVED_GB:g} GB are reserved",
        f"sequences take {plan.context:,.0f} tokens of cache on average, {split.at_once} at once on an engine",
        *_to_set(plan, split),
        f"a step of the environment takes {plan.environment_s:g} s, a reward {plan.reward_s:.3g} s",
        "no guard lowers max_lag; no evaluations, checkpoints or restarts"
        + ("; sides do not share a machine" if machine is None else ""),
    ]


def groups_in_flight(plan: Plan, split: DeviceSplit) -> int:
    """As planned, or as many groups as fill the generators."""
    return plan.in_flight or max(1, math.ceil(split.engines * split.at_once / plan.sampled_size))


def _to_set(plan: Plan, split: DeviceSplit) -> list[str]:
    """Names the settings of which the plan has another value than a run whose file does not set them."""
    dtypes = {2: "bfloat16", 4: "float32"}
    planned: list[tuple[type[BaseModel], str, str, int | bool | str]] = [
        (EngineConfig, "generator.engine.", "max_num_seqs", split.at_once),
        (EnvServiceConfig, "env-service.", "capacity", groups_in_flight(plan, split)),
        (TrainingConfig, "learner.training.", "dtype", dtypes[_trained_bytes(plan)]),
        (TrainingConfig, "learner.training.", "zero_stage", _zero_stage(plan) if split.learner_devices > 1 else 0),
        (TrainingConfig, "learner.training.", "microbatch_tokens", _MICROBATCH_TOKENS),
        (TrainingConfig, "learner.training.", "gradient_checkpointing", True),
    ]
    if plan.measured is None:
        planned.append((TrainingConfig, "learner.training.", "publish_dtype", dtypes[plan.device.number_bytes]))
    told = [
        f"{table}{key} = {json.dumps(value)} ({json.dumps(usual)})"
        for model, table, key, value in planned
        if (usual := model.model_fields[key].default) != value
    ]
    return [f"the run file sets what was planned, and not the default in brackets: {', '.join(told)}"] if told else []


def _sharing_of_rows(plan: Plan) -> str:
    return f", of which {plan.sequence_parallel} ranks share each" if plan.sequence_parallel > 1 else ""


def _assumed_rates(plan: Plan) -> list[str]:
    known, device = plan.measured, plan.device
    lines = []
    if known is None or known.token_s is None:
        lines += [
            f"sampling reaches {SHARES['bandwidth']:.0%} of {device.bandwidth_gb_s:g} GB/s and "
            f"{SHARES['sampling']:.0%} of {device.tflops:g} TFLOPS of a device",
            f"an all-reduce within an engine takes {1e6 * _LINK_LATENCY_S:g} us and its bytes at {device.link_gb_s:g} "
            "GB/s, twice a layer",
        ]
    else:
        lines.append(f"a generator samples as fast as one of {known.run}, whatever the number of its devices")
    if known is None or known.train_s is None:
        lines.append(
            f"training reaches {SHARES['training']:.0%} of the TFLOPS, and a token costs {_FORWARDS} forwards, "
            "attention's included, whatever the number of ranks"
        )
    if known is None or known.publish_s is None:
        lines.append(
            f"a publish gets {_NETWORK_SHARE:.0%} of {plan.network:g} Gb/s, to all generators at once, and takes "
            f"{_PUBLISH_S:g} s beside"
        )
    if known is not None:
        lines.append(f"otherwise rates are those of {known.run}: the same model, devices and settings of training")
    return lines


def _assumed_of(machine: SharedMachine) -> str:
    before = f"{BEFORE_ENGINE:.0%} of a generator's work is before its engine, and " * (not machine.engine_is_told)
    return (
        f"all processes share {machine.cores:.3g} cores, and others use as many as beside the run; {before}outside of "
        f"model and engine a group costs as much as {GROUP_AS_COMPLETIONS:g} completions, whatever their length"
    )


def _assumed_of_texts(plan: Plan) -> list[str]:
    """The terms by which sampling and training on shared cores are taken apart, if the run told them."""
    known, lines = plan.measured, list[str]()
    if known is not None and known.begin_s > 0:
        lines.append(
            f"a sequence that begins takes {1e3 * known.begin_s:.2g} ms of its engine, with a prompt as long as those "
            f"of {known.run}"
        )
    if known is not None and known.learned is not None:
        texts = plan.texts or known.learned.texts
        size = "as recorded" if texts.size == plan.group_size else f"from groups of {texts.size}"
        lines.append(
            f"a step has {known.learned.passes:.3g} passes, each over {texts.tokens_of(plan.group_size):.3g} tokens "
            f"of a group, and {texts.alike_of(plan.group_size):.0%} of the groups have equal rewards and are not "
            f"trained on: {size}, each doubling of a group changing both alike"
        )
    return lines
