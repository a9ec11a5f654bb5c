"""`env-service host` as a process of its own, and an env_service that plays with it by one line."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from env_service.environments import catalog
from env_service.environments.imported import EnvironmentFault
from env_service.environments.interface import (
    Action,
    EnvironmentFull,
    EnvironmentUnavailable,
    OfferedEnvironment,
)
from env_service.environments.task_configs import ClassTasks
from env_service.hosting import remote
from env_service.hosting.remote import description_at
from env_service.rollouts.completions import RolloutProgress
from tests.env_service.bench import MakeBench
from tests.env_service.hosting.other_environments import free_port
from tests.env_service.peers import lease
from tests.env_service.rollouts.test_conversation import TrajectoryWords, counted

ROOT = Path(__file__).parents[3]
TOKEN = "a-token-for-hosts"


@contextmanager
def hosted(*words: object, port: int | None = None) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """The address of a host of naughty environments, and its process."""
    port = port or free_port()
    command = [str(Path(sys.executable).parent / "env-service"), "host", "tests.env_service.hosting.naughty:Naughty"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([*command, "--port", str(port), *map(str, words)], env=environment, cwd=ROOT) as process:
        try:
            yield f"http://127.0.0.1:{port}", process
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("token") / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    return file


@pytest.fixture(scope="module")
def host(token_file: Path) -> Iterator[str]:
    with hosted("--isolation", "process", "--token-file", token_file) as (url, _):
        yield url


def offered(url: str, **options: Any) -> OfferedEnvironment:
    given = {"start_timeout_s": 90.0, **options}
    return catalog.build([ClassTasks.model_validate({"source": url, "name": "naughty", "options": given})])["naughty"]


async def test_an_environment_elsewhere_plays_and_its_misdeeds_are_named_here(
    host: str, token_file: Path, chat_bench: MakeBench, chat_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environment = offered(host, token_file=str(token_file))
    assert (environment.rules.max_turns, environment.metrics) == (4, {"conversations": "last"})
    said = ("boom", "leave", "killed", "on well")
    made = await chat_bench(
        TrajectoryWords(chat_model, *said), extra=[environment], environment_timeout_s=90.0, timeout_s=100.0
    )

    async with asyncio.timeout(120):
        granted = lease(environment="naughty", group_size=len(said))
        for _ in range(2):
            outcome: Any = await made.rollout.run(granted, RolloutProgress())

    raised, crashed, killed, well = outcome.group.trajectories
    assert well.reward.reward == 1.25
    assert "ValueError: a bug of mine" in raised.reward.error
    assert "naughty.py:" in raised.reward.error
    assert "exit code 3" in crashed.reward.error
    assert [one.reward.error_kind for one in (raised, crashed, killed)] == ["data", "data", "infrastructure"]
    assert 'raise ValueError("a bug of mine")' in caplog.text
    assert counted(made, "environment_faults_total", environment="naughty", kind="killed") == 2


def test_a_wrong_token_is_named_at_the_start(host: str, token_file: Path, tmp_path: Path) -> None:
    offered(host, token_file=str(token_file))
    description_at.cache_clear()
    with pytest.raises(EnvironmentFault, match=r"cannot be asked: HTTP Error 401: .* is token_file its token"):
        offered(host, start_timeout_s=0.0)


async def test_a_host_that_goes_away_in_the_middle_is_infrastructure() -> None:
    with hosted() as (url, process):
        environment: Any = offered(url).start()
        task: Any = offered(url).tasks.task("train", 0)
        async with asyncio.timeout(240):
            await environment.reset(task, 0)
            assert (await environment.step(Action("on"))).reward == 0.25
            process.kill()
            process.wait()
            with pytest.raises(EnvironmentUnavailable, match="the environment's host"):
                await environment.step(Action("on"))
            with pytest.raises(EnvironmentUnavailable):
                await environment.close()


async def test_a_host_that_is_away_is_waited_for_by_name_until_it_is_back(
    chat_bench: MakeBench, chat_model: Path
) -> None:
    port = free_port()
    with hosted(port=port) as (url, process):
        environment = offered(url)
        process.kill()
        process.wait()
    made = await chat_bench(
        TrajectoryWords(chat_model, "well"), extra=[environment], environment_timeout_s=240.0, timeout_s=250.0
    )
    progress = RolloutProgress()
    rolling = asyncio.ensure_future(made.rollout.run(lease(environment="naughty", group_size=1), progress))
    async with asyncio.timeout(240):
        while len(made.pauses) < 20:  # noqa: ASYNC110 - far more than the attempts of an opening
            await asyncio.sleep(0.02)
        assert (progress.waits_for, rolling.done()) == ("host", False)
        assert "cannot connect" in progress.said
        with hosted(port=port):
            outcome: Any = await rolling

    assert outcome.group.trajectories[0].reward.reward == 1.0


async def test_of_several_hosts_the_one_that_is_there_is_asked(chat_bench: MakeBench, chat_model: Path) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    with hosted() as (url, _):
        environment = offered(url, urls=[url, nobody])
        made = await chat_bench(
            TrajectoryWords(chat_model, *["well"] * 4), extra=[environment], environment_timeout_s=90.0
        )

        async with asyncio.timeout(240):
            outcome = await made.finished(lease(environment="naughty", group_size=4))

    assert [each.reward.reward for each in outcome.group.trajectories] == [1.0] * 4
    assert made.pauses == []


async def test_a_host_that_shows_no_sign_of_life_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_LIFE_EVERY_S", 0.1)
    with hosted() as (url, process):
        environment: Any = offered(url).start()
        task: Any = offered(url).tasks.task("train", 0)
        async with asyncio.timeout(240):
            await environment.reset(task, 0)
            monkeypatch.setattr("services.http.faults._SIGN_OF_LIFE_S", 0.5)
            process.send_signal(signal.SIGSTOP)
            try:
                with pytest.raises(EnvironmentUnavailable, match="the environment's host") as raised:
                    await environment.step(Action("on"))
            finally:
                process.send_signal(signal.SIGCONT)
            assert not isinstance(raised.value, EnvironmentFull)
            await environment.close()


def test_what_others_reach_needs_a_token_and_a_class_that_is_none_is_named() -> None:
    command = [str(Path(sys.executable).parent / "env-service"), "host"]
    for words, code, said in (
        (["guess:Guess", "--host", "0.0.0.0"], 2, b"can be reached from other machines and no token is set"),
        (["no_such_module:Guess", "--port", str(free_port())], 78, b"cannot import 'no_such_module'"),
    ):
        ended = subprocess.run([*command, *words], capture_output=True, timeout=120, check=False)
        assert ended.returncode == code, ended
        assert said in ended.stderr
