"""The games of Gymnasium and TextArena, as they are installed."""

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from env_service.environments import catalog
from env_service.environments.imported import EnvironmentFault
from env_service.environments.interface import Action, Environment, EnvironmentFailed, Opening, Step, Task
from env_service.environments.task_configs import ClassTasks

TOYS = {"FrozenLake-v1": "ldru", "CliffWalking-v1": "urdl", "Taxi-v4": "snewpo", "Blackjack-v1": "sh"}
PLAYABLE = ["FifteenPuzzle-v0", "GuessTheNumber-v0", "Mastermind-v0", "Sokoban-v0", "TowerOfHanoi-v0"]


def begun(source: str, *, seed: int = 0, task: int = 7, **options: Any) -> tuple[Any, Opening]:
    entry = ClassTasks.model_validate({"source": source, "name": "game", "options": options})
    environment: Environment = catalog.build([entry])["game"].start()
    opening = environment.reset(Task(seed=task), seed)
    assert isinstance(opening, Opening)
    return environment, opening


def act(environment: Any, text: str) -> Step:
    step = environment.step(Action(text=text, value=text))
    assert isinstance(step, Step)
    return step


def shown(said: Step | Opening) -> str:
    return (said.prompt if isinstance(said, Opening) else said.observation)[-1].content  # type: ignore[union-attr]


class TestGymnasium:
    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        pytest.importorskip("gymnasium")

    @pytest.mark.parametrize("game", TOYS)
    def test_the_same_task_seed_and_moves_give_the_same_game(self, game: str) -> None:
        (one, opening), (other, same) = begun("gymnasium", id=game), begun("gymnasium", id=game)
        assert opening == same
        for letter in random.Random(1).choices(TOYS[game], k=40):
            step = act(one, letter)
            assert step == act(other, letter)
            if step.ends:
                break

    @pytest.mark.parametrize("game", TOYS)
    def test_what_is_no_letter_of_the_game_changes_nothing(self, game: str) -> None:
        environment, opening = begun("gymnasium", id=game)

        for text in ("", "left", "1", TOYS[game][:2]):
            step = act(environment, text)
            assert (step.invalid, shown(step)) == (True, shown(opening))

    @pytest.mark.parametrize("game", ["FrozenLake-v1", "CliffWalking-v1"])
    def test_a_walk_to_the_goal_wins(self, game: str) -> None:
        environment, opening = begun("gymnasium", id=game)

        for letter in way(shown(opening)):
            step = act(environment, letter)

        assert (step.stop, step.reward, step.metrics["success"]) == ("won", 1.0, 1.0)

    def test_a_hole_loses_and_every_task_has_a_map_of_its_own(self) -> None:
        environment, opening = begun("gymnasium", id="FrozenLake-v1")
        for letter in way(shown(opening), goal="H"):
            step = act(environment, letter)

        assert (step.stop, step.reward) == ("lost", 0.0)
        assert len({shown(begun("gymnasium", id="FrozenLake-v1", task=i)[1]) for i in range(10)}) > 5

    def test_a_taxi_brings_its_passenger_and_masked_actions_are_invalid(self) -> None:
        environment, opening = begun("gymnasium", id="Taxi-v4", reward="own")

        step = act(environment, "o")
        assert (step.invalid, step.reward) == (True, -10.0)
        for letter in fare(shown(opening)):
            step = act(environment, letter)

        assert (step.stop, step.reward, step.metrics["own_reward"]) == ("won", 20.0, 20.0)

    def test_blackjack_is_told_in_three_words_and_cards_come_from_the_group_s_seed(self) -> None:
        _, opening = begun("gymnasium", id="Blackjack-v1")
        total, dealer, ace = shown(opening).split()
        assert 4 <= int(total) <= 21
        assert 1 <= int(dealer) <= 10
        assert ace in ("ace", "no")

        ends = {
            tuple(act(begun("gymnasium", id="Blackjack-v1", task=task, seed=seed)[0], "s").reward for seed in range(9))
            for task in range(9)
        }
        assert any(len(set(rewards)) == 2 for rewards in ends), (
            "some hands are won with some seeds, and lost with others"
        )

    def test_an_unknown_game_is_refused_with_those_there_are(self) -> None:
        with pytest.raises(EnvironmentFault, match="Taxi-v4"):
            begun("gymnasium", id="Taxi-v3")


def way(picture: str, goal: str = "G") -> str:
    """The shortest way of A to the first cell of that kind that is reached, by the letters u, d, l, r."""
    rows = picture.splitlines()
    start = next((y, x) for y, row in enumerate(rows) for x, cell in enumerate(row) if cell == "A")
    waiting, seen = deque([(start, "")]), {start}
    while waiting:
        (y, x), done = waiting.popleft()
        if rows[y][x] == goal:
            return done
        for letter, there in {"u": (y - 1, x), "d": (y + 1, x), "l": (y, x - 1), "r": (y, x + 1)}.items():
            inside = 0 <= there[0] < len(rows) and 0 <= there[1] < len(rows[0])
            if inside and there not in seen and rows[there[0]][there[1]] in "AFS." + goal:
                seen.add(there)
                waiting.append((there, done + letter))
    raise AssertionError(f"no way to {goal} in\n{picture}")


def fare(told: str) -> str:
    """Moves that fetch the passenger and bring him home, by way of row 2, which has no walls."""
    places = {"R": (0, 0), "G": (0, 4), "Y": (4, 0), "B": (4, 3)}
    _, row, column, _, passenger, _, destination = told.split()

    def drive(place: tuple[int, int], to: tuple[int, int]) -> str:
        down, aside, then = 2 - place[0], to[1] - place[1], to[0] - 2
        return "".join(
            (plus if steps > 0 else minus) * abs(steps)
            for steps, plus, minus in ((down, "s", "n"), (aside, "e", "w"), (then, "s", "n"))
        )

    there = drive((int(row), int(column)), places[passenger])
    return f"{there}p{drive(places[passenger], places[destination])}o"


class TestTextArena:
    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        pytest.importorskip("textarena")

    @pytest.mark.parametrize("game", PLAYABLE)
    def test_games_are_a_function_of_their_task_however_their_turns_are_mixed(self, game: str) -> None:
        moves = ["1", "2", "up", "down", "A B", "A C", "1 2 3 4", "4 3 2 1", "[left]"]
        one, opening = begun("textarena", id=game)
        alone = [opening, *played(one, moves)]
        before = random.getstate()

        one, opening = begun("textarena", id=game)
        other, _ = begun("textarena", id=game, task=8)
        others = played(other, moves)
        mixed: list[Opening | Step] = [opening]
        for step in played(one, moves):
            mixed.append(step)
            next(others, None)

        assert mixed == alone
        assert random.getstate() == before, "the process's own random numbers are left alone"

    def test_a_game_is_won_through_its_brackets(self) -> None:
        environment, opening = begun("textarena", id="TowerOfHanoi-v0")
        assert "Tower" in shown(opening)

        for move in hanoi(3, "A", "C", "B"):
            step = act(environment, move)
            assert not step.invalid

        assert (step.stop, step.reward, step.metrics["success"]) == ("won", 1.0, 1.0)

    def test_a_game_that_ends_without_a_reward_is_at_fault(self) -> None:
        environment, _ = begun("textarena", id="TowerOfHanoi-v0")
        environment._env.close = lambda: ({}, {})

        act(environment, "no move")
        with pytest.raises(EnvironmentFailed, match="ended without a reward for player 0"):
            act(environment, "none either")

    def test_the_second_invalid_move_in_a_row_loses(self) -> None:
        environment, _ = begun("textarena", id="TowerOfHanoi-v0")

        first, second = act(environment, "no move"), act(environment, "none either")

        assert (first.invalid, first.ends) == (True, False)
        assert "invalid move" in shown(first)
        assert (second.invalid, second.stop) == (True, "invalid_move")
        assert second.reward < 1

    def test_every_turn_tells_only_what_is_new(self) -> None:
        environment, opening = begun("textarena", id="GuessTheNumber-v0")

        step = act(environment, "1")

        assert shown(opening) not in shown(step)
        assert "[1]" not in shown(step)

    @pytest.mark.parametrize(
        ("game", "said"),
        [
            ("Chesss-v0", "TextArena has no game 'Chesss-v0'"),
            ("Nim-v0", "cannot be played by one player"),
            ("QuantumTicTacToe-v0", "is not for one player"),
            ("Debate-v0", "API key"),
        ],
    )
    def test_a_game_that_cannot_be_played_here_is_refused_at_the_start(self, game: str, said: str) -> None:
        with pytest.raises(EnvironmentFault) as raised:
            begun("textarena", id=game)

        assert said in str(raised.value)


def played(environment: Any, moves: list[str]) -> Iterator[Step]:
    for move in moves:
        step = act(environment, move)
        yield step
        if step.ends:
            return


def hanoi(disks: int, here: str, there: str, spare: str) -> list[str]:
    if not disks:
        return []
    return [*hanoi(disks - 1, here, spare, there), f"{here} {there}", *hanoi(disks - 1, spare, there, here)]


def test_ids_are_names_and_nothing_else() -> None:
    with pytest.raises((ValidationError, EnvironmentFault)):
        begun("textarena", id="../x")
