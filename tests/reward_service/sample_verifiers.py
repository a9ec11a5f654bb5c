"""Verifiers as a user would write them, good and bad. Imported by path, by the tests and by worker processes."""

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from reward_service.verifier.submission import DataError, Score, Submission

LET_GO = threading.Event()


class NoArguments(BaseModel):
    """For verifiers that take none."""


class WordArguments(BaseModel):
    word: str


class FileArguments(BaseModel):
    file: str


def contains(submission: Submission, arguments: WordArguments) -> float:
    """1 when the completion contains the word."""
    return float(arguments.word in submission.completion)


async def contains_async(submission: Submission, arguments: WordArguments) -> Score:
    """1 when the completion contains the word, after giving way once."""
    await asyncio.sleep(0)
    found = arguments.word in submission.completion
    return Score(reward=float(found), components={"length": len(submission.completion)})


def hang_on_request(submission: Submission, arguments: NoArguments) -> float:
    """Never returns for the completion `hang`."""
    if submission.completion == "hang":
        signal.pause()
    return 1.0


async def cancels_async(submission: Submission, arguments: NoArguments) -> float:
    """Lets out the cancellation of a task of its own."""
    task = asyncio.create_task(asyncio.sleep(60))
    task.cancel()
    await task
    return 1.0


def cancels_sync(submission: Submission, arguments: NoArguments) -> float:
    """The same, on an event loop of its own."""
    return asyncio.run(cancels_async(submission, arguments))


async def hang_async(submission: Submission, arguments: NoArguments) -> float:
    """Never returns."""
    await asyncio.Event().wait()
    return 1.0


def read_pipe(submission: Submission, arguments: FileArguments) -> float:
    """The number that somebody writes into the named pipe; waits for it."""
    return float(Path(arguments.file).read_text())


def raise_error(submission: Submission, arguments: NoArguments) -> float:
    """Divides by zero."""
    return 1 / 0


def reject(submission: Submission, arguments: NoArguments) -> float:
    """Rejects every input."""
    raise DataError("the table of expected outputs is empty")


def not_a_number(submission: Submission, arguments: NoArguments) -> float:
    """Returns NaN."""
    return float("nan")


async def far_too_large(submission: Submission, arguments: NoArguments) -> float:
    """Returns what nobody is to train on."""
    return 2e6


def returns_text(submission: Submission, arguments: NoArguments) -> object:
    """Returns the wrong type."""
    return "good"


def chatty(submission: Submission, arguments: NoArguments) -> float:
    """Prints, on the stream that workers answer on if nobody protects it."""
    print("this is not JSON")
    os.write(1, b"nor is this\n")
    return 0.5


def die(submission: Submission, arguments: NoArguments) -> float:
    """Kills its own process."""
    os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def die_once(submission: Submission, arguments: FileArguments) -> float:
    """Kills its own process unless the file exists, which it makes first."""
    marker = Path(arguments.file)
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def too_much_memory(submission: Submission, arguments: NoArguments) -> float:
    """Asks for 64 GiB."""
    return float(len(bytes(1 << 36)))


def sees_variable(submission: Submission, arguments: NoArguments) -> float:
    """1 when the variable HEADWAY_TEST_SECRET is in the environment."""
    return float("HEADWAY_TEST_SECRET" in os.environ)


def process_id(submission: Submission, arguments: NoArguments) -> float:
    """The worker's process id."""
    return float(os.getpid())


def half_a_character(submission: Submission, arguments: NoArguments) -> float:
    """Fails with a message that no JSON can hold."""
    raise DataError("\ud800 is not a character")


async def half_a_name(submission: Submission, arguments: NoArguments) -> Score:
    """Returns a component whose name no JSON can hold."""
    return Score(reward=1.0, components={"\ud800": 1.0})


def length_slowly(submission: Submission, arguments: NoArguments) -> float:
    """The completion's length, after some milliseconds of work."""
    for _ in range(20):
        sum(range(10_000))
    return float(len(submission.completion))


def one_parameter(submission: Submission) -> float:
    """Has no arguments."""
    return 1.0


def untyped_arguments(submission: Submission, arguments: dict[str, str]) -> float:
    """Its arguments are no model."""
    return 1.0


def explained(submission: Submission, arguments: NoArguments) -> Score:
    """The completion's length, in words, too."""
    length = len(submission.completion)
    return Score(reward=length, explanation=f"{length} characters")


def best_of_group(
    completions: list[str], prompts: list[str], answer: list[int], log_metric: Any, log_extra: Any
) -> list[float | None]:
    """1 for the longest of a group; none for an empty completion."""
    log_metric("completions", len(completions))
    log_extra("seen", [f"{prompt} {one}" for prompt, one in zip(prompts, answer, strict=True)])
    most = max(map(len, completions))
    return [float(len(each) == most) if each else None for each in completions]


async def best_of_group_async(
    completions: list[str], prompts: list[str], answer: list[int], log_metric: Any, log_extra: Any
) -> list[float | None]:
    """The same."""
    return best_of_group(completions, prompts, answer, log_metric, log_extra)


def breaks_on_groups(completions: list[str], **columns: object) -> list[float]:
    """Raises."""
    raise KeyError(len(completions))


def reads_messages(completions: list[Any], **columns: object) -> list[float]:
    """Takes chats, as many of TRL's reward functions do."""
    return [float(len(completion[0]["content"])) for completion in completions]


async def reads_messages_async(completions: list[Any], **columns: object) -> list[float]:
    """The same."""
    return reads_messages(completions)


def hides_a_coroutine(completions: list[str], **columns: object) -> object:
    """Returns what an async function does when nobody awaits it."""
    return reads_messages_async(completions)


def dies_on_groups(completions: list[str], **columns: object) -> list[float]:
    """Kills its process."""
    os.kill(os.getpid(), signal.SIGKILL)
    return []


def short_of_one(completions: list[str], **columns: object) -> list[float]:
    """Returns a reward too few."""
    return [1.0] * (len(completions) - 1)


async def blocks_async(submission: Submission, arguments: NoArguments) -> float:
    """Blocks the event loop that it runs in until the test lets go; no timeout of that loop's ends it."""
    return float(LET_GO.wait(60))


async def knows_its_thread(submission: Submission, arguments: NoArguments) -> float:
    """1 if it runs in the service's own thread, after it has given way for a while."""
    await asyncio.sleep(0.05)
    return float(threading.current_thread() is threading.main_thread())


async def exits_async(submission: Submission, arguments: NoArguments) -> float:
    """Wants to end the process."""
    sys.exit("I quit")


def exits_sync(submission: Submission, arguments: NoArguments) -> float:
    """The same."""
    sys.exit("I quit")
