"""`headway plan`: what a run will need, how fast it will be and what it will cost, before money is spent.

    model, devices, lengths, times ──▶ rates of sampling and training ──▶ splits of the devices, by their bound
                                       the best of them ──▶ the simulator: the real ledger and pacing, in virtual time

Rates come from the devices' numbers and from shares of them that are usually reached (`SHARES`): where a run like the
planned one exists, its measured rates are better (`benchmarks/planner.py`). What pacing and `max_lag` make of the rates
is not calculated here: the learner's own code decides it.
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

from headway.model_shape import Shape, shape_of
from headway.own_options import own_options
from headway.report import read_run
from services.config.options import nearest
from services.config.sources import ConfigError

Steps = Sequence[Mapping[str, Any]]
SHARES: Mapping[str, float] = {"bandwidth": 0.6, "sampling": 0.5, "training": 0.35}
"""Of a device's bandwidth and flops: what is usually reached while sampling, and while training."""
_STATE_BYTES = 16
"""Of each parameter in a trainer, beside the weights: float32 gradients, master weights and two moments."""
_MICROBATCH_TOKENS = 8192
_RESERVED_GB = 2.0
_USABLE = 0.92
_TOKENS_SIMULATED = 8
_MAX_SIMULATED = 48
_TRIED = 2
_STEPS = 16
_WORDS = (
    "model parameters active layers hidden kv-width vocabulary device memory-gb tflops bandwidth devices lengths run "
    "prompt groups group-size steps max-lag at-once in-flight environment-s reward-s price generator-devices json"
)
_OPTIONS: Mapping[str, bool] = {f"--{word}": word != "json" for word in _WORDS.split()}
_COUNTS: Mapping[str, int] = {
    "--devices": 1, "--prompt": 0, "--groups": 1, "--group-size": 1, "--steps": 1, "--max-lag": 0, "--at-once": 1,
    "--in-flight": 1, "--generator-devices": 1,
}  # fmt: skip
_AMOUNTS = ("--environment-s", "--reward-s", "--price")


@dataclass(frozen=True)
class Device:
    """An accelerator, or a core: memory in GB, dense TFLOPS in the dtype that it trains in, GB/s of memory."""

    memory_gb: float
    tflops: float
    bandwidth_gb_s: float
    number_bytes: int = 2


DEVICES: Mapping[str, Device] = {
    "H100": Device(memory_gb=80, tflops=989, bandwidth_gb_s=3350),
    "H200": Device(memory_gb=141, tflops=989, bandwidth_gb_s=4800),
    "A100": Device(memory_gb=80, tflops=312, bandwidth_gb_s=2039),
    "L40S": Device(memory_gb=48, tflops=362, bandwidth_gb_s=864),
    "CPU": Device(memory_gb=8, tflops=0.05, bandwidth_gb_s=10, number_bytes=4),
}
"""Of the makers' data sheets (SXM, bfloat16 without sparsity); CPU is one core, roughly."""


@dataclass(frozen=True)
class Plan:
    """A plan's question. Times in seconds; lengths in tokens; `price` for a device and an hour."""

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

    @property
    def length(self) -> float:
        """Tokens of a completion, on average."""
        return sum(self.lengths) / len(self.lengths)

    @property
    def context(self) -> float:
        """Tokens that a sequence has behind it, on average, while it is sampled."""
        squares = sum(length * length for length in self.lengths)
        return self.prompt + squares / sum(self.lengths) / 2


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

    @property
    def engines(self) -> int:
        """Number of generators."""
        return self.generator_devices // self.engine_devices

    def sampling(self, plan: Plan) -> float:
        """Tokens a second of all generators while each has all the sequences that it takes at once."""
        return self.engines * plan.at_once / (self.token_s + self.sequence_s * plan.at_once)

    def training(self, plan: Plan) -> float:
        """Sampled tokens a second that the learner can train on."""
        return plan.groups * plan.group_size * plan.length / self.train_s

    def bound(self, plan: Plan) -> float:
        """The slower side's rate."""
        return min(self.sampling(plan), self.training(plan))


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


def generator_bytes(plan: Plan, devices: int) -> float:
    """Of one device of an engine: its part of the weights, the ones that are loaded next, and the cache."""
    width = plan.device.number_bytes
    cache = plan.at_once * (plan.prompt + max(plan.lengths)) * kv_bytes(plan)
    return (2 * width * plan.shape.parameters + cache) / devices + _RESERVED_GB * 1e9


def learner_bytes(plan: Plan, devices: int) -> float:
    """Of one rank: its part of weights and optimizer, and a microbatch's activations (checkpointed) and logits."""
    width = plan.device.number_bytes
    shared = (width + _STATE_BYTES) * plan.shape.parameters / devices
    tokens = max(_MICROBATCH_TOKENS, plan.prompt + max(plan.lengths))
    own = tokens * (2 * width * plan.shape.layers * plan.shape.hidden + 4 * plan.shape.vocabulary)
    return shared + own + _RESERVED_GB * 1e9


def kv_bytes(plan: Plan) -> float:
    """Of one token in the cache of keys and values."""
    return 2 * plan.shape.layers * plan.shape.kv_width * plan.device.number_bytes


def engine_times(plan: Plan, devices: int) -> tuple[float, float]:
    """Seconds of a token of one engine: what its weights cost, and what each sequence that is sampled at once adds.

    The weights are read once for all sequences (experts that none of them meets are not), each one's cache by itself;
    its arithmetic and its share of the prompts' (which a group has in common) come on top.
    """
    bandwidth = devices * plan.device.bandwidth_gb_s * 1e9 * SHARES["bandwidth"]
    flops = devices * plan.device.tflops * 1e12 * SHARES["sampling"]
    read_s = plan.context * kv_bytes(plan) / bandwidth
    prompt_share = plan.prompt / plan.group_size / plan.length
    arithmetic_s = 2 * plan.shape.computed * (1 + prompt_share) / flops
    return plan.device.number_bytes * plan.shape.read(plan.at_once) / bandwidth, read_s + arithmetic_s


def train_seconds(plan: Plan, devices: int) -> float:
    """Of one step: forward and backward with recomputed activations, and the logprobs at its start."""
    tokens = plan.groups * plan.group_size * (plan.prompt + plan.length)
    per_token = (2 + 6 + 2) * plan.shape.computed
    return tokens * per_token / (devices * plan.device.tflops * 1e12 * SHARES["training"])


def splits(plan: Plan) -> list[DeviceSplit]:
    """All that fit into memory, the one with the highest bound first. Raises ConfigError if none does."""
    room = _USABLE * plan.device.memory_gb * 1e9
    sizes = [1 << power for power in range(plan.devices.bit_length()) if 1 << power < plan.devices]
    fit = [count for count in sizes if generator_bytes(plan, count) <= room]
    if not fit:
        least = generator_bytes(plan, sizes[-1]) / 1e9
        raise ConfigError([_too_small("a generator", least, plan, "fewer sequences by --at-once, shorter --lengths")])
    engine = fit[0]
    wanted = [plan.generator_devices] if plan.generator_devices else range(engine, plan.devices, engine)
    usable = [one for one in wanted if one >= engine and learner_bytes(plan, plan.devices - one) <= room]
    if not usable:
        least = learner_bytes(plan, max(1, plan.devices - engine)) / 1e9
        raise ConfigError([_too_small("the learner", least, plan, "more or larger devices")])
    found = [_split(plan, one, engine) for one in usable]
    return sorted(found, key=lambda split: -split.bound(plan))


def _too_small(who: str, needed_gb: float, plan: Plan, remedy: str) -> str:
    have = f"{_USABLE:.0%} of {plan.device.memory_gb:g} GB can be used, with {plan.devices} devices for both"
    return f"{who} does not fit: it needs {needed_gb:.1f} GB on each device, and {have}; take {remedy}"


def _split(plan: Plan, generator_devices: int, engine: int) -> DeviceSplit:
    learner = plan.devices - generator_devices
    token_s, sequence_s = engine_times(plan, engine)
    return DeviceSplit(
        generator_devices=generator_devices, learner_devices=learner, engine_devices=engine,
        generator_gb=generator_bytes(plan, engine) / 1e9, learner_gb=learner_bytes(plan, learner) / 1e9,
        token_s=token_s, sequence_s=sequence_s, train_s=train_seconds(plan, learner),
        publish_s=plan.device.number_bytes * plan.shape.parameters / (plan.device.bandwidth_gb_s * 1e9 * 0.3) + 0.05,
    )  # fmt: skip


def rehearsal_of(plan: Plan, split: DeviceSplit) -> dict[str, Any]:
    """The simulator's scenario. One token of it stands for several of a long completion, so that it stays quick."""
    scale = max(1.0, plan.length / _TOKENS_SIMULATED, max(plan.lengths) / _MAX_SIMULATED)
    dice = random.Random(1)
    lengths = tuple(max(1, int(length / scale + dice.random())) for length in plan.lengths)
    scale = plan.length / (sum(lengths) / len(lengths))
    in_flight = plan.in_flight or max(1, math.ceil(split.engines * plan.at_once / plan.group_size))
    return {
        "settings": {
            "generators": split.engines, "steps": min(plan.steps, _STEPS), "groups_per_step": plan.groups,
            "group_size": plan.group_size, "max_lag": plan.max_lag, "capacity": in_flight,
            "max_tokens": _MAX_SIMULATED, "checkpoint_every": 10**6, "straggler_timeout_s": 600.0,
        },
        "train_s": [split.train_s], "lengths": lengths, "token_s": split.token_s * scale,
        "sequence_s": split.sequence_s * scale, "at_once": plan.at_once, "environment_s": plan.environment_s,
        "reward_s": plan.reward_s, "load_s": split.publish_s,
    }  # fmt: skip


def rehearsed(rehearsals: Iterable[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
    """The steps of each, as its learner's metrics.jsonl has them. Raises RuntimeError if a run did not go well."""
    text = "".join(json.dumps(one) + "\n" for one in rehearsals)
    command = [sys.executable, "-m", "simulation", "--rehearse"]  # it takes hold of the clock of its process
    ended = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"the simulation ended with {ended.returncode}: {ended.stderr.strip()[-1000:]}")
    return [json.loads(line) for line in ended.stdout.splitlines()]


def warm(steps: Steps) -> Steps:
    """The steps after the first quarter, in which nothing was ahead of the learner yet."""
    return steps[len(steps) // 4 :]


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
    step_s, found = seconds(kept) / len(kept), lags(kept)
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
    return Plan(shape=_shape(given), device=_device(given), lengths=_lengths(given), **wanted)


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
    own = {"memory_gb": "--memory-gb", "tflops": "--tflops", "bandwidth_gb_s": "--bandwidth"}
    values = {} if known is None else asdict(known)
    for name, flag in own.items():
        if flag in given or known is None:
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
    }
    return json.dumps(told, indent=2) + "\n"


def as_text(plan: Plan, found: Sequence[Forecast], every: Sequence[DeviceSplit]) -> str:
    """For people."""
    best = found[0]
    split = best.split
    rows = [
        ("best split", f"{split.generator_devices} devices for {split.engines} generators of {split.engine_devices}, "
                       f"{split.learner_devices} for the learner"),
        ("memory", f"{split.generator_gb:.1f} GB on a generator's device, {split.learner_gb:.1f} GB on a learner's"),
        ("sampling alone", f"{split.sampling(plan):,.0f} tokens/s"),
        ("training alone", f"{split.training(plan):,.0f} tokens/s ({split.train_s:.3g} s a step)"),
        ("both at once", f"{best.tokens_per_s:,.0f} tokens/s ({best.step_s:.3g} s a step)"),
        ("share of ideal", f"{best.share:.0%} of the slower side's rate"),
        ("lag", f"mean {best.lag_mean:.2f}, p90 {best.lag_p90}, max {best.lag_max} of at most {plan.max_lag}"),
        ("duration", f"{best.hours:.2f} hours for {plan.steps} steps"),
        ("cost", f"{best.cost:,.2f}" if plan.price else "give --price for a device and an hour"),
    ]  # fmt: skip
    lines = [f"{name:<15}  {value}" for name, value in rows]
    others = [
        f"  {one.generator_devices} + {one.learner_devices}: at most {one.bound(plan):,.0f} tokens/s "
        f"(sampling {one.sampling(plan):,.0f}, training {one.training(plan):,.0f})"
        for one in every
    ]
    shares = ", ".join(f"{share:.0%} of {name}" for name, share in SHARES.items()) + "; no guard lowers max_lag"
    return "\n".join([*lines, "", "generators + learner, by their bound:", *others[:8], "",
                      f"Assumed: {shares}. The best {len(found)} were simulated.", ""])  # fmt: skip
