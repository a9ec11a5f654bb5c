from random import Random

from env_service.builtin.duels import NimDuel, NimDuelOptions
from env_service.environments.interface import Task
from examples.nim.make_model import conversations, legal_moves


def test_the_players_of_the_warm_start_make_legal_moves_alone_until_nothing_is_left() -> None:
    for seed in range(20):
        game = NimDuel(NimDuelOptions(system_prompt=""))
        sides = conversations(game, Task(seed=seed), Random(seed))
        turns = [
            (shown["content"], said["content"])
            for side in sides
            for shown, said in zip(side[::2], side[1::2], strict=True)
        ]
        assert all(move in legal_moves(game, shown) for shown, move in turns)
        last = min(turns, key=lambda turn: sum(map(int, turn[0])))
        assert int(last[1][1]) == sum(map(int, last[0])), "the last object was taken"


def test_all_moves_that_the_heaps_allow_are_legal() -> None:
    assert legal_moves(NimDuel(NimDuelOptions()), "201") == ["a1", "a2", "c1"]
