"""Scripted evaluations of candidates."""

from learner.evaluation.results import Evaluation, Sample, TaskSamples, result_of

TASKS = 20


def evaluation(version: int, *, solved: int, sampled_by: tuple[int, int] | None = None) -> Evaluation:
    """Of `TASKS` tasks the first `solved` ones are."""
    tasks = [
        TaskSamples(task, "q", (Sample("a", float(task < solved), None, 1, False),), verifier="v")
        for task in range(TASKS)
    ]
    result = result_of(
        tasks, version=version, failed=0, sampled_by=sampled_by or (version, version), success=1.0, ks=(1,)
    )
    return Evaluation(environment="e", result=result, tasks=tuple(tasks))
