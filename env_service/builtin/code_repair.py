"""Code that the policy writes and repairs, told each time what its tests say.

    problem ─▶ code ─▶ the tests that it may see, in the sandbox ─┬─ some fail: what they say ─▶ code ─▶ …
                                                                 └─ all pass, or no turn is left ─▶ the task's verifier

The verifier has tests of its own. What the code prints, or does to the tests that it sees, changes what it is told and
when the conversation ends, never its reward.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from env_service.builtin.toolboxes import SandboxClient, SandboxConfig, cut
from env_service.builtin.toolboxes import told as told_of
from env_service.environments.interface import Action, Aggregation, ChatMessage, Opening, Role, Step, Task, Verification
from env_service.environments.rules import Rules
from env_service.environments.task_files import TaskLists, tasks_of_files
from protocol.trajectories import Purpose
from services.config.models import ConfigModel

_BLOCK = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_MARK = "\x1e"

# Runs behind the code, in its namespace. Each test is told of with a mark before it.
_CHECK = """
def _check(tests):
    import sys, traceback
    passed = 0
    for test in tests:
        try:
            exec(test, globals())
            passed += 1
        except BaseException as error:
            said = "".join(traceback.format_exception_only(error)).strip()
            print(f"{chr(30)}{test}\\n{said}")
    print(f"{chr(30)}{passed}")
_check(%s)
"""


class RepairOptions(ConfigModel):
    """Source of the problems, and the service that runs code."""

    train_file: Path = Field(description="JSONL file: `prompt`, `tests` (statements), `verifier` with `arguments`")
    evaluation_file: Path | None = Field(None, description="the same for evaluation, if there is any")
    verifier: str = Field("code", min_length=1, description="verifier of the lines that name none")
    sandbox: SandboxConfig = SandboxConfig()
    system_prompt: str = Field(
        "Write Python code that solves the problem, in one block fenced by ```python and ```. You are told which tests "
        "fail, and can write all of it again.",
        description="system message; empty for none",
    )
    feedback_characters: int = Field(2000, ge=100, le=1 << 20, description="longest text about failed tests")


class _Problem(BaseModel):
    model_config = ConfigDict(extra="forbid")

    prompt: str = Field(min_length=1)
    tests: tuple[str, ...] = Field(min_length=1, max_length=1000)
    verifier: str | None = None
    arguments: dict[str, JsonValue] = Field(default_factory=dict)


class CodeRepairEnvironment:
    """A problem of code. The last turn's code is judged, whatever the tests before it said."""

    rules = Rules(max_turns=4)
    roles: tuple[Role, ...] = ("user",)
    metrics: Mapping[str, Aggregation] = {"passed_tests": "last", "attempts": "sum"}

    def __init__(self, options: RepairOptions) -> None:
        self._options = options
        self._sandbox = SandboxClient(options.sandbox)
        self._task = Task()
        self._tests: list[str] = []

    @staticmethod
    def tasks(options: RepairOptions) -> TaskLists:
        """The problems of the files. Raises TaskFileError for a line that is none."""

        def make(_number: int, text: str, purpose: Purpose) -> Task:
            problem = _Problem.model_validate_json(text)
            verification = Verification(problem.verifier or options.verifier, problem.arguments)
            data: dict[str, JsonValue] = {"tests": list(problem.tests)}
            return Task(prompt=problem.prompt, verification=verification, data=data, purpose=purpose)

        return tasks_of_files(options.train_file, options.evaluation_file, make)

    def reset(self, task: Task, seed: int) -> Opening:
        """The problem."""
        self._task = task
        tests = task.data["tests"]
        assert isinstance(tests, list)
        self._tests = [str(test) for test in tests]
        system = (ChatMessage("system", self._options.system_prompt),) if self._options.system_prompt else ()
        assert isinstance(task.prompt, str)
        return Opening((*system, ChatMessage("user", task.prompt)))

    async def step(self, action: Action) -> Step:
        """Runs the tests. Raises as `SandboxClient.run`."""
        code = code_in(action.text)
        if code is None:
            return self._answer(
                action, "There is no block of code fenced by ```python and ```.", passed=0, invalid=True
            )
        answer = await self._sandbox.run(code + _CHECK % repr(self._tests))
        *failures, last = ["", *answer.stdout.split(_MARK)[1:]]
        if last.strip().isdigit():
            passed, told = min(int(last), len(self._tests)), "\n".join(part.strip() for part in failures if part)
        else:  # it ended before its tests did
            passed, told = 0, told_of(answer).replace(_MARK, "")
        return self._answer(action, f"{passed} of {len(self._tests)} tests pass.\n{told}", passed=passed)

    async def close(self) -> None:
        """Closes the connections to the sandbox."""
        await self._sandbox.close()

    def _answer(self, action: Action, told: str, *, passed: int, invalid: bool = False) -> Step:
        metrics = {"passed_tests": passed / len(self._tests), "attempts": 1.0}
        if action.last or passed == len(self._tests):
            return Step(verification=self._task.verification, invalid=invalid, metrics=metrics)
        text = cut(told.strip(), self._options.feedback_characters)
        return Step((ChatMessage("user", text),), invalid=invalid, metrics=metrics)


def code_in(text: str) -> str | None:
    """The last fenced block of a text, whose end may be missing; None if there is none."""
    blocks = _BLOCK.findall(text)
    return str(blocks[-1]) if blocks and blocks[-1].strip() else None
