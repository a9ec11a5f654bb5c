"""A worker process: `python -m reward_service.verifier.worker PATH MEMORY_LIMIT_MIB PARENT_PID`.

It runs the verifier at one import path: reads jobs from its standard input and answers each on its standard output, in
order. It ends with its input, and it is killed with its parent. It has no deadline of its own: whoever asked kills it.
"""

import asyncio
import resource
import sys
from collections.abc import Sequence

from protocol.rewards import ScoreError
from reward_service.verifier.submission import (
    Outcome,
    Score,
    Submission,
    VerifierFunction,
    ended_itself,
    error_of,
    load_function,
    outcome_of,
    to_score,
    validate_arguments,
)
from reward_service.verifier.worker_pool import VerifierJob, WorkerReply
from services.worker_process import MAX_LINE_BYTES, serve_lines


def main() -> None:
    """Say whether the verifier could be loaded, then answer jobs until the input ends."""
    path, memory_limit_mib, parent = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

    def load() -> VerifierFunction:
        _limit_memory(mib=memory_limit_mib)
        return load_function(path)

    def answered(verifier: VerifierFunction, line: bytes) -> bytes:
        job = VerifierJob.model_validate_json(line)
        return _line(answer(verifier=verifier, job=job), job)

    serve_lines(
        parent=parent,
        load=load,
        answer=answered,
        describe=lambda error: error_of(error).message,
    )


def answer(*, verifier: VerifierFunction, job: VerifierJob) -> WorkerReply:
    """The verifier's score of the job, or its error. Never raises what the verifier raises."""
    try:
        first, *others = map(_reply, _judged(verifier, (job, *job.beside)))
    except (asyncio.CancelledError, SystemExit) as error:
        return _failed(job, error_of(ended_itself(error)))
    except Exception as error:  # noqa: BLE001  whatever a verifier raises becomes an error of these items alone
        return _failed(job, error_of(error))
    return first.model_copy(update={"beside": tuple(others)})


def _judged(verifier: VerifierFunction, jobs: Sequence[VerifierJob]) -> Sequence[Outcome]:
    """Raises what the verifier raises."""
    submissions = [Submission(completion=job.completion, prompt=job.prompt) for job in jobs]
    arguments = [validate_arguments(model=verifier.arguments, arguments=job.arguments) for job in jobs]
    if len(jobs) == 1:
        return [Outcome(result=to_score(verifier.function(submissions[0], arguments[0])))]
    assert verifier.together is not None, "several submissions for a function that takes one"
    return [outcome_of(value) for value in verifier.together(submissions, arguments)]


def _reply(outcome: Outcome) -> WorkerReply:
    match outcome.result:
        case ScoreError() as error:
            return WorkerReply(error=error)
        case Score() as score:
            return WorkerReply(reward=score.reward, components=dict(score.components), explanation=score.explanation)


def _failed(job: VerifierJob, error: ScoreError) -> WorkerReply:
    return WorkerReply(error=error, beside=tuple(WorkerReply(error=error) for _ in job.beside))


def _line(reply: WorkerReply, job: VerifierJob) -> bytes:
    line = reply.model_dump_json().encode()
    if len(line) < MAX_LINE_BYTES:
        return line
    return _failed(job, error_of(ValueError("the result is too large"))).model_dump_json().encode()


def _limit_memory(*, mib: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (mib << 20, mib << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
