"""Words of `headway rollback` where the learner is busy."""

import socket

import pytest

from headway import releases_command
from protocol.releases import RollBack
from services.config.sources import ConfigError
from services.diagnosis.asked import Target


def test_a_learner_that_is_busy_is_told_from_one_that_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases_command, "_SLACK_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = Target(kind="learner", url=f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ConfigError, match=r"rollback waits while it writes .* and still happens after that"):
            releases_command._asked(target, "rollback", RollBack(version="1.40", wait_s=0))
