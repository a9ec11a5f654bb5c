"""The end of the process."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from learner.command import main, resumed_if_there_is_a_run
from learner.config import LearnerConfig

FAULTS = """
import ctypes, resource, threading
from learner.command import keep_freed_memory
keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
BLOCK, TOUCHED = 300 << 20, 4 << 20

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(BLOCK) for _ in range(8)]
    for block in blocks:
        ctypes.memset(block, 1, TOUCHED)
    for block in blocks:
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

thread = threading.Thread(target=lambda: print(*[faults() for _ in range(3)]))
thread.start()
thread.join()
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another libc than glibc")
def test_memory_that_the_trainers_thread_frees_is_there_at_the_next_step_without_a_page_fault() -> None:
    """More than 2 GiB of it, of which a part is touched: a threshold that says 2 GiB would give it all back."""
    ended = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    first, second, third = map(int, ended.stdout.split())
    assert first > 100, "what is touched at first is faulted in"
    assert max(second, third) < first / 10


def test_auto_resumes_a_run_that_is_there_and_begins_one_that_is_not(tmp_path: Path) -> None:
    settings = {"model": tmp_path / "model", "steps": 1, "resume": "auto", "run": {"name": "r", "directory": tmp_path}}
    config = LearnerConfig.model_validate(settings)
    assert resumed_if_there_is_a_run(config).resume is False
    config.run.folder.mkdir()
    assert resumed_if_there_is_a_run(config).resume is True


@pytest.mark.parametrize("gpus", ["", "0,1"])
@pytest.mark.parametrize(
    ("width", "settings", "threads"),
    [(576, {}, 4), (576, {"ranks": 3}, 1), (576, {"threads": 2}, 2), (128, {}, 1), (128, {"threads": 2}, 2)],
)
def test_a_rank_has_as_many_threads_as_its_model_is_worth_unless_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: str, width: int, settings: dict[str, int], threads: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setattr("learner.config.cores", lambda: 4)
    (tmp_path / "config.json").write_text(f'{{"hidden_size": {width}}}')
    config = LearnerConfig.model_validate({"model": tmp_path, "steps": 1, **settings})
    assert config.threads_of_rank == threads


@pytest.mark.parametrize(
    "address", ["https://[::1/hook-of-ours", "https:///hook-of-ours", "http://h:port/hook-of-ours"]
)
def test_a_webhook_that_is_no_address_is_refused_without_showing_it(tmp_path: Path, address: str) -> None:
    settings = {"model": tmp_path / "model", "steps": 1}
    assert LearnerConfig.model_validate({**settings, "verdict": {"webhook": "https://[::1]:8080/hook"}})
    with pytest.raises(ValidationError, match="webhook is no address") as caught:
        LearnerConfig.model_validate({**settings, "verdict": {"webhook": address}})
    assert "hook-of-ours" not in str(caught.value)


def test_a_run_that_keeps_no_journal_is_not_resumed(tmp_path: Path) -> None:
    settings = {"model": tmp_path / "model", "steps": 1, "checkpoint": {"journal": False}}
    assert not LearnerConfig.model_validate(settings).resume
    for resume in (True, "auto"):
        with pytest.raises(ValidationError, match="a run without a journal cannot be resumed; set"):
            LearnerConfig.model_validate({**settings, "resume": resume})


def test_help_names_the_command_beside_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["learner", "--help"])
    with pytest.raises(SystemExit):
        main()

    assert "learner replay RUN" in capsys.readouterr().out
