"""Tasks on a computer that tests judge: Harbor's folders, and rows of a repository and an issue.

    a task's computer ─▶ calls of tools ─▶ … ─▶ submit ─▶ what changed in its folder ─▶ a fresh one ─▶ tests ─▶ reward

The tests come into the fresh computer only, over whatever was carried there. See `env_service.task_sets`.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from env_service.builtin.called_tools import TOOL_METRICS, CalledTools
from env_service.builtin.computer_tools import ComputerToolbox, TaskComputer, ToolName, acted
from env_service.environments.interface import Action, Aggregation, ChatMessage, Opening, Role, Step, Task, Tool
from env_service.environments.rules import Rules
from env_service.environments.task_files import TaskFileError, read_tasks
from env_service.runtimes.interface import Runtime, RuntimeEnded, RuntimeRefused, RuntimeSnapshot
from env_service.runtimes.pool import runtimes
from env_service.task_sets.dockerfile import NetworkSteps, files_in
from env_service.task_sets.harbor import HarborJudge, harbor_folders, no_tasks_in, read_harbor_task
from env_service.task_sets.judging import WorkVerdict, judged
from env_service.task_sets.preparing import opened, with_image_path
from env_service.task_sets.records import JudgedTask, TaskUnfit
from env_service.task_sets.rows import RepositoryRow, RowSettings, read_row, repository_of
from env_service.task_sets.trying import SetTask, TaskSet, fault_of, hash_of
from protocol.trajectories import Purpose
from services.config.models import ConfigModel

logger = logging.getLogger(__name__)

_METRICS: Mapping[str, Aggregation] = {**TOOL_METRICS, "passed_tests": "last", "tampered": "last", "kept_out": "last"}

_ENDED = Step(stop="computer_ended", metrics={"passed_tests": 0.0})


class TaskSetOptions(ConfigModel):
    """Options of all sets: what the policy is told and can call, and what of its work is judged."""

    tools: tuple[ToolName, ...] = Field(
        ("shell", "files", "python", "submit"), min_length=1, description="what the policy can call"
    )
    system_prompt: str = Field(
        "You work on a computer, in the folder {folder}. When the task is done, submit.",
        description="system message, in which {folder} is the task's; empty for none",
    )
    result_role: Literal["tool", "user"] = Field(
        "tool", description="role of the messages with results; user for chat templates that know no tools"
    )
    result_characters: int = Field(
        4000, ge=20, le=1 << 20, description="longest result; of longer ones the middle is left out"
    )
    allow: tuple[str, ...] = Field(
        (),
        description="names of files that are carried over to be judged although they can change how tests run, such as "
        "pyproject.toml; with a slash, paths",
    )


class HarborOptions(TaskSetOptions):
    """Folders of tasks in Harbor's format, and how they come to a computer here."""

    train_folder: Path = Field(description="a folder of tasks, or one task")
    evaluation_folder: Path | None = Field(None, description="the same for evaluation, if there is any")
    images: dict[str, str] = Field(
        {"*": "host"},
        description="images here, by the names in FROM or docker_image, or by a task's, for what its Dockerfile makes; "
        "'*' for all others",
    )
    network_steps: NetworkSteps = Field(
        "refuse",
        description="RUN lines that want the network: refuse leaves the task out, skip takes it that the image has "
        "what they install, and what scripts of tests and solutions do: there apt-get, pip and uv install nothing, and "
        "uvx runs the image's own program",
    )
    variables: dict[str, str] = Field({}, description="variables that task.toml asks for by ${NAME}")
    judge: HarborJudge = Field(
        "script",
        description="script: tests/test.sh; pytest: the tests of tests/test_*.py by the image's pytest, all of which "
        "have to pass, for tasks whose script would fetch that first",
    )
    carry: tuple[str, ...] = Field(
        (), description="folders, beside the task's own, of which changes are carried over to be judged"
    )


class RepositoryOptions(TaskSetOptions):
    """Rows of repositories and issues, and how they come to a computer here."""

    train_file: Path = Field(description="JSONL file of rows like SWE-bench's")
    evaluation_file: Path | None = Field(None, description="the same for evaluation, if there is any")
    repositories: Path = Field(Path(), description="folder with clones of the rows' repositories")
    image: str = Field("host", min_length=1, description="image of rows that name none; host: this machine")
    images: dict[str, str] = Field({}, description="images by a row's instance_id or its repo")
    folder: str = Field("/work", pattern=r"^/\w", description="where the repository is, on the task's computer")
    in_image: bool = Field(False, description="true: the image has the repository there already, at the row's commit")
    setup: str = Field("", description="a command that is run there once, before the agent comes; without a network")
    environment: dict[str, str] = Field({}, description="variables that commands and tests see")
    pytest_arguments: tuple[str, ...] = Field((), description="arguments of pytest, beside the files")
    controls: Literal["altered", "added"] = Field(
        "altered",
        description="tests that have to fail, by which it is found that tests were made to pass: altered has, beside "
        "some that are added, the named tests with other values expected",
    )
    reward: Literal["all", "fraction"] = Field(
        "all", description="all: 1 if every test passes, else 0; fraction: the share of those that pass"
    )

    @property
    def rows(self) -> RowSettings:
        """The settings that decide what a row's task is."""
        return RowSettings.model_validate(self.model_dump(include=set(RowSettings.model_fields)))


class JudgedComputer(ABC):
    """A conversation on a computer, and the verdict on what was changed there: the environment of all sets of tasks."""

    rules = Rules(max_turns=24, action="tools")
    metrics = _METRICS

    def __init__(self, options: TaskSetOptions, images: Iterable[str], *, by_share: bool = False) -> None:
        """`by_share`: the reward is the share of tests that pass. Raises ImageFault for an image that there is not."""
        for image in sorted(set(images)):
            runtimes().need(image)
        self.roles: tuple[Role, ...] = (options.result_role,)
        self._options = options
        self._by_share = by_share
        self._runtime: Runtime | None = None
        self._tools: CalledTools | None = None
        self._before: RuntimeSnapshot | None = None
        self._task: JudgedTask | None = None

    @abstractmethod
    def _read(self, task: Task) -> JudgedTask:
        """The task on its computer and its tests; reads files."""

    async def reset(self, task: Task, seed: int) -> Opening:
        """Raises RuntimeLost and RuntimesBusy, and TaskUnfit for a task whose computer cannot be made."""
        self._task = await with_image_path(await asyncio.to_thread(self._read, task))
        self._runtime, self._before = await opened(self._task.setup)
        tools = await self._offered(self._task, self._runtime)
        told = self._options.system_prompt.replace("{folder}", self._task.setup.cwd)
        system = (ChatMessage("system", told),) if told else ()
        return Opening((*system, ChatMessage("user", self._task.prompt)), tools=tools)

    async def step(self, action: Action) -> Step:
        """Results of the calls; or the end: submitted, no call, or the last turn. Raises RuntimeLost."""
        assert self._tools is not None
        try:
            step, over = await acted(self._tools, action)
        except RuntimeEnded:
            return _ENDED
        return await self.judged(step) if over else step

    async def save(self) -> bytes:
        """The files of its computer. Raises RuntimeLost, RuntimeEnded, RuntimeRefused."""
        assert self._runtime is not None
        return (await self._runtime.snapshot()).packed()

    async def restore(self, saved: bytes) -> None:
        """Has these files on a computer in the place of its own. Raises RuntimeLost and RuntimesBusy."""
        assert self._runtime is not None
        assert self._task is not None
        snapshot = RuntimeSnapshot.unpacked(saved)
        self._runtime = await runtimes().exchange(self._runtime, snapshot.image, snapshot=snapshot)
        await self._offered(self._task, self._runtime)

    @property
    def computer(self) -> TaskComputer:
        """The computer of a task that was reset."""
        assert self._runtime is not None
        assert self._task is not None
        setup = self._task.setup
        return TaskComputer(runtime=self._runtime, folder=setup.cwd, environment=setup.environment)

    async def judged(self, step: Step) -> Step:
        """The end: what was changed is judged, behind a last step. Raises RuntimeLost."""
        try:
            return await self._ended(step)
        except RuntimeEnded:
            return _ENDED

    async def close(self) -> None:
        """Ends the runtime."""
        if self._runtime is not None:
            await self._runtime.stop()

    async def solution_fault(self, task: Task) -> str:
        """Says why the task's own solution is not rewarded, or doing nothing is; empty if all is well."""
        return await fault_of(await asyncio.to_thread(self._read, task))

    async def _offered(self, task: JudgedTask, runtime: Runtime) -> tuple[Tool, ...]:
        """The tools on a runtime, which are its tools from here on."""
        setup, options = task.setup, self._options
        toolbox = ComputerToolbox(runtime, options.tools, folder=setup.cwd, environment=setup.environment)
        self._tools = CalledTools(
            [toolbox], role=options.result_role, characters=options.result_characters, in_turn=True
        )
        return await self._tools.offered()

    async def _ended(self, step: Step) -> Step:
        assert self._runtime is not None
        assert self._task is not None
        assert self._before is not None
        try:
            after = await self._runtime.snapshot()
        except RuntimeRefused:
            await self._runtime.stop()
            metrics = {**step.metrics, "passed_tests": 0.0}
            return Step(stop="unreadable", invalid=step.invalid, metrics=metrics)
        except BaseException:
            await self._runtime.stop()
            raise
        verdict = await judged(self._task, self._before, after, instead_of=self._runtime)
        return self._told(step, verdict)

    def _told(self, step: Step, verdict: WorkVerdict) -> Step:
        assert self._task is not None
        if verdict.tampered:
            logger.warning("%s: tests that have to fail were made to pass; there is no reward", self._task.name)
        solved = verdict.reward >= 1.0
        stop = "solved" if solved else "tampered" if verdict.tampered else "failed"
        metrics = {
            **step.metrics,
            "passed_tests": verdict.passed,
            "tampered": float(verdict.tampered),
            "kept_out": float(len(verdict.work.kept_out)),
        }
        reward = verdict.passed if self._by_share else verdict.reward
        return Step(stop=stop, reward=reward, invalid=step.invalid, metrics=metrics)


class HarborEnvironment(JudgedComputer):
    """Tasks in Harbor's format, each judged by its tests in a fresh copy of its computer."""

    def __init__(self, options: HarborOptions) -> None:
        """Raises ImageFault for an image that there is not."""
        super().__init__(options, options.images.values())
        self._folders = options

    @staticmethod
    def tasks(options: HarborOptions) -> TaskSet:
        """The tasks of the folders that can be done here. Raises TaskFileError if there are none."""
        every: list[SetTask] = []
        refused: list[str] = []
        tried: dict[Purpose, Path] = {}
        for purpose, folder in _purposes(options.train_folder, options.evaluation_folder):
            tried[purpose] = _tried(folder)
            folders = harbor_folders(folder)
            if not folders:
                raise TaskFileError(no_tasks_in(folder))
            for each in folders:
                try:
                    task = _harbor_task(each, options)
                except TaskUnfit as fault:
                    refused.append(str(fault))
                    continue
                settings = options.model_dump_json(include={"images", "network_steps", "carry", "allow", "judge"})
                key = hash_of(*_told_of(each), settings)
                made = Task(prompt=task.prompt, data={"folder": str(each)}, purpose=purpose)
                every.append(SetTask(purpose=purpose, where=str(each), key=key, task=made))
        return TaskSet(every, refused=refused, tried=tried)

    def _read(self, task: Task) -> JudgedTask:
        return _harbor_task(Path(str(task.data["folder"])), self._folders)


class RepositoryEnvironment(JudgedComputer):
    """Issues in repositories, each judged by tests that are laid over a fresh copy with what was changed."""

    def __init__(self, options: RepositoryOptions) -> None:
        """Raises ImageFault for an image that there is not."""
        images = (options.image, *options.images.values())
        super().__init__(options, images, by_share=options.reward == "fraction")
        self._rows = options.rows

    @staticmethod
    def tasks(options: RepositoryOptions) -> TaskSet:
        """The rows whose repositories are here. Raises TaskFileError for a line that is none."""
        every: list[SetTask] = []
        refused: list[str] = []
        tried: dict[Purpose, Path] = {}
        settings = options.rows
        for purpose, file in _purposes(options.train_file, options.evaluation_file):
            tried[purpose] = _tried(file)

            def make(number: int, text: str, purpose: Purpose = purpose, file: Path = file) -> Task:
                row = RepositoryRow.model_validate_json(text)
                made = Task(prompt=row.problem_statement, data={"row": text.strip()}, purpose=purpose)
                where = f"{file}:{number}"
                try:
                    if not row.files:
                        repository_of(row, settings)
                except TaskUnfit as fault:
                    refused.append(f"{where}: {fault}")
                    return made
                key = hash_of(text.strip(), settings.model_dump_json(exclude={"repositories"}))
                every.append(SetTask(purpose=purpose, where=f"{where} ({row.instance_id})", key=key, task=made))
                return made

            read_tasks(file, make, example=" with instance_id, problem_statement, FAIL_TO_PASS, and a repository")
        return TaskSet(every, refused=refused, tried=tried)

    def _read(self, task: Task) -> JudgedTask:
        return read_row(RepositoryRow.model_validate_json(str(task.data["row"])), self._rows)


def _purposes(train: Path, evaluation: Path | None) -> Iterator[tuple[Purpose, Path]]:
    yield "train", train
    if evaluation is not None:
        yield "evaluate", evaluation


def _tried(path: Path) -> Path:
    """The file in which it is kept how the tasks of a file or folder did when they were tried."""
    whole = path.resolve()
    return whole.with_name(f"{whole.name}.tried.json")


def _harbor_task(folder: Path, options: HarborOptions) -> JudgedTask:
    return read_harbor_task(
        folder,
        images=options.images,
        network_steps=options.network_steps,
        variables=options.variables,
        carry=options.carry,
        allow=options.allow,
        judge=options.judge,
    )


def _told_of(folder: Path) -> Iterator[str | bytes]:
    """All that a task's folder says."""
    for path, file in sorted(files_in(folder).items()):
        yield f"{path} {file.mode:o} {file.link}"
        yield file.content
