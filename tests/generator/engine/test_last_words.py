"""Last words of an engine's process: the cause of its death in its log reaches its owner, as one sentence."""

import logging
import multiprocessing
import os
from logging.config import dictConfig

from generator.engine.last_words import LastWords, root_sentence
from generator.engine.options import OwnerTie, tied_to


def die(tie: OwnerTie) -> None:
    """In another process: as vLLM's core logs what it dies of, and what its owner's client makes of that."""
    dictConfig({"version": 1, "loggers": {"vllm": {"level": "ERROR", "handlers": []}}})  # as vLLM does at its start
    log = logging.getLogger("vllm.v1.engine.core")
    log.error("one without an exception")
    for error in (
        RuntimeError("Unsupported CPU attention configuration:\n  head_dim=16"),
        RuntimeError("Worker failed, please check the stack trace above for the root cause"),
    ):
        try:
            raise error
        except RuntimeError:
            log.exception("EngineCore encountered a fatal error.")


def test_the_root_sentence_of_a_death_in_another_process_is_kept() -> None:
    words = LastWords()
    assert words.said() == ""
    tie = OwnerTie(owner_pid=os.getpid(), last_words=words.path)
    child = multiprocessing.get_context("spawn").Process(target=die, args=(tie,))
    child.start()
    child.join()
    assert words.said() == "RuntimeError: Unsupported CPU attention configuration: head_dim=16"
    words.close()


def test_the_owner_itself_notes_nothing() -> None:
    before = logging.getLogRecordFactory()
    words = LastWords()
    tied_to(os.getpid(), words.path)
    assert logging.getLogRecordFactory() is before
    words.close()


def test_the_root_of_several_errors_is_the_first_cause_in_one_line() -> None:
    error = RuntimeError("it failed")
    error.__cause__ = ValueError("no\n  room")
    assert root_sentence(error) == "ValueError: no room"
    assert root_sentence(KeyError()) == "KeyError"
