"""Restarts of a process that dies again and again, until it is given up."""

from headway.supervisor import Restart, RestartPolicy, Restarts

POLICY = RestartPolicy(most=4, first_s=1.0, longest_s=5.0, stable_s=60.0)


def test_each_restart_waits_twice_as_long_as_the_one_before_up_to_a_bound() -> None:
    restarts, found = Restarts(POLICY), []
    for now in range(5):
        restarts.started("g", now=now)
        found.append(restarts.ended("g", now=now))
    assert found == [Restart(1, 1.0), Restart(2, 2.0), Restart(3, 4.0), Restart(4, 5.0), None]


def test_a_stable_life_makes_the_count_begin_again() -> None:
    restarts = Restarts(POLICY)
    for _ in range(4):
        restarts.started("g", now=0.0)
        restarts.ended("g", now=1.0)
    restarts.started("g", now=10.0)
    assert restarts.ended("g", now=70.0) == Restart(1, 1.0)
    assert restarts.count("g") == 5


def test_processes_are_counted_apart() -> None:
    restarts = Restarts(POLICY)
    for name in ("g", "g", "e"):
        restarts.started(name, now=0.0)
        last = restarts.ended(name, now=1.0)
    assert last == Restart(1, 1.0)
    assert (restarts.count("g"), restarts.count("e"), restarts.count("r")) == (2, 1, 0)


def test_the_pause_after_the_thousandth_death_is_the_longest() -> None:
    restarts = Restarts(RestartPolicy(most=5000, first_s=1.0, longest_s=30.0))
    paused: list[float] = []
    for _ in range(2000):
        restarts.started("env-service", now=0.0)
        restart = restarts.ended("env-service", now=0.0)
        assert restart is not None
        paused.append(restart.after_s)
    assert paused[:6] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    assert set(paused[6:]) == {30.0}
