"""The system on its hosts: how each process is started, and started again by its supervisor when it ends."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simulation.actors.engine import EngineScript, EngineScripts
from simulation.actors.environment import NAME, WORDS
from simulation.actors.rewards import ABSURD, RewardScript, StubRewardService
from simulation.actors.teacher import StubTeacher
from simulation.world.clock import World
from simulation.world.process import Main, Process
from simulation.world.threads import Workers

LEARNER = "learner"
SECOND_LEARNER = "second-learner"
LEASES = "tcp://127.0.0.1:7301"
_FIRST_RESTART_S, _MAX_RESTART_S, _STABLE_S = 1.0, 30.0, 60.0


@dataclass(frozen=True)
class ClusterSettings:
    """ClusterSettings of the processes; times in seconds."""

    generators: int = 2
    env_services: int = 1
    reward_services: int = 1
    steps: int = 12
    time_limit_s: float | None = None
    groups_per_step: int = 2
    group_size: int = 2
    max_lag: int = 2
    max_tokens: int = 6
    capacity: int = 8
    on_lag: str = "wait"
    pacing: str = "demand"
    straggler_timeout_s: float = 60.0
    lease_timeout_s: float = 30.0
    heartbeat_every_s: float = 5.0
    announce_every_s: float = 5.0
    silence_s: float = 20.0
    rollout_timeout_s: float = 1800.0
    environment_timeout_s: float = 60.0
    pull_timeout_s: float = 120.0
    checkpoint_every: int = 4
    final_tasks: int = 0
    evaluation_every: int = 1000
    min_group_size: int = 2
    drop_uniform_groups: bool = False
    staging: str = "staging"
    checkpoints_kept: int = 2
    teachers: int = 0
    """Addresses of the one teacher that all trajectories have; none with 0."""
    hedged: float = 0.0
    """Share of the completions that a second reward service may be asked for, and after how many seconds."""
    hedged_after_s: float | None = None
    curriculum: Mapping[str, Any] = field(default_factory=dict)
    """Of the learner's settings `rollouts.curriculum`, what differs from their defaults."""
    tasks: Mapping[str, Any] = field(default_factory=dict)
    """Of the learner's settings `rollouts.tasks`, what differs from their defaults."""
    success_reward: float = 1.0
    guard: Mapping[str, Any] = field(default_factory=dict)
    """Of the learner's settings `guard`, what differs from their defaults."""
    checkpoints: bool = False
    """Env_services keep records of conversations, and go on with them."""
    reuse: Mapping[str, Any] = field(default_factory=dict)
    """Of the learner's settings `reuse`, what differs from their defaults."""
    partial_batches: bool = False
    """Steps begin before their batches are complete."""

    @property
    def reused_per_step(self) -> int:
        """Groups of a step that were trained before, at most."""
        return int(self.reuse.get("share", 0.0) * self.groups_per_step)


@dataclass
class Service:
    """A place in the system: the processes that hold it, one after the other. `wanted`: it is restarted."""

    name: str
    host: str
    make: Callable[[bool], Main]
    wanted: bool = True
    process: Process | None = None
    lives: int = 0
    deaths_in_a_row: int = 0
    last_code: int | None = 0


@dataclass
class Cluster:
    """Starts services and keeps them up. `exited` is told of each end that nobody caused from outside."""

    world: World
    folder: Path
    settings: ClusterSettings
    exited: Callable[[Service, Process, int | None], None]
    crashed: Callable[[Process, BaseException], None] = lambda process, error: None
    thread_s: float = 0.0
    """Mean seconds that work beside an event loop takes; 0 for a moment."""
    services: dict[str, Service] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)

    @property
    def run_folder(self) -> Path:
        """Of the run."""
        return self.folder / "runs" / "run"

    def add(self, service: Service) -> Service:
        """Makes a place known, and starts it."""
        self.services[service.name] = service
        self.start(service, again=False)
        return service

    def start(self, service: Service, *, again: bool) -> None:
        """A new process for this place."""
        service.lives += 1
        suffix = f"#{service.lives}" if service.lives > 1 else ""
        process = Process(
            self.world, name=f"{service.name}{suffix}", host=service.host, ended=lambda *end: self._ended(service, *end)
        )
        if self.thread_s:
            process.workers = Workers(process, self.thread_s)
        process.failed = lambda error: self.crashed(process, error)
        service.process = process
        self.processes.append(process)
        self.world.note(process.name, "starts")
        process.start(service.make(again))

    def _ended(self, service: Service, process: Process, code: int | None) -> None:
        how = "is killed" if code is None else f"exits with {code}"
        self.world.note(process.name, how)
        service.last_code = code
        if service.process is process:
            service.process = None
        self.exited(service, process, code)
        if service.wanted and not (code == 0 and service.name == LEARNER and not process.leaving):
            if self.world.now - process.started_at >= _STABLE_S:
                service.deaths_in_a_row = 0
            service.deaths_in_a_row += 1
            pause_s = min(_MAX_RESTART_S, _FIRST_RESTART_S * 2.0 ** (service.deaths_in_a_row - 1))
            self.world.after(pause_s, lambda: self._restart(service))

    def _restart(self, service: Service) -> None:
        if service.wanted and service.process is None:
            self.start(service, again=True)

    # What the places are

    def learner(self, *, name: str = LEARNER, host: str = LEARNER) -> Service:
        """The learner; a later start resumes if the first one got as far as its folder."""

        def make(again: bool) -> Main:
            from learner.service import train_online

            config = self._learner_config(resume=again and (self.run_folder / "incarnation").exists())
            return lambda stop: train_online(config, stop)

        return Service(name=name, host=host, make=make)

    def env_service(self, index: int, *, host: str | None = None, env_id: str | None = None) -> Service:
        """An env_service; a second one of the same `env_id` may be on another host."""
        name = host or f"env-{index}"

        def make(again: bool) -> Main:
            from env_service.app import run

            config = self._env_config(env_id or f"env-{index}", host=name)
            return lambda stop: run(config, stop)

        return Service(name=name, host=name, make=make)

    def generator(self, index: int, script: EngineScript) -> Service:
        """A generator."""
        name = f"gen-{index}"
        self.world.part(EngineScripts).by_host[name] = script

        def make(again: bool) -> Main:
            from generator.command import engine_options
            from generator.service import serve

            config = self._generator_config(name)
            script.hanging = False
            return lambda stop: serve(config, engine_options(config), stop)

        return Service(name=name, host=name, make=make)

    def reward_service(self, index: int, script: RewardScript) -> Service:
        """A reward service."""
        name = f"rewards-{index}"
        return Service(name=name, host=name, make=lambda again: StubRewardService(script, service_id=name).serve)

    def teacher(self, index: int) -> Service:
        """An address of the teacher."""
        name = f"teacher-{index}"
        return Service(name=name, host=name, make=lambda again: StubTeacher().serve)

    # Their configurations

    def _run(self) -> dict[str, Any]:
        return {"name": "run", "directory": self.folder / "runs"}

    def _learner_config(self, *, resume: bool) -> Any:
        from learner.config import LearnerConfig, WeightsConfig

        s = self.settings
        hosts = (
            {"generator_hosts": ("gen-*",), "host": "learner"}
            if "generator_hosts" in WeightsConfig.model_fields
            else {}
        )
        return LearnerConfig.model_validate(
            {
                "run": self._run(),
                "model": self.folder / "model",
                "steps": s.steps,
                "time_limit_s": s.time_limit_s,
                "groups_per_step": s.groups_per_step,
                "max_lag": s.max_lag,
                "resume": resume,
                "samples": {"enabled": False},
                "trust": {"enabled": False},
                "rollouts": {
                    "environment": NAME, "group_size": s.group_size, "max_tokens": s.max_tokens, "stop_token_ids": (1,),
                    "min_group_size": s.min_group_size, "drop_uniform_groups": s.drop_uniform_groups,
                    "max_reward": ABSURD,
                    "curriculum": s.curriculum, "tasks": s.tasks,
                },
                "lag": {"pacing": s.pacing, "on_lag": s.on_lag, "straggler_timeout_s": s.straggler_timeout_s},
                "leases": {"heartbeat_every_s": s.heartbeat_every_s, "timeout_s": s.lease_timeout_s, "address": LEASES},
                "weights": {
                    "announce_every_s": s.announce_every_s, "silence_s": s.silence_s,
                    "pull_timeout_s": s.pull_timeout_s, "bucket_mb": 1, **hosts,
                },
                "evaluation": {
                    "tasks": 2 if s.final_tasks else 0, "every_steps": s.evaluation_every, "final_tasks": s.final_tasks,
                    "success_reward": s.success_reward,
                },
                "checkpoint": {"every_steps": s.checkpoint_every, "keep": s.checkpoints_kept, "beside_training": False},
                "guard": s.guard,
                "reuse": s.reuse,
                **({"training": {"partial_batches": True}} if s.partial_batches else {}),
                **self._taught(),
            }
        )  # fmt: skip

    def _taught(self) -> dict[str, Any]:
        if not self.settings.teachers:
            return {}
        urls = [f"http://teacher-{index}:7310" for index in range(self.settings.teachers)]
        return {"algo": {"type": "opd"}, "teachers": [{"name": "teacher", "urls": urls, "same_tokenizer": False}]}

    def _env_config(self, env_id: str, *, host: str) -> Any:
        from env_service.config import EnvServiceConfig

        s = self.settings
        urls = [f"http://rewards-{index}:7320" for index in range(s.reward_services)]
        return EnvServiceConfig.model_validate(
            {
                "run": self._run(), "model": self.folder / "model", "env_id": env_id, "learner": LEASES,
                "reward_urls": urls, "capacity": s.capacity, "retry": {
                    "rollout_timeout_s": s.rollout_timeout_s, "environment_timeout_s": s.environment_timeout_s,
                },
                "scoring": {"hedge_share": s.hedged, "hedge_after_s": s.hedged_after_s},
                "checkpoints": {"folder": self.folder / "disks" / host if s.checkpoints else None},
            }
        )  # fmt: skip

    def _generator_config(self, name: str) -> Any:
        from generator.config import GeneratorConfig

        return GeneratorConfig.model_validate(
            {
                "run": self._run(), "model": self.folder / "model", "id": name, "openai": False,
                "engine": {"max_model_len": 64, "staging": self.settings.staging},
                "join": {
                    "learner": f"http://{LEARNER}:7300", "url": f"http://{name}:7310",
                    "download_folder": self.folder / "tmp",
                },
            }
        )  # fmt: skip


def write_model(folder: Path) -> None:
    """The smallest model directory that the processes take."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "config.json").write_text(
        json.dumps({"model_type": "scripted", "vocab_size": len(WORDS)}), encoding="utf-8"
    )
