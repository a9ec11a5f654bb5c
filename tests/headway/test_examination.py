"""The examination in a child: what it finds, and what is said when it does not come to its end."""

from pathlib import Path

import pytest

from headway import checking
from headway.doctor import before
from headway.examination import examined_apart
from headway.run_configs import Configs, load_agreeing
from services.config.sources import ConfigError
from tests.headway.mistakes.small_model import small_model


@pytest.fixture(autouse=True)
def without_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever runs on this machine meanwhile, and without its GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(checking, "check_port", lambda what, host, port: before.good(what, host))


def with_environment(folder: Path, module: str, code: str) -> Configs:
    """A run whose one environment is in a module of this code."""
    (folder / f"{module}.py").write_text(code)
    model = small_model(folder / "model")
    (folder / "run.toml").write_text(
        f'[env-service]\nmodel = "{model}"\n[[env-service.environments]]\nsource = "{module}:Maze"\nname = "mine"\n'
    )
    return load_agreeing(folder / "run.toml", {})


def test_faults_that_the_child_finds_are_raised_here(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        examined_apart(with_environment(tmp_path, "broken_maze", "1 / 0\n"))
    (said,) = raised.value.problems
    assert "'broken_maze' raises when imported: ZeroDivisionError" in said


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("killed", "os.kill(os.getpid(), signal.SIGKILL)", "the check was ended by SIGKILL: starting all the same"),
        ("left", "os._exit(3)", "the check ended early, with exit code 3: starting all the same"),
        ("left_well", "os._exit(0)", "the check ended early, with exit code 0: starting all the same"),
        ("slow", "time.sleep(60)", "the check took more than 2 s: starting all the same"),
    ],
)
def test_a_child_that_tells_nothing_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, code: str, said: str
) -> None:
    configs = with_environment(tmp_path, f"{name}_maze", f"import os, signal, time\n{code}\n")
    examined_apart(configs, limit_s=2.0 if name == "slow" else 250.0)
    assert [message for message in caplog.messages if message.endswith(said)]
