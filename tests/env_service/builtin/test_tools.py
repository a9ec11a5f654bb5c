"""Tools: what they answer, what they refuse, and how a conversation with them goes."""

import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from env_service.builtin.arithmetic import ArithmeticEnvironment, ArithmeticOptions
from env_service.builtin.toolboxes import CalculatorToolbox, SearchTool, ToolFault, calculate, cut
from env_service.environments import catalog
from env_service.environments.imported import EnvironmentFault
from env_service.environments.interface import Action, OfferedEnvironment, Opening, Step, Task, ToolCall
from env_service.environments.task_configs import ClassTasks


def call(name: str, **arguments: JsonValue) -> ToolCall:
    return ToolCall(name, arguments)


def built(source: str, **options: Any) -> OfferedEnvironment:
    entry = ClassTasks.model_validate({"source": source, "name": "mine", "options": options})
    return catalog.build([entry])["mine"]


def texts(step: Step) -> list[str]:
    assert isinstance(step.observation, tuple)
    return [message.content for message in step.observation]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * 4", "20"),
        ("-7 // 2", "-4"),
        ("7 % 3", "1"),
        ("1 / 4", "0.25"),
        ("1 / 3", "0.333333333333"),
        ("0.1 + 0.2", "0.3"),
        ("2 ** 100", "1267650600228229401496703205376"),
        ("2 ** -2", "0.25"),
        ("+5", "5"),
        ("(" * 149 + "1" + ")" * 149, "1"),
        ("-" * 298 + "1", "1"),
    ],
)
def test_the_calculator_is_exact(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        *("", "1 +", "a", "f(1)", "1; 2", "True", "'a' * 3", "1 if 1 else 2", "1 < 2", "1j", "(", "lambda: 1", "[1]"),
        *("9 ** 9 ** 9", "2 ** 0.5", "1" * 301, "1e999", "1/0", "0 ** -1"),
    ],
)
def test_what_is_no_arithmetic_or_too_large_is_refused(expression: str) -> None:
    with pytest.raises(ToolFault):
        calculate(expression)


@given(st.text(alphabet="0123456789+-*/%(). eE_", max_size=40))
def test_the_calculator_answers_or_refuses_and_agrees_with_python(expression: str) -> None:
    try:
        value = calculate(expression)
    except ToolFault:
        return
    assert float(value) == pytest.approx(float(eval(expression)), rel=1e-6, abs=1e-9)


async def test_arguments_that_do_not_fit_are_named_to_the_policy() -> None:
    with pytest.raises(ToolFault, match=r"wrong arguments: .*expression"):
        await CalculatorToolbox().call(call("calculate", expresion="1"))


@given(st.text(max_size=300), st.integers(20, 100))
def test_a_long_text_keeps_its_beginning_and_end(text: str, most: int) -> None:
    kept = cut(text, most)

    assert kept == text or (kept[: most // 2] == text[: most // 2] and kept.endswith(text[len(text) - most // 2 :]))
    assert len(kept) <= most + 60


class TestArithmetic:
    async def begun(self, task: Task | None = None, **options: Any) -> tuple[ArithmeticEnvironment, Opening]:
        environment: Any = built("arithmetic", **options).start()
        return environment, await environment.reset(task or Task(seed=3), 0)

    @pytest.mark.parametrize("operands", [2, 3, 6])
    async def test_the_scripted_player_calculates_step_by_step_and_is_right(self, operands: int) -> None:
        for seed in range(20):
            environment, opening = await self.begun(Task(seed=seed), form="text", operands=operands)
            for _ in range(operands - 1):
                said = environment.scripted(Random(0))
                step = await environment.step(Action(said, value=said))
                assert (said[-1], step.ends, step.invalid) == ("=", False, False)
            step = await environment.step(Action(environment.scripted(Random(0))))

            assert (step.stop, step.reward) == ("right", 1.0), opening.prompt

    async def test_calls_of_the_tool_are_answered_and_the_last_number_counts(self) -> None:
        environment, opening = await self.begun(operands=2)
        a, operator, b = environment._parts

        step = await environment.step(Action("", calls=(call("calculate", expression=f"{a}{operator}{b}"),)))
        value = texts(step)[0]
        step = await environment.step(Action(f"The value of 1 is {value}."))

        assert "calculate" in json.dumps(opening.tools)
        assert step.reward == 1.0

    @pytest.mark.parametrize(
        "wrong",
        [
            call("calculate", expression="1+2+3"),
            call("calculate", expression="1"),
            call("calculate"),
            call("calculate", expression=["1+2"]),
            call("compute", expression="1+2"),
            call("calculate", expression="5/0"),
        ],
    )
    async def test_wrong_calls_are_told_and_counted(self, wrong: ToolCall) -> None:
        environment, _ = await self.begun()

        step = await environment.step(Action("", calls=(wrong,)))

        assert texts(step)[0].startswith("error: ")
        assert (step.invalid, step.metrics["tool_errors"]) == (True, 1.0)

    async def test_an_answer_that_is_wrong_or_none_ends_without_reward(self) -> None:
        for text in ("", "no idea", "999999999"):
            environment, _ = await self.begun()
            step = await environment.step(Action(text))
            assert (step.stop, step.reward) == ("wrong", 0.0)

    async def test_a_call_in_the_last_turn_is_no_answer(self) -> None:
        environment, _ = await self.begun(operands=2)
        a, operator, b = environment._parts

        step = await environment.step(
            Action(f"{a}{operator}{b}", calls=(call("calculate", expression=f"{a}{operator}{b}"),), last=True)
        )

        assert step.stop == "wrong"

    async def test_noise_makes_mistakes_of_a_digit(self) -> None:
        environment, _ = await self.begun(form="text")

        said = {environment.scripted(Random(seed), noise=1.0) for seed in range(30)}

        assert len(said) > 5
        assert {len(text) for text in said} == {len(environment.scripted(Random(0)))}

    def test_turns_are_enough_for_the_expression(self) -> None:
        assert ArithmeticEnvironment(ArithmeticOptions(operands=6)).rules.max_turns == 12


class TestToolUse:
    @pytest.fixture
    def tasks(self, tmp_path: Path) -> Path:
        path = tmp_path / "tasks.jsonl"
        path.write_text('{"prompt": "What is 12 times 12?", "answer": "144", "verifier": "numeric"}\n')
        return path

    async def begun(self, tasks: Path, *tools: Mapping[str, Any], **options: Any) -> tuple[Any, Opening]:
        offered = built("tools", tools=list(tools), train_file=str(tasks), **options)
        environment: Any = offered.start()
        task: Any = offered.tasks.task("train", 0)
        return environment, await environment.reset(task, 0)

    async def test_results_come_as_messages_of_the_tool_and_an_answer_goes_to_the_verifier(self, tasks: Path) -> None:
        environment, opening = await self.begun(tasks, {"kind": "calculator"})
        step = await environment.step(
            Action("", calls=(call("calculate", expression="12*12"), call("calculate", expression="x")))
        )
        end = await environment.step(Action("144"))

        assert [tool["function"]["name"] for tool in opening.tools] == ["calculate"]  # type: ignore[index, call-overload]
        assert [(message.role, message.name) for message in step.observation] == [("tool", "calculate")] * 2
        assert texts(step) == ["144", "error: cannot calculate 'x'"]
        assert (step.invalid, step.metrics) == (False, {"tool_calls": 2.0, "tool_errors": 1.0})
        assert (end.verification.verifier, end.verification.arguments) == ("numeric", {"answer": "144"})

    async def test_a_result_has_the_id_of_its_call(self, tasks: Path) -> None:
        environment, _ = await self.begun(tasks, {"kind": "calculator"})
        calls = tuple(ToolCall("calculate", {"expression": text}, id=f"calculate:{text}") for text in ("1", "x"))

        step = await environment.step(Action("", calls=calls))

        assert [message.tool_call_id for message in step.observation] == ["calculate:1", "calculate:x"]

    async def test_a_tool_that_is_not_there_is_named_with_those_that_are(self, tasks: Path) -> None:
        environment, _ = await self.begun(tasks, {"kind": "calculator"})

        step = await environment.step(Action("", calls=(call("add", a=1),)))

        assert texts(step) == ["error: there is no tool 'add'; there are calculate"]
        assert step.invalid

    async def test_a_call_that_cannot_be_read_is_told_as_an_error(self, tasks: Path) -> None:
        environment, _ = await self.begun(tasks, {"kind": "calculator"})

        step = await environment.step(Action("", fault="a call cannot be read"))
        last = await environment.step(Action("", fault="a call cannot be read", last=True))

        assert texts(step) == ["error: a call cannot be read"]
        assert step.invalid
        assert last.verification is not None

    async def test_a_call_in_the_last_turn_is_judged_as_it_is(self, tasks: Path) -> None:
        environment, _ = await self.begun(tasks, {"kind": "calculator"})

        step = await environment.step(Action("", calls=(call("calculate", expression="1"),), last=True))

        assert step.verification is not None

    async def test_results_may_come_from_the_user_and_long_ones_are_cut(self, tasks: Path) -> None:
        tool = {"kind": "calculator"}
        assert built("tools", tools=[tool], train_file=str(tasks), result_role="user").roles == ("user",)
        environment, _ = await self.begun(tasks, tool, result_role="user", result_characters=20)

        step = await environment.step(Action("", calls=(call("calculate", expression="2**300"),)))

        assert step.observation[0].role == "user"
        assert "characters left out" in texts(step)[0]

    async def test_two_tools_of_a_name_are_refused(self, tasks: Path) -> None:
        with pytest.raises(ValueError, match="two tools are called 'calculate'"):
            await self.begun(tasks, {"kind": "calculator"}, {"kind": "calculator"})

    def test_tools_are_chosen_by_kind_and_their_settings_checked(self, tasks: Path) -> None:
        for tool, said in (
            ({"kind": "abacus"}, "calculator"),
            ({"kind": "mcp"}, "either command or url"),
            ({"kind": "search", "corpus": "absent.txt"}, "cannot read the corpus absent.txt"),
            ({"kind": "python", "url": "nowhere"}, "url"),
        ):
            with pytest.raises(EnvironmentFault, match=said):
                built("tools", tools=[tool], train_file=str(tasks))


class TestSearch:
    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        pytest.importorskip("bm25s")

    @pytest.fixture
    def corpus(self, tmp_path: Path) -> Path:
        path = tmp_path / "corpus.jsonl"
        lines: list[dict[str, str]] = [
            {"title": "Otter", "text": "The otter lives by rivers and eats fish."},
            {"title": "Heron", "text": "A heron stands in shallow water."},
            {"text": "Granite is a rock of quartz and feldspar. " * 10},
        ]
        path.write_text("\n".join(map(json.dumps, lines)))
        return path

    async def found(self, corpus: Path, query: str, **settings: Any) -> str:
        from env_service.builtin.search import SearchToolbox

        box = SearchToolbox(SearchTool(kind="search", corpus=corpus, **settings))
        return await box.call(call("search", query=query))

    async def test_the_passage_with_the_words_comes_first(self, corpus: Path) -> None:
        assert (await self.found(corpus, "which animal eats fish?")).startswith("[1] Otter: The otter")
        assert (await self.found(corpus, "water", results=1)) == "[1] Heron: A heron stands in shallow water."

    @pytest.fixture
    def marked(self, tmp_path: Path) -> Path:
        """A file that begins as some editors begin one, with a text that holds other ends of lines than a newline."""
        passage = {"title": "Newt", "text": "A newt\u2028is an\x85amphibian."}
        path = tmp_path / "marked.jsonl"
        path.write_text(json.dumps(passage, ensure_ascii=False) + "\r\n", encoding="utf-8-sig")
        return path

    async def test_a_passage_may_hold_any_mark_of_lines_and_the_file_begin_with_one_of_its_own(
        self, marked: Path
    ) -> None:
        assert (await self.found(marked, "amphibian")).startswith("[1] Newt: A newt")

    async def test_long_passages_are_cut(self, corpus: Path) -> None:
        assert len(await self.found(corpus, "granite", characters=40)) < 120

    @pytest.mark.parametrize("query", ["xylophone", "the", "?"])
    async def test_nothing_found_is_said(self, corpus: Path, query: str) -> None:
        with pytest.raises(ToolFault, match="nothing found"):
            await self.found(corpus, query)

    async def test_a_text_file_is_parted_by_empty_lines(self, tmp_path: Path) -> None:
        path = tmp_path / "corpus.txt"
        path.write_text("One about apples.\nStill apples.\n\n\nOne about pears.\n")

        assert await self.found(path, "pears") == "[1] One about pears."

    @pytest.mark.parametrize("line", ["[1]", '{"title": "x"}', '{"text": 1}', "nonsense"])
    async def test_a_line_that_is_no_passage_is_named(self, tmp_path: Path, line: str) -> None:
        path = tmp_path / "corpus.jsonl"
        path.write_text('{"text": "fine"}\n' + line)

        with pytest.raises(ValueError, match=r"corpus\.jsonl:2"):
            await self.found(path, "fine")
