"""Games as environments: what the policy is told, what its words mean, what is counted."""

from random import Random
from typing import Any

import pytest
from pydantic import TypeAdapter

from env_service.builtin.games import GameEnvironment
from env_service.environments import catalog
from env_service.environments.imported import EnvironmentFault
from env_service.environments.interface import Action, OfferedEnvironment, Opening, Step, Task, ToolCall
from env_service.environments.task_configs import Tasks

ENTRIES: TypeAdapter[Tasks] = TypeAdapter(Tasks)
SOURCES = ["maze", "sokoban", "sliding_puzzle", "nim", "guessing", "wordle"]


def built(source: str, **options: Any) -> OfferedEnvironment:
    entry = ENTRIES.validate_python({"source": source, "name": "game", "options": options})
    return catalog.build([entry])["game"]


def begun(
    source: str, *, seed: int = 3, task: Task | None = None, **options: Any
) -> tuple[GameEnvironment[Any], Opening]:
    environment: Any = built(source, **options).start()
    return environment, environment.reset(task or Task(seed=7), seed)


def said(step: Step | Opening) -> str:
    prompt = step.prompt if isinstance(step, Opening) else step.observation
    assert isinstance(prompt, tuple)
    return prompt[-1].content


def act(environment: GameEnvironment[Any], text: str) -> Step:
    return environment.step(Action(text=text, value=text))


@pytest.mark.parametrize("source", SOURCES)
def test_the_scripted_player_is_understood_and_wins(source: str) -> None:
    environment, _ = begun(source)
    chance, step = Random(0), Step(stop="not begun")
    for _ in range(25):
        step = act(environment, environment.scripted(chance))
        assert not step.invalid
        if step.ends:
            break

    assert (step.stop, step.reward, step.metrics) == ("won", 1.0, {"success": 1.0, "moves": 1.0})


@pytest.mark.parametrize("source", SOURCES)
def test_members_of_a_group_that_do_the_same_see_the_same(source: str) -> None:
    (one, opening), (other, same) = begun(source), begun(source)
    assert opening == same
    chance = Random(1)
    for _ in range(8):
        move = one.scripted(chance, noise=0.5)
        step = act(one, move)
        assert step == act(other, move)
        if step.ends:
            return


@pytest.mark.parametrize("source", SOURCES)
def test_an_action_that_is_no_move_changes_nothing_and_is_counted(source: str) -> None:
    environment, opening = begun(source)

    step = act(environment, "xyzzy")

    assert step.invalid
    assert step.state == opening.state
    assert said(step) == f"That is not a legal move.\n{said(opening)}"


def test_instructions_are_a_system_message_unless_set_otherwise() -> None:
    _, told = begun("maze")
    _, untold = begun("maze", system_prompt="")

    assert [message.role for message in told.prompt] == ["system", "user"]  # type: ignore[union-attr]
    assert "u for up" in told.prompt[0].content  # type: ignore[union-attr]
    assert [message.role for message in untold.prompt] == ["user"]  # type: ignore[union-attr]


def test_a_grid_is_shown_in_a_line_or_as_a_picture() -> None:
    _, line = begun("maze")
    _, picture = begun("maze", layout="rows")

    assert said(picture).splitlines() == [said(line)[i : i + 4] for i in range(0, 16, 4)]


def test_each_turn_shows_the_whole_state_or_only_what_is_new() -> None:
    whole, _ = begun("guessing", task=Task(seed=5), numbers=32)
    brief, _ = begun("guessing", task=Task(seed=5), numbers=32, whole_state=False)
    secret = whole._state.secret
    wrong = "0" if secret else "1"
    answer = "low" if secret else "high"

    assert said(act(whole, wrong)) == wrong + answer
    assert said(act(brief, wrong)) == answer


def test_moves_can_be_single_letters_which_the_instructions_list() -> None:
    environment, opening = begun("nim", moves="letters")

    assert "a for a1, b for a2" in opening.prompt[0].content  # type: ignore[union-attr]
    assert len(environment.scripted(Random(0))) == 1
    assert act(environment, "a1").invalid


def test_more_moves_than_letters_are_refused_when_the_process_starts() -> None:
    with pytest.raises(EnvironmentFault, match="the game has 100 moves, expected at most 62"):
        built("guessing", numbers=100, moves="letters")


@pytest.mark.parametrize(
    "action",
    [
        Action(text=" U\n", value=" U\n"),
        Action(text="", value={"move": "u"}),
        Action(text="", calls=(ToolCall("move", {"move": "u"}),)),
    ],
)
def test_a_move_is_text_or_the_field_move_of_json_or_of_a_call(action: Action) -> None:
    environment, _ = begun("maze")

    assert not environment.step(action).invalid


@pytest.mark.parametrize("value", [None, ["u"], {"move": ["u"]}, {"other": "u"}, True, 3.5])
def test_values_of_other_kinds_are_no_moves(value: Any) -> None:
    environment, _ = begun("maze")

    assert environment.step(Action(text="", value=value)).invalid


@pytest.mark.parametrize("source", ["maze", "sokoban", "sliding_puzzle", "nim"])
def test_evaluation_starts_where_no_training_task_does(source: str) -> None:
    offered = built(source)
    starts: dict[str, set[str]] = {"train": set(), "evaluate": set()}
    for purpose in ("train", "evaluate"):
        for index in range(150):
            task: Any = offered.tasks.task(purpose, index)
            opening: Any = offered.start().reset(task, 0)
            starts[purpose].add(opening.state)

    assert starts["train"]
    assert starts["evaluate"]
    assert not starts["train"] & starts["evaluate"]


def test_a_game_with_too_few_starts_to_hold_some_out_says_so() -> None:
    options = {"heaps": 1, "most": 1}
    with pytest.raises(ValueError, match=r"too few different starts.*set held_out to false"):
        begun("nim", task=Task(seed=1, purpose="evaluate"), **options)

    begun("nim", task=Task(seed=1, purpose="evaluate"), held_out=False, **options)


def test_a_turn_may_cost_something() -> None:
    environment, _ = begun("guessing", turn_cost=0.1, numbers=2)

    assert act(environment, "7").reward == -0.1
    assert act(environment, str(environment._state.secret)).reward == 0.9


def test_options_out_of_bounds_are_named() -> None:
    with pytest.raises(EnvironmentFault, match="options: size"):
        built("maze", size=100)
    with pytest.raises(EnvironmentFault, match="options: unknown key 'holse'; did you mean holes"):
        built("maze", holse=0.1)
