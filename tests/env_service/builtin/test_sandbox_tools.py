"""The Python tool and code repair, against the real reward service with its sandbox."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from env_service.builtin.code_repair import code_in
from env_service.builtin.toolboxes import PythonTool, PythonToolbox, SessionLost, ToolFault
from env_service.environments import catalog
from env_service.environments.imported import EnvironmentFault
from env_service.environments.interface import (
    Action,
    ChatMessage,
    EnvironmentUnavailable,
    Opening,
    Step,
    ToolCall,
)
from env_service.environments.task_configs import ClassTasks
from protocol.rewards import SessionEnded
from services.http.client import HttpClient, ServiceRefused
from tests.reward_service.real_service import real_service

CONFIG = """
[reward-service]
http = { port = 0 }
drain_s = 0.0
sandbox = "unsafe"
execution = { cgroup = "off", packages = [], concurrency = 2, spare = 0 }
"""

PROBLEM = {
    "prompt": "Write double(x).",
    "tests": ["assert double(2) == 4", "assert double('ä😀') == 'ä😀ä😀'", "assert double(-1) == -2, 'negative'"],
    "arguments": {"tests": {"kind": "assert", "cases": [{"code": "assert double(7) == 14"}]}},
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address."""
    with real_service(tmp_path_factory.mktemp("service"), CONFIG) as (_, client):
        yield str(client.base_url).rstrip("/")


@pytest_asyncio.fixture
async def python(service: str) -> AsyncIterator[PythonToolbox]:
    box = PythonToolbox(PythonTool(kind="python", url=service, wall_s=20))
    yield box
    await box.close()


def code(text: str) -> ToolCall:
    return ToolCall("python", {"code": text})


async def test_variables_stay_and_what_is_printed_comes_back(python: PythonToolbox) -> None:
    assert await python.call(code("x = 6")) == "no output"
    assert await python.call(code("print(x * 7)")) == "42"


async def test_an_exception_is_told_and_the_interpreter_goes_on(python: PythonToolbox) -> None:
    await python.call(code("x = 1"))

    assert "ZeroDivisionError" in await python.call(code("x / 0"))
    assert await python.call(code("print(x)")) == "1"


async def test_the_end_of_an_interpreter_is_told_and_the_next_call_begins_anew(python: PythonToolbox) -> None:
    await python.call(code("x = 1"))

    assert "its variables are gone" in await python.call(code("import os; os._exit(1)"))
    assert "NameError" in await python.call(code("print(x)"))


async def test_conversations_do_not_see_each_other_s_variables(service: str, python: PythonToolbox) -> None:
    other = PythonToolbox(PythonTool(kind="python", url=service, wall_s=20))
    await python.call(code("x = 1"))

    assert "NameError" in await other.call(code("print(x)"))
    await other.close()


async def test_a_session_that_ends_by_itself_in_the_middle_is_not_taken_for_the_policy_s_doing(
    python: PythonToolbox,
) -> None:
    await python.call(code("x = 1"))
    await python._sandbox.end(python._session)

    with pytest.raises(SessionLost) as lost:
        await python.call(code("print(x)"))
    assert isinstance(lost.value, EnvironmentUnavailable)


async def test_closing_ends_the_session(service: str, python: PythonToolbox) -> None:
    await python.call(code("x = 1"))
    await python.close()

    async with HttpClient() as client:
        left = await client.delete(f"{service}/v1/sessions/{python._session}", SessionEnded, deadline_s=30)
    assert not left.ended


async def test_arguments_that_are_no_code_are_told(python: PythonToolbox) -> None:
    with pytest.raises(ToolFault, match="code"):
        await python.call(ToolCall("python", {"source": "1"}))


async def test_a_sandbox_that_is_not_there_is_no_fault_of_the_policy() -> None:
    box = PythonToolbox(PythonTool(kind="python", url="http://127.0.0.1:9"))

    with pytest.raises(EnvironmentUnavailable, match=r"127\.0\.0\.1:9"):
        await box.call(code("1"))
    await box.close()


async def test_a_sandbox_in_which_no_place_becomes_free_is_no_fault_of_the_policy(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def is_full(*_: object, **__: object) -> None:
        raise ServiceRefused(service, status=429, kind="busy", message="full", retry_after_s=0.01)

    monkeypatch.setattr(HttpClient, "post", is_full)
    box = PythonToolbox(PythonTool(kind="python", url=service, wall_s=0.1, patience_s=0.1))

    with pytest.raises(EnvironmentUnavailable, match="had no sandbox free"):
        await box.call(code("1"))
    await box.close()


async def test_a_service_that_runs_no_programs_is_set_wrongly(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def runs_none(*_: object, **__: object) -> None:
        raise ServiceRefused(service, status=403, kind="no_sandbox", message="off")

    monkeypatch.setattr(HttpClient, "post", runs_none)
    box = PythonToolbox(PythonTool(kind="python", url=service))

    with pytest.raises(ServiceRefused):
        await box.call(code("1"))
    await box.close()


class TestRepair:
    @pytest_asyncio.fixture
    async def begun(self, service: str, tmp_path: Path) -> AsyncIterator[tuple[Any, Opening]]:
        path = tmp_path / "problems.jsonl"
        path.write_text(json.dumps(PROBLEM))
        offered = catalog.build([self.entry(path, service)])["repair"]
        environment: Any = offered.start()
        task: Any = offered.tasks.task("train", 0)
        yield environment, environment.reset(task, 0)
        await environment.close()

    def entry(self, path: Path, service: str) -> ClassTasks:
        options = {"train_file": str(path), "sandbox": {"url": service, "wall_s": 20}}
        return ClassTasks.model_validate({"source": "code_repair", "name": "repair", "options": options})

    def told(self, step: Step) -> str:
        assert isinstance(step.observation, tuple)
        (message,) = step.observation
        assert isinstance(message, ChatMessage)
        return message.content

    async def test_code_is_repaired_by_what_its_tests_say(self, begun: tuple[Any, Opening]) -> None:
        environment, opening = begun
        assert opening.prompt[-1].content == "Write double(x)."  # type: ignore[union-attr]

        first = await environment.step(Action("```python\ndef double(x):\n    return abs(x) * 2\n```"))
        second = await environment.step(Action("Now:\n```python\ndef double(x):\n    return x * 2\n```"))

        assert self.told(first).startswith("1 of 3 tests pass.")
        assert "AssertionError: negative" in self.told(first)
        assert "TypeError" in self.told(first)
        assert first.metrics == {"passed_tests": pytest.approx(1 / 3), "attempts": 1.0}
        assert second.verification.verifier == "code"
        assert second.verification.arguments == PROBLEM["arguments"]

    @pytest.mark.parametrize(
        ("source", "said"),
        [
            ("def double(x:", "SyntaxError"),
            ("import os; os._exit(0)", "no output"),
            ("raise KeyError(7)", "KeyError: 7"),
        ],
    )
    async def test_code_that_ends_before_its_tests_is_told_how(
        self, begun: tuple[Any, Opening], source: str, said: str
    ) -> None:
        step = await begun[0].step(Action(f"```python\n{source}\n```"))

        assert self.told(step).startswith("0 of 3 tests pass.")
        assert said in self.told(step)

    async def test_an_answer_without_code_is_invalid(self, begun: tuple[Any, Opening]) -> None:
        step = await begun[0].step(Action("I do not know."))

        assert (step.invalid, step.ends) == (True, False)

    async def test_the_last_turn_is_judged_whatever_it_is(self, begun: tuple[Any, Opening]) -> None:
        assert (await begun[0].step(Action("nothing", last=True))).verification is not None

    def test_a_line_that_is_no_problem_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "problems.jsonl"
        path.write_text(json.dumps({**PROBLEM, "tests": []}))

        with pytest.raises((EnvironmentFault, ValueError), match=r"problems\.jsonl:1: tests"):
            catalog.build([self.entry(path, "http://127.0.0.1:9")])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("```python\na\n```", "a\n"),
        ("```\na\n``` and ```py\nb\n```", "b\n"),
        ("```python\ncut off", "cut off"),
        ("a = 1", None),
        ("```python\n```", None),
        ("", None),
    ],
)
def test_the_last_block_counts_even_without_an_end(text: str, found: str | None) -> None:
    assert code_in(text) == found
