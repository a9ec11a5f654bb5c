"""Numbers of whole runs, where a slow evaluation took the place of one that was due."""

from benchmarks.task_draws_runs import DrawnRun, table
from benchmarks.whole_runs import RunFiles, tokens_to, with_steps

FOUND = RunFiles(
    summary={},
    entries=[
        {"kind": "evaluation", "version": 0, "accuracy": 0.3},
        {"kind": "step", "step": 1, "sampled_tokens": 10},
        {"kind": "step", "step": 2, "sampled_tokens": 20},
        {"kind": "evaluation", "version": 2, "accuracy": 0.5},
        {"kind": "step", "step": 3, "sampled_tokens": 40},
        {"kind": "step", "step": 4, "sampled_tokens": 80},
        {"kind": "evaluation", "version": 4, "accuracy": 0.4},
    ],
)


def test_tokens_are_those_up_to_the_first_evaluation_that_reaches_the_target() -> None:
    sampled = FOUND.sampled_until(FOUND.accuracies)
    assert sampled == {0: 0, 2: 30, 4: 150}
    assert [tokens_to(target, FOUND.accuracies, sampled) for target in (0.2, 0.4, 0.5, 0.6)] == [0, 30, 30, None]


def test_a_result_comes_out_of_json_with_its_steps_as_numbers() -> None:
    assert with_steps({"seed": 1, "rewards": {"0": 0.5, "25": 1.0}}, "rewards") == {
        "seed": 1,
        "rewards": {0: 0.5, 25: 1.0},
    }


def test_the_middle_of_a_run_is_the_evaluation_nearest_to_it() -> None:
    accuracies = {0: 0.3, 40: 0.5, 130: 0.6, 200: 0.7}  # none of 100
    run = DrawnRun(
        by="order",
        seed=0,
        machine="2 cores (M), load 1.0 at the end; commit c",
        accuracies=accuracies,
        sampled=dict.fromkeys(accuracies, 1),
        spread=0.5,
        seconds=1.0,
    )
    assert run.middle == 0.6
    assert "| 0.300 | 0.600 | **0.700** |" in table([run, DrawnRun(**{**vars(run), "by": "signal"})])
