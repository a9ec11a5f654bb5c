import math
from collections import Counter, deque

from hypothesis import given
from hypothesis import strategies as st

from learner.tenants.fairness import Backlog, DeficitRoundRobin, RoundBudget


class Robin:
    """Rounds of so many tokens."""

    def __init__(self, tokens: int) -> None:
        self._rounds = DeficitRoundRobin[tuple[str, int]](cost=lambda operation: operation[1])
        self._tokens = tokens

    def take(self, backlogs: list[Backlog[tuple[str, int]]]) -> list[tuple[str, int]]:
        return self._rounds.take(backlogs, round_tokens=self._tokens)


def robin(tokens: int = 1000) -> Robin:
    return Robin(tokens)


def backlog(tenant: str, sizes: list[int], weight: float = 1.0) -> Backlog[tuple[str, int]]:
    return Backlog(tenant, weight, [deque((tenant, size) for size in sizes)])


def test_a_round_with_room_takes_everything_in_order() -> None:
    taken = robin().take([backlog("a", [10, 20, 30]), backlog("b", [100])])
    assert [size for tenant, size in taken if tenant == "a"] == [10, 20, 30]
    assert ("b", 100) in taken


def test_two_that_flood_get_shares_by_their_weights() -> None:
    rounds, given_tokens = robin(), Counter[str]()
    one, two = backlog("a", [100] * 600), backlog("b", [100] * 600, weight=3.0)
    for _ in range(30):
        for tenant, size in rounds.take([one, two]):
            given_tokens[tenant] += size
    assert 2.7 <= given_tokens["b"] / given_tokens["a"] <= 3.3


def test_one_small_operation_is_not_behind_a_flood() -> None:
    rounds = robin()
    flood = backlog("a", [100] * 1000)
    for _ in range(3):
        rounds.take([flood])
    assert ("b", 50) in rounds.take([flood, backlog("b", [50])])


def test_an_operation_larger_than_a_round_is_done_too() -> None:
    assert robin(100).take([backlog("a", [1_000_000])]) == [("a", 1_000_000)]


def test_a_tenant_with_nothing_to_do_saves_nothing() -> None:
    rounds = robin()
    for _ in range(50):
        rounds.take([backlog("a", [10]), backlog("b", [100] * 100)])
    flood_a, flood_b = backlog("a", [100] * 100), backlog("b", [100] * 100)
    shares = Counter(tenant for tenant, _ in rounds.take([flood_a, flood_b]))
    assert abs(shares["a"] - shares["b"]) <= 2


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3000)), max_size=40), st.integers(16, 5000))
def test_rounds_end_and_keep_the_order_of_each(operations: list[tuple[str, int]], tokens: int) -> None:
    rounds = robin(tokens)
    backlogs = [backlog(name, [size for owner, size in operations if owner == name], 1.5) for name in "abc"]
    done: list[tuple[str, int]] = []
    while any(each.queues[0] for each in backlogs):
        taken = rounds.take(backlogs)
        assert taken
        done += taken
    for name in "abc":
        assert [each for each in done if each[0] == name] == [each for each in operations if each[0] == name]


def test_a_round_holds_what_the_trainer_does_in_a_short_time() -> None:
    budget = RoundBudget(seconds=0.25, most=60_000)
    assert budget.tokens() == 4096, "nothing is known yet"
    for _ in range(40):
        budget.learn(budget.tokens(), budget.tokens() / 20_000)
    assert 4900 <= budget.tokens() <= 5100
    for _ in range(40):
        budget.learn(budget.tokens(), budget.tokens() / 1e9)
    assert budget.tokens() == 60_000
    for _ in range(40):
        budget.learn(100, 50.0)
    assert budget.tokens() == 512


def test_rounds_without_tokens_teach_nothing() -> None:
    budget = RoundBudget(seconds=1.0, most=60_000)
    budget.learn(10_000, 1.0)
    budget.learn(0, 3.0)
    assert budget.tokens() == 10_000


def test_turns_of_any_length_hold_the_most_tokens() -> None:
    budget = RoundBudget(seconds=math.inf, most=60_000)
    budget.learn(10_000, 1.0)
    assert budget.tokens() == 60_000
