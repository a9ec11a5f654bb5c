"""The runs that the benchmark of the algorithms makes, with their settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

STEPS = 300
LEARNING_RATE = 5e-4
WARMUP_UPDATES = 5
HELD_OUT_TASKS = 2000
CRITIC = {"training.critic.optimizer.learning-rate": 1e-3, "training.critic.warmup-steps": 10}
_COMPARED = ("grpo", "dapo", "rloo", "ppo")
_UNGUARDED = {"guard.enabled": "false"}
_CORRECTIONS: Mapping[str, Mapping[str, object]] = {
    "two-sided": {"algo.correction-floor": 0.5},
    "geometric": {"algo.correction": "geometric"},
    "whole product": {"algo.correction": "sequence"},
    "self-normalised": {"algo.self-normalise": "true"},
    "token window": {"algo.correction": "none", "algo.token-window": "[0.5, 5.0]"},
    "sequence window": {"algo.sequence-window": "[0.5, 2.0]"},
    "veto": {"algo.token-veto": 1e-4},
    "divergence mask": {"algo.divergence-limit": 0.1},
    "interpolated": {"algo.proximal": "interpolate"},
    "behavior as anchor": {"algo.proximal": "behavior"},
    "gac stale": {"algo.correction": "none", "training.alignment.mode": "control"},
    "corrected gac": {"training.alignment.mode": "control"},
}
"""Settings beside the default correction, or in its place; all of grpo."""
_OTHER_LOSSES: Mapping[str, Mapping[str, object]] = {
    "gspo": {},
    "gmpo": {},
    "sapo": {},
    "cispo": {},
    "dppo": {},
    "rloo": {"algo.policy-loss": "sequence_clip"},
}


@dataclass(frozen=True, kw_only=True)
class AlgorithmRun:
    """A learner's run. `variant` names what it shares with its other seeds and lags; `extra` are options besides."""

    variant: str
    algo: str
    steps: int = STEPS
    max_lag: int = 4
    seed: int = 0
    updates_per_step: int = 1
    learning_rate: float = LEARNING_RATE
    extra: Mapping[str, object] = field(default_factory=dict)
    table: Literal["presets", "staleness"] = "presets"

    @property
    def name(self) -> str:
        """Of its folder and its row."""
        return f"{self.variant.replace(' ', '_')}-lag{self.max_lag}-seed{self.seed}"

    @property
    def has_teacher(self) -> bool:
        """True if it learns from a model that another run left."""
        return self.algo == "opd"

    @property
    def settings(self) -> str:
        """Settings other than lag, seed and steps, for the report."""
        updates = "" if self.updates_per_step == 1 else f"{self.updates_per_step} updates a step, "
        extra = "".join(f", `{key} = {value}`" for key, value in self.extra.items())
        return f"{updates}learning rate {self.learning_rate:g}{extra}"

    @property
    def options(self) -> dict[str, object]:
        """The learner's command line."""
        updates = self.steps * self.updates_per_step
        return {
            "algo": self.algo,
            "steps": self.steps,
            "max-lag": self.max_lag,
            "seed": self.seed,
            "rollouts.seed": self.seed,
            "training.updates-per-step": self.updates_per_step,
            "training.optimizer.learning-rate": self.learning_rate,
            "training.optimizer.total-updates": updates,
            "training.optimizer.warmup-updates": min(WARMUP_UPDATES, updates),
            "evaluation.tasks": 0,
            "evaluation.final-tasks": HELD_OUT_TASKS,
            **self.extra,
        }

    def of_steps(self, steps: int) -> "AlgorithmRun":
        """The same with another number of steps."""
        return replace(self, steps=steps)


def _preset(
    algo: str,
    *,
    variant: str | None = None,
    steps: int = STEPS,
    learning_rate: float = LEARNING_RATE,
    extra: Mapping[str, object] | None = None,
) -> AlgorithmRun:
    return AlgorithmRun(variant=variant or algo, algo=algo, steps=steps, learning_rate=learning_rate, extra=extra or {})


_ONE_EACH = (
    _preset("grpo"),
    _preset("dr_grpo", extra={"algo.constant-length": 5}),
    _preset("dapo", steps=240),
    _preset("gspo"),
    _preset("gmpo"),
    _preset("sapo"),
    _preset("cispo"),
    _preset("topr"),
    _preset("kimi"),
    _preset("dppo"),
    _preset("reinforce"),
    _preset("rloo"),
    _preset("rloo", variant="rloo_kl", extra={"algo.kl-coefficient": 0.01}),
    _preset("rloo", variant="rloo_clip", extra={"algo.policy-loss": "sequence_clip"}),
    _preset("reinforce_pp"),
    _preset("ppo", steps=260, extra=CRITIC),
    _preset("ppo", variant="ppo_head", steps=260, extra={**CRITIC, "training.critic.kind": "head"}),
    _preset("max_rl"),
    _preset("gigpo"),
    _preset("grpo", variant="grpo again"),  # from the start that the next ones have
    _preset("hgpo"),
    _preset("clip_cov"),
    _preset("kl_cov"),
    _preset("pass_at_k"),
    _preset("luspo"),
    _preset("dro"),
    _preset("vespo"),
    _preset("vcpo"),
    _preset("opo"),
    _preset("otb"),
    _preset("remax"),
    _preset("gvpo"),
    _preset("online_dpo", steps=240, learning_rate=2e-4),
    _preset("best_of_k"),
    _preset("opd"),
)
_OF_THEM = [run for run in _ONE_EACH if run.variant in _COMPARED]
PRESETS: tuple[AlgorithmRun, ...] = (
    *_ONE_EACH,
    *(replace(run, max_lag=0) for run in _OF_THEM),
    *(replace(run, max_lag=lag, seed=seed) for seed in (1, 2) for lag in (4, 0) for run in _OF_THEM),
)

_STALE = AlgorithmRun(
    variant="corrected",
    algo="grpo",
    max_lag=8,
    updates_per_step=4,
    extra={**_UNGUARDED, "lag.pacing": "full"},
    table="staleness",
)
_UNCORRECTED = replace(_STALE, variant="uncorrected", extra={**_STALE.extra, "algo.correction": "none"})
_SYNCHRONOUS = replace(_STALE, variant="synchronous", max_lag=0, updates_per_step=1, extra=_UNGUARDED)
_NEW = (
    *(replace(_STALE, variant=name, extra={**_STALE.extra, **extra}) for name, extra in _CORRECTIONS.items()),
    *(replace(_STALE, variant=f"{algo} stale", algo=algo, extra={**_STALE.extra, **extra})
      for algo, extra in _OTHER_LOSSES.items()),
)  # fmt: skip
STALENESS: tuple[AlgorithmRun, ...] = (
    *(replace(run, seed=seed) for seed in range(5) for run in (_STALE, _UNCORRECTED, _SYNCHRONOUS)),
    *_NEW,
    *(replace(run, seed=1) for run in _NEW[:4]),
)
"""More seeds of the corrections and the other losses are in `benchmarks.exact_lag`, where they cost a tenth."""


def teacher_run(steps: int) -> AlgorithmRun:
    """The run whose model teaches another of so many steps."""
    return _ONE_EACH[0].of_steps(steps)
