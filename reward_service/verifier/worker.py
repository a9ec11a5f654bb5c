"""A worker process: `python -m reward_service.verifier.worker PATH MEMORY_LIMIT_MIB PARENT_PID`.

It runs the verifier at one import path: reads jobs from its standard input and answers each on its standard output, in
order. It ends with its input, and it is killed with its parent. It has no deadline of its own: whoever asked kills it.
"""

import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import BinaryIO, TypeVar

from reward_service.verifier.submission import (
    Submission,
    VerifierFunction,
    error_of,
    load_function,
    to_score,
    validate_arguments,
)
from reward_service.verifier.worker_pool import MAX_LINE_BYTES, Job, Reply
from services.process import parent_death_signal

T = TypeVar("T")


def main() -> None:
    """Say whether the verifier could be loaded, then answer jobs until the input ends."""
    path, memory_limit_mib, parent = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

    def load() -> VerifierFunction:
        _limit_memory(mib=memory_limit_mib)
        return load_function(path)

    serve_lines(
        parent=parent,
        load=load,
        answer=lambda verifier, line: _line(answer(verifier=verifier, job=Job.model_validate_json(line))),
    )


def serve_lines(*, parent: int, load: Callable[[], T], answer: Callable[[T, bytes], bytes]) -> None:
    """The life of a worker process: `load`, say in a Reply whether that went well, answer lines until the input ends.

    It is killed with the process `parent`. What `answer` raises ends it.
    """
    parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        return
    lines, replies = private_pipes()
    try:
        loaded = load()
    except Exception as error:  # noqa: BLE001  loading runs code of others, and the parent must hear why it failed
        _send(replies, _line(Reply(error=error_of(error))))
        return
    _send(replies, _line(Reply()))
    for line in lines:
        _send(replies, answer(loaded, line))


def answer(*, verifier: VerifierFunction, job: Job) -> Reply:
    """The verifier's score of the job, or its error. Never raises what the verifier raises."""
    submission = Submission(completion=job.completion, prompt=job.prompt)
    try:
        arguments = validate_arguments(model=verifier.arguments, arguments=job.arguments)
        score = to_score(verifier.function(submission, arguments))
    except Exception as error:  # noqa: BLE001  whatever a verifier raises becomes an error of this item alone
        return Reply(error=error_of(error))
    return Reply(reward=score.reward, components=dict(score.components))


def _line(reply: Reply) -> bytes:
    line = reply.model_dump_json().encode()
    if len(line) < MAX_LINE_BYTES:
        return line
    return Reply(error=error_of(ValueError("the result is too large"))).model_dump_json().encode()


def _send(replies: BinaryIO, line: bytes) -> None:
    replies.write(line + b"\n")
    replies.flush()


def private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the pipes off descriptors 0 and 1, so that a verifier that prints or reads does not break the exchange."""
    jobs, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return jobs, replies


def _limit_memory(*, mib: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (mib << 20, mib << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
