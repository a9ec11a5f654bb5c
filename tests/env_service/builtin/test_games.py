"""The rules of the built-in games: their scripted players win, and a game is a pure function of its seed."""

from collections.abc import Callable, Hashable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from env_service.builtin.games import Game, in_rows, noisy_move
from env_service.builtin.grid_games import (
    Maze,
    MazeOptions,
    MazeState,
    SlidingOptions,
    SlidingPuzzle,
    Sokoban,
    SokobanOptions,
)
from env_service.builtin.number_games import Guessing, GuessingOptions, Nim, NimOptions, NimState
from env_service.builtin.wordle import Wordle, WordleOptions, answer, words

GAMES: dict[str, Callable[[], Game[Any]]] = {
    "maze": lambda: Maze(MazeOptions()),
    "large maze": lambda: Maze(MazeOptions(size=7, holes=0.4)),
    "sokoban": lambda: Sokoban(SokobanOptions()),
    "two boxes": lambda: Sokoban(SokobanOptions(size=4, boxes=2, walls=0.2)),
    "sliding puzzle": lambda: SlidingPuzzle(SlidingOptions(distance=21)),
    "nim": lambda: Nim(NimOptions()),
    "nim against the best": lambda: Nim(NimOptions(heaps=4, most=9, opponent="optimal")),
    "guessing": lambda: Guessing(GuessingOptions(tries=6)),
    "wordle": lambda: Wordle(WordleOptions(tries=20)),
    "wordle of three letters": lambda: Wordle(WordleOptions(length=3, tries=20)),
}
FULLY_SHOWN = [name for name in GAMES if not GAMES[name]().hidden]


def played(game: Game[Any], *, seed: int, noise: float, turns: int) -> tuple[list[Hashable], float | None]:
    """The states of a game by its scripted player, and how it ended."""
    chance = Random(seed)
    state = game.start(chance)
    states = [state]
    while game.success(state) is None and len(states) <= turns:
        state = game.play(state, noisy_move(game, state, chance, noise=noise), chance)
        states.append(state)
    return states, game.success(state)


@pytest.mark.parametrize("name", GAMES)
def test_its_scripted_player_wins(name: str) -> None:
    game = GAMES[name]()

    for seed in range(30):
        _, success = played(game, seed=seed, noise=0.0, turns=60)

        assert success == 1.0, f"seed {seed}"


@pytest.mark.parametrize("name", GAMES)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**62))
def test_the_same_seed_and_player_give_the_same_game(name: str, seed: int) -> None:
    game = GAMES[name]()

    assert played(game, seed=seed, noise=0.5, turns=8) == played(GAMES[name](), seed=seed, noise=0.5, turns=8)


@pytest.mark.parametrize("name", GAMES)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**62))
def test_legal_moves_are_of_the_alphabet_and_there_is_one_until_the_end(name: str, seed: int) -> None:
    game = GAMES[name]()
    states, success = played(game, seed=seed, noise=1.0, turns=12)

    for state in states[:-1] if success is not None else states:
        assert game.moves(state)
        assert set(game.moves(state)) <= set(game.alphabet)


@pytest.mark.parametrize("name", FULLY_SHOWN)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**62))
def test_what_is_shown_can_be_read_back(name: str, seed: int) -> None:
    game: Any = GAMES[name]()
    states, success = played(game, seed=seed, noise=0.7, turns=12)

    for state in states[:-1] if success is not None else states:
        assert game.read(game.show(state)) == state


@pytest.mark.parametrize("name", GAMES)
def test_seeds_give_different_starts(name: str) -> None:
    game = GAMES[name]()

    assert len({game.start(Random(seed)) for seed in range(50)}) > 15


def test_a_hole_loses_and_the_border_stops() -> None:
    game, chance = Maze(MazeOptions(size=2)), Random(0)
    state = MazeState(".H.G", 0)

    assert game.play(state, "u", chance) == state
    assert game.news(state, "u", state) == "wall"
    assert game.success(game.play(state, "r", chance)) == 0.0
    assert game.success(game.play(game.play(state, "d", chance), "r", chance)) == 1.0


def test_a_box_is_pushed_and_not_through_walls_or_boxes() -> None:
    game, chance = Sokoban(SokobanOptions(size=3, boxes=2)), Random(0)
    state = game.read("@$-" + "$.." + "#--")

    right, down = game.play(state, "r", chance), game.play(state, "d", chance)

    assert game.show(right) == "-@$" + "$.." + "#--"
    assert game.play(right, "r", chance) == right
    assert down == state
    assert in_rows(game.show(right), 3) == "-@$\n$..\n#--"


def test_sliding_moves_only_the_tiles_beside_the_gap() -> None:
    game = SlidingPuzzle(SlidingOptions())

    assert game.moves("123450") == ("3", "5")
    assert game.play("123450", "3", Random(0)) == "120453"
    assert game.success("123450") == 1.0


def test_a_tasks_distance_is_within_what_is_set_and_a_move_of_the_table_shortens_it() -> None:
    game = SlidingPuzzle(SlidingOptions(distance=5))
    for seed in range(50):
        state = game.start(Random(seed))

        assert 1 <= game.distance(state) <= 5
        assert game.distance(game.play(state, game.advise(state, Random(0)), Random(0))) == game.distance(state) - 1


def test_nim_is_lost_when_the_opponent_takes_the_last_object() -> None:
    game = Nim(NimOptions(opponent="optimal"))
    state = NimState((2, 0, 1))

    after = game.play(state, "a1", Random(0))
    assert after == NimState((0, 0, 1))
    assert game.news(state, "a1", after) == "a1"
    assert game.success(game.play(NimState((0, 0, 2)), "c1", Random(0))) == 0.0
    assert game.success(game.play(NimState((0, 0, 2)), "c2", Random(0))) == 1.0


def test_five_guesses_by_halves_find_almost_every_number_of_32() -> None:
    game = Guessing(GuessingOptions())

    won = sum(played(game, seed=seed, noise=0.0, turns=5)[1] == 1.0 for seed in range(500))

    assert 0.9 < won / 500 < 1.0


@pytest.mark.parametrize(
    ("guess", "secret", "said"),
    [
        ("olive", "onion", "g.g.."),
        ("green", "eagle", "y.yy."),
        ("sheep", "spoon", "g...y"),
        ("apple", "paper", "yyg.y"),
    ],
)
def test_a_letter_counts_as_often_as_the_secret_has_it(guess: str, secret: str, said: str) -> None:
    assert answer(guess, secret) == said


@given(length=st.sampled_from([3, 4, 5]), data=st.data())
def test_answers_place_what_agrees_and_only_the_secret_itself_fully(length: int, data: st.DataObject) -> None:
    guess, secret = (data.draw(st.sampled_from(words(length))) for _ in range(2))

    said = answer(guess, secret)

    assert [mark == "g" for mark in said] == [one == other for one, other in zip(guess, secret, strict=True)]
    assert sum(mark != "." for mark in said) == sum(min(guess.count(x), secret.count(x)) for x in set(guess))


@pytest.mark.parametrize("length", [3, 4, 5])
def test_word_lists_hold_each_word_once_and_of_its_length(length: int) -> None:
    found = words(length)

    assert len(found) >= 50
    assert len(set(found)) == len(found)
    assert all(len(word) == length and word.isascii() and word.isalpha() and word.islower() for word in found)


def test_a_board_that_is_too_large_for_its_table_is_refused() -> None:
    with pytest.raises(ValidationError, match="3 by 3 has 9 cells, expected at most 6"):
        SlidingOptions(rows=3, columns=3)
