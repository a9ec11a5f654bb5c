"""Environments that are classes named in the config."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from env_service.environments import catalog
from env_service.environments.imported import EnvironmentFault
from env_service.environments.interface import OfferedEnvironment, Opening, Task
from env_service.environments.rules import Rules
from env_service.environments.task_configs import AdditionTasks, LevelTasks, MixTasks, Tasks
from env_service.environments.tokenization import Tokenization
from tests.env_service.chat_models import model_with

ENTRIES: TypeAdapter[Tasks] = TypeAdapter(Tasks)


@pytest.fixture(autouse=True)
def importable_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def entry(name: str, **settings: Any) -> Tasks:
    return ENTRIES.validate_python({"source": f"sample_environments:{name}", "name": "mine", **settings})


def built(name: str, **settings: Any) -> OfferedEnvironment:
    return catalog.build([entry(name, **settings)])["mine"]


def task_of(environment: OfferedEnvironment, index: int, purpose: Any = "train") -> Task:
    task = environment.tasks.task(purpose, index)
    assert isinstance(task, Task)
    return task


def test_a_class_is_made_with_the_options_of_its_entry() -> None:
    opening = built("GuessNumber", options={"highest": 7}).start().reset(Task(seed=1), seed=0)

    assert isinstance(opening, Opening)
    assert "0 to 7" in opening.prompt[0].content  # type: ignore[union-attr]


def test_paths_in_options_count_from_the_folder_of_the_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project/words.txt").write_text("red blue")
    monkeypatch.chdir(tmp_path)

    made = built("FileReader", options={"words": "words.txt", "more": ["words.txt"]}, folder=tmp_path / "project")
    assert made.start().reset(Task(), seed=0) == "red blue red blue"
    assert built("FileReader", options={"words": "project/words.txt"}).start().reset(Task(), seed=0) == "red blue"


def test_rules_of_the_entry_go_before_those_of_the_class() -> None:
    environment = built("GuessNumber", rules={"max_turns": 3})

    assert (environment.rules.max_turns, environment.rules.turn_tokens) == (3, 8)
    assert (environment.roles, dict(environment.metrics)) == (("user",), {"tries": "last"})


def test_an_instance_may_set_rules_by_its_options() -> None:
    assert built("Bounded", options={"highest": 9}).rules.max_turns == 9
    assert built("Bounded", rules={"max_turns": 3}).rules.max_turns == 3


def test_tasks_are_numbered_each_with_a_seed_that_is_no_other_ones() -> None:
    environment = built("GuessNumber", train_tasks=50, evaluation_tasks=50)

    seeds = [task_of(environment, i, purpose).seed for purpose in ("train", "evaluate") for i in range(50)]
    again = [task_of(built("GuessNumber"), i).seed for i in range(50)]

    assert len(set(seeds)) == 100
    assert seeds[:50] == again
    assert task_of(built("GuessNumber", seed=1), 0).seed != seeds[0]


def test_a_class_may_have_tasks_of_its_own() -> None:
    environment = built("TwoWords")

    assert environment.task_count("train") == 2
    assert environment.start().reset(task_of(environment, 1), seed=0) == "fro"


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("Absent", {}, "has no class 'Absent'"),
        ("Stepless", {}, "no method step"),
        ("TwoParameters", {}, "the constructor takes options, extra"),
        ("GuessNumber", {"options": {"highest": "many"}}, "options: highest"),
        ("TwoWords", {"options": {"highest": 3}}, "takes no options, got highest"),
        ("WrongRole", {}, "roles"),
        ("Bounded", {"options": {"highest": 1}}, "cannot be made: ValueError: two numbers at least"),
    ],
)
def test_a_class_that_does_not_fit_is_named_with_what_is_wrong(name: str, settings: Any, said: str) -> None:
    with pytest.raises(EnvironmentFault, match="environment mine") as raised:
        built(name, **settings)

    assert said in str(raised.value)


def test_a_module_that_cannot_be_imported_is_named() -> None:
    absent = ENTRIES.validate_python({"source": "no_such_module:Maze", "name": "mine"})

    with pytest.raises(EnvironmentFault, match="cannot import 'no_such_module'"):
        catalog.build([absent])


def test_a_module_that_ends_the_process_is_named_with_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "leaving_environment.py").write_text("import sys\nsys.exit(0)\n")
    leaving = ENTRIES.validate_python({"source": "leaving_environment:Maze", "name": "mine"})

    said = r"mine .*'leaving_environment' calls sys.exit when imported: .*leaving_environment.py, line 2: sys.exit"
    with pytest.raises(EnvironmentFault, match=said):
        catalog.build([leaving])


def test_a_source_that_is_neither_known_nor_a_path_is_refused_with_what_there_is() -> None:
    with pytest.raises(ValidationError, match=r"Expected one of addition, .*jsonl.*package\.module:Class"):
        ENTRIES.validate_python({"source": "additon", "name": "mine"})


def test_a_mix_may_have_environments_of_one_turn_and_of_several() -> None:
    parts = [{"environment": "mine"}, {"environment": "sums", "weight": 3.0}]
    mix = MixTasks.model_validate({"source": "mix", "name": "all", "parts": parts})
    made = catalog.build([mix, entry("GuessNumber"), AdditionTasks(name="sums")])

    assert list(made) == ["all", "mine", "sums"]
    found = [made["all"].at("train", index) for index in range(made["all"].task_count("train"))]
    assert {part.name for part, _ in found} == {"mine", "sums"}
    assert sum(part.name == "sums" for part, _ in found) == 3 * sum(part.name == "mine" for part, _ in found)
    assert made["all"].at("evaluate", 1) == (made["sums"], 0)
    assert made["mine"].at("train", 7) == (made["mine"], 7)


def test_levels_are_of_equal_size_and_may_be_mixes() -> None:
    mix = MixTasks.model_validate({"source": "mix", "name": "hard", "parts": [{"environment": "mine"}]})
    levels = LevelTasks.model_validate({"source": "levels", "name": "all", "levels": ["sums", "hard"]})
    made = catalog.build([levels, mix, entry("GuessNumber"), AdditionTasks(name="sums")])
    size = max(made["sums"].task_count("train"), made["hard"].task_count("train"))

    assert made["all"].levels == 2
    assert made["all"].task_count("train") == 2 * size
    assert made["all"].at("train", 5) == (made["sums"], 5)
    assert made["all"].at("train", size + 3) == (made["mine"], 3)
    assert [made["all"].at("evaluate", index)[0].name for index in range(3)] == ["sums", "mine", "sums"]


def test_a_template_that_cannot_carry_what_an_environment_says_is_named_with_the_role(tmp_path: Path) -> None:
    tokenization = Tokenization(model_with("tool_messages_vanish", tmp_path))

    catalog.check_templates({"mine": built("GuessNumber")}, tokenization)
    with pytest.raises(EnvironmentFault, match=r"environment mine: .* cannot carry role tool: it loses a message"):
        catalog.check_templates({"mine": built("Looking")}, tokenization)


@pytest.mark.parametrize(
    ("template", "form", "fits"),
    [
        ("invoked_calls", "auto", False),
        ("invoked_calls", "hermes", True),
        ("tools_in_system", "auto", True),
        ("chatml", "auto", True),
    ],
)
def test_a_template_whose_calls_nobody_would_read_is_refused_where_tools_are_called(
    template: str, form: str, fits: bool, tmp_path: Path
) -> None:
    tokenization = Tokenization(model_with(template, tmp_path))
    calling = replace(built("GuessNumber"), rules=Rules.model_validate({"action": "tools", "tool_format": form}))
    catalog.check_templates({"mine": replace(calling, rules=Rules())}, tokenization)
    if fits:
        catalog.check_templates({"mine": calling}, tokenization)
        return
    with pytest.raises(EnvironmentFault, match=r"environment mine: .* a form that is not known; expected one of"):
        catalog.check_templates({"mine": calling}, tokenization)


@pytest.mark.parametrize(
    ("rules", "changes", "said"),
    [
        (
            Rules(history="summarize"),
            {},
            'history is "summarize" without context_tokens; expected the tokens that the prompt of a turn may',
        ),
        (
            Rules(history="summarize", context_tokens=100, max_turns=513),
            {},
            'history is "summarize", and max_turns is 513; expected at most 512',
        ),
        (Rules(context_tokens=100), {}, 'context_tokens is 100, and history is "append".*; set history = "summarize"'),
        (
            Rules(history="summarize", context_tokens=100),
            {"players": ("a", "b")},
            'history is "summarize", and this is a game of several players; expected "append" or "split"',
        ),
        (
            Rules(history="summarize", context_tokens=100),
            {"agent": lambda: None},
            'history is "summarize", and this is an agent, which tells its own history',
        ),
    ],
)
def test_rules_of_summaries_that_do_nothing_are_refused(
    rules: Rules, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    tokenization = Tokenization(model_with("chatml", tmp_path))
    environment = replace(built("GuessNumber"), rules=rules, **changes)

    with pytest.raises(EnvironmentFault, match=f"environment mine: rules: {said}"):
        catalog.check_templates({"mine": environment}, tokenization)
