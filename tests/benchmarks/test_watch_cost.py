"""Numbers that the benchmark of watching makes of its turns."""

from benchmarks.watch_cost import Found, RunMark, TurnsCost, table


def _cost(*turns: tuple[float, float]) -> TurnsCost:
    """Of turns of ten steps, each of so many seconds and CPU seconds."""
    cost = TurnsCost()
    for seconds, cpu in turns:
        cost.add(
            RunMark(5, 1.0, 3.0, {"thread a": 1.0}), RunMark(15, 1.0 + seconds, 3.0 + cpu, {"thread a": 1.5, "b": 0.25})
        )
    return cost


def test_a_cost_is_that_of_all_its_turns() -> None:
    cost = _cost((2.0, 4.0), (4.0, 6.0))
    assert (cost.step_s, cost.cpu_s) == (0.3, 0.5)
    assert cost.watching == {"thread a": 1.0, "b": 0.5}


def test_the_table_has_the_median_ratio_of_the_pairs_of_all_starts() -> None:
    first = Found([(_cost((2.0, 4.0)), _cost((2.0, 5.0))), (_cost((3.0, 4.0)), _cost((2.0, 4.0)))], 0.5, 2.0)
    second = Found([(_cost((2.2, 4.0)), _cost((2.0, 4.0)))], 1.5, 4.0)

    text = table([first, second], command="python -m benchmarks.watch_cost")

    assert "| of a step | 220.0 | 200.0 | **1.1000** | 1.0000 | 1.5000 | 1.2000 ± 0.1528 |" in text
    assert "| of CPU of a step | 400.0 | 400.0 | **1.0000** | 0.8000 | 1.0000 | 0.9333 ± 0.0667 |" in text
    assert "| b | 25.00 | 25.00 |" in text
    assert "took 1.0 s of CPU" in text
