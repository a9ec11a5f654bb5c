"""Errors of collectives in words for a log."""

import pytest

from services.collective_errors import in_plain_words


@pytest.mark.parametrize(
    ("said", "plain"),
    [
        (
            "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:549] Read error [127.0.0.1]:53: Connection "
            "reset by peer. This is typically caused by a remote worker hanging or bugs in the application. Check the "
            "logs of the remote worker before reporting an error. GLHF! 🏖️",
            "Read error [127.0.0.1]:53: Connection reset by peer.",
        ),
        (
            "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:210, remote process exited, NCCL "
            "version 2.28.9\nncclRemoteError: A call failed",
            "NCCL error, remote process exited, NCCL version 2.28.9 ncclRemoteError: A call failed",
        ),
        ("NCCL timeout in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:197", "NCCL timeout"),
        ("Operation timed out!", "Operation timed out!"),
    ],
)
def test_places_in_foreign_sources_and_guesses_are_left_out(said: str, plain: str) -> None:
    assert in_plain_words(RuntimeError(said)) == plain
