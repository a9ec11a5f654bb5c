"""`source = "harness"`: a harness of others, unmodified, as an agent.

    task ─▶ a process of the harness's own virtual environment ─▶ asks the policy at its session
              └─▶ commands, by the session, on the task's computer (a runtime) ─▶ what is left there is judged

The harness stands beside the runtime: it has the network that its session is on, what the policy writes has none. Or,
with `inside`, it runs in there, and reaches its session alone. What a harness wants of the sampling gives way to the
run's, and is counted.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from env_service.agents.commands import CommandAnswered, CommandAsked
from env_service.agents.processes import Confinement, ProgramRun
from env_service.agents.sessions import CallRefused, OtherSampling
from env_service.builtin.computer_tools import TaskComputer
from env_service.environments.interface import (
    AgentClient,
    AgentResult,
    EnvironmentFailed,
    EnvironmentUnavailable,
    Step,
    Task,
    TaskSource,
    Verification,
    text_of,
)
from env_service.environments.rules import Rules
from env_service.harnesses.catalog import HARNESSES, HarnessName, python_of
from env_service.harnesses.inside import HarnessPlaces, InsideRun, places_of
from env_service.harnesses.installing import is_installed
from env_service.harnesses.tasks import HarnessTasks
from env_service.runtimes.interface import RuntimeCommand, RuntimeEnded, RuntimeRefused
from env_service.runtimes.pool import runtimes
from services.config.models import ConfigModel


class HarnessOptions(ConfigModel):
    """A harness, where it is installed, and its tasks."""

    harness: HarnessName = Field(description="which one")
    tasks: HarnessTasks = Field(description="its tasks: computer, harbor, repositories or questions, one of them")
    settings: dict[str, JsonValue] = Field(default_factory=dict, description="settings of the harness's own")
    agent_file: Path | None = Field(None, description="a Python file with an agent of yours; none: one with a shell")
    agent_name: str = Field("agent", pattern=r"^[A-Za-z_]\w*$", description="what that file calls it")
    installed: Path = Field(
        Path("harnesses"), description="folder of the virtual environments that `env-service harness install` makes"
    )
    python: Path | None = Field(
        None, description="the Python of a virtual environment of yours that has the harness, in place of that"
    )
    inside: bool = Field(
        False,
        description="the harness runs in its task's computer, where it reaches its session alone; otherwise beside it. "
        "Only in runtimes of bubblewrap",
    )
    environ: dict[Annotated[str, Field(min_length=1)], str] = Field(
        default_factory=dict, description="what the harness finds in its environment, too"
    )
    timeout_s: float = Field(
        1800.0, gt=0, description="longest time of the harness; a trajectory that takes longer is spoilt, in seconds"
    )
    memory_mb: int | None = Field(None, ge=64, description="largest address space of each of its processes, in MiB")
    other_sampling: Literal["refuse", "ignore"] = Field(
        "ignore",
        description="requests of the harness that want other sampling than the run's: ignore samples as the run does, "
        "and counts the field; refuse is a 400 that names it",
    )

    @model_validator(mode="after")
    def _fits_the_harness(self) -> Self:
        harness = HARNESSES[self.harness]
        if harness.needs_computer and self.tasks.questions is not None:
            raise ValueError(f"{self.harness} only runs commands, and questions have no computer; set other tasks")
        if self.agent_file is not None and not harness.own_agents:
            raise ValueError(f"agent_file is set, and {self.harness} takes settings alone; leave it out")
        if self.inside and self.tasks.questions is not None:
            raise ValueError("inside is true, and questions have no computer to run in; leave it out")
        if self.inside and self.memory_mb is not None:
            raise ValueError("memory_mb is set, and inside is true, where the limits of runtimes hold; leave it out")
        if self.tasks.system_prompt_is_set and (not harness.own_agents or self.agent_file is not None):
            whose = self.harness if self.agent_file is None else "the agent of agent_file"
            raise ValueError(f"system_prompt is set, and {whose} has one of its own; leave it out")
        return self

    @property
    def interpreter(self) -> Path:
        """The Python that the harness runs on. Raises ValueError if it is not there."""
        found = self.python or python_of(self.harness, installed=self.installed)
        if self.python is None and not is_installed(self.harness, folder=self.installed):
            raise ValueError(
                f"{self.harness} is not in {self.installed}, or in other versions than those that are pinned; install "
                f"it: env-service harness install {self.harness} --folder {self.installed}"
            )
        if not found.exists():
            raise ValueError(f"python is {found}, and that is not there")
        return found.absolute()


class HarnessAgent:
    """A harness, run once for each trajectory."""

    rules = Rules(max_turns=64)

    def __init__(self, options: HarnessOptions) -> None:
        """Raises ValueError for a harness that is not installed, and ImageFault for an image that there is not, or for
        runtimes that have no inside for a harness.
        """
        self.other_sampling: OtherSampling = options.other_sampling
        self._python = options.interpreter
        self._options = options
        self._harness = HARNESSES[options.harness]
        self._places: HarnessPlaces | None = None
        if options.inside:
            self._places = places_of(self._python, drivers=self._harness.driver.parent)
            runtimes().bind(self._places.folders, purpose=f"{options.harness} with inside = true")
        self._work = options.tasks.computer_work()
        self._computer: TaskComputer | None = None
        self._gone: asyncio.Future[Exception] | None = None

    @staticmethod
    def tasks(options: HarnessOptions) -> TaskSource:
        """The tasks. Raises TaskFileError."""
        return options.tasks.source()

    async def run(self, task: Task, client: AgentClient) -> AgentResult:
        """Raises EnvironmentFailed for a harness that fails or hangs, RuntimeLost and RuntimesBusy."""
        self._gone = asyncio.get_running_loop().create_future()
        try:
            told = await self._begun(task, client)
            ended = await self._driven(told, client)
            return await self._judged(ended, task)
        finally:
            if self._work is not None:
                await self._work.close()

    async def command(self, asked: CommandAsked) -> CommandAnswered:
        """Run a command on the task's computer. Raises CallRefused."""
        if self._computer is None:
            raise CallRefused(404, "no_computer", "the task of this session has no computer to run commands on")
        command = RuntimeCommand(
            argv=asked.argv,
            cwd=asked.folder or self._computer.folder,
            environment={**self._computer.environment, **asked.environment},
            wall_s=asked.timeout_s,
        )
        try:
            end = await self._computer.runtime.exec(command)
        except RuntimeRefused as refusal:
            raise CallRefused(400, "refused_command", str(refusal)) from refusal
        except (RuntimeEnded, EnvironmentUnavailable) as error:
            assert self._gone is not None
            if not self._gone.done():
                self._gone.set_result(error)
            raise CallRefused(410, "computer_over", f"the computer of this task is gone: {error}") from error
        return CommandAnswered(
            output=end.stdout.decode(errors="replace"),
            exit_code=128 + (end.signal or 0) if end.exit_code is None else end.exit_code,
            cut=end.cut,
            timed_out=end.timed_out,
            starved=end.starved,
        )

    async def _begun(self, task: Task, client: AgentClient) -> Mapping[str, JsonValue]:
        """The task as the harness is told it; nothing of it tells how the task is judged."""
        prompt, instructions = text_of(task.prompt), ""
        data: dict[str, JsonValue] = {}
        if self._work is not None:
            opening = await self._work.reset(task, client.seed)
            assert not isinstance(opening.prompt, str), "tasks on a computer open with messages"
            prompt = "\n\n".join(each.content for each in opening.prompt if each.role != "system")
            instructions = "\n\n".join(each.content for each in opening.prompt if each.role == "system")
            self._computer = self._work.computer
        else:
            assert self._options.tasks.questions is not None
            instructions = self._options.tasks.questions.system_prompt
            data = {name: value for name, value in task.data.items() if name not in ("prompt", "answer", "arguments")}
        file = self._options.agent_file
        return {
            "prompt": prompt,
            "instructions": instructions,
            "data": data,
            "folder": self._computer.folder if self._computer is not None else None,
            "max_turns": client.max_turns,
            "settings": self._options.settings,
            "agent_file": None if file is None else str(file.absolute()),
            "agent_name": self._options.agent_name,
        }

    async def _driven(self, told: Mapping[str, JsonValue], client: AgentClient) -> AgentResult:
        """Let the harness run to its end, or to that of its computer, or until a limit has refused it a turn."""
        assert self._gone is not None
        run = self._run(client) if self._places is None else self._inside_run(self._places)
        running = asyncio.ensure_future(run.result(told, client))
        ends: set[asyncio.Future[object]] = {running, self._gone}  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(self._options.timeout_s):
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError as error:
            limit_s = self._options.timeout_s
            raise EnvironmentFailed("hung", f"{self._harness.name} was not done within {limit_s:g} s") from error
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        if not running.cancelled():
            return _told_by(running, harness=self._harness.name, cut_off=client.cut_off() is not None)
        gone = self._gone.result()
        if isinstance(gone, RuntimeEnded):
            return AgentResult(stop="computer_ended")
        raise gone

    def _run(self, client: AgentClient) -> ProgramRun:
        return ProgramRun(
            command=(str(self._python), "-E", "-s", str(self._harness.driver)),
            environ={
                **self._harness.environ,
                **self._options.environ,
                **({} if self._computer is None else {"AGENT_COMMANDS_URL": f"{client.anthropic_url}/commands"}),
            },
            # Neither what this process knows nor what its user has set up for the harness is a run's business.
            confinement=Confinement(own_folder=True, clean_environment=True, memory_mb=self._options.memory_mb),
        )

    def _inside_run(self, places: HarnessPlaces) -> InsideRun:
        assert self._computer is not None, "refused by the options for questions"
        return InsideRun(
            name=self._harness.name,
            computer=self._computer,
            places=places,
            driver=self._harness.driver.name,
            environ={**self._harness.environ, **self._options.environ},
            agent_file=self._options.agent_file,
            timeout_s=self._options.timeout_s,
            command_s=runtimes().limits.command_s,
        )

    async def _judged(self, ended: AgentResult, task: Task) -> AgentResult:
        """The result with its reward, or with who gives it. Raises RuntimeLost and RuntimesBusy."""
        if self._work is None:
            assert self._options.tasks.questions is not None
            arguments = task.data.get("arguments")
            answer = {} if task.data.get("answer") is None else {"answer": task.data["answer"]}
            given = {**answer, **(arguments if isinstance(arguments, Mapping) else {})}
            return replace(ended, verification=Verification(self._options.tasks.questions.verifier, given))
        step = await self._work.judged(Step(stop=ended.stop))
        assert step.verification is None, "work on a computer is judged by who made it"
        return AgentResult(reward=step.reward, metrics=step.metrics, stop=step.stop)


def _told_by(running: "asyncio.Future[AgentResult | float | None]", *, harness: str, cut_off: bool) -> AgentResult:
    """The answer of a harness at its end. Raises EnvironmentFailed if it failed, unless it was `cut_off`: a refusal of
    one of its requests is no fault of its own; and RuntimeLost of the computer that it ran in.
    """
    try:
        ended = running.result()
    except RuntimeEnded:
        return AgentResult(stop="computer_ended")
    except EnvironmentFailed:
        if not cut_off:
            raise
        return AgentResult(stop="cut_off")
    if not isinstance(ended, AgentResult):
        raise EnvironmentFailed("nonsense", f"{harness} ended without a word; its driver was to give an answer")
    return ended
