"""Engines that are forks of a process with all imports."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from generator.engine.fork_server import engines_by_forks
from tests.generator.conftest import Rig
from tests.process_ends import all_end

PROGRAM = """
import json, logging, multiprocessing, os, signal, sys, time
os.environ["TMPDIR"] = sys.argv[1]
from generator.engine import fork_server

def told(queue):
    handlers, level = logging.root.handlers[:], logging.root.level
    term = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    queue.put([os.getpid(), os.getppid(), "imported_before" in sys.modules, len(handlers), level, term])

def sleeps():
    time.sleep(600)

if __name__ == "__main__":
    sys.modules["imported_before"] = os
    logging.basicConfig(level=logging.DEBUG)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    fork_server.open_fork_server()
    fork_server.open_fork_server()
    context = multiprocessing.get_context("forkserver")
    queue = context.Queue()
    process = context.Process(target=told, args=(queue,))
    process.start()
    told_by = queue.get(timeout=60)
    process.join(60)
    killed = context.Process(target=sleeps)
    killed.start()
    os.kill(killed.pid, signal.SIGKILL)
    killed.join(60)
    folders = os.listdir(sys.argv[1])
    (own,) = [name for name in folders if "headway" in name]
    mode = os.stat(os.path.join(sys.argv[1], own)).st_mode & 0o777
    os.environ["SET_LATER"] = "1"
    changed = fork_server.changed_environment()
    fork_server.close_fork_server()
    left = [name for name in os.listdir(sys.argv[1]) if "headway" in name]
    print(json.dumps([told_by, process.exitcode, killed.exitcode, os.getpid(), folders, left, mode, changed]))
    sys.stdout.flush()
    os._exit(0)
"""


def test_a_process_of_it_has_the_imports_and_neither_the_logging_nor_the_signals_of_the_generator() -> None:
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program.py"
        program.write_text(PROGRAM, encoding="utf-8")
        sockets = Path(folder) / "sockets"
        sockets.mkdir()
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
        command = [sys.executable, str(program), str(sockets)]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0, ended.stderr
        (
            (pid, parent, had_imports, handlers, level, has_usual_term),
            exits,
            killed,
            own,
            folders,
            left,
            mode,
            changed,
        ) = json.loads(ended.stdout)
        assert had_imports
        assert (handlers, level, has_usual_term) == (0, 30, True)
        assert exits == 0
        assert killed == -9
        assert own not in (pid, parent)
        assert any(name.startswith(f"headway-engine-{own}.") for name in folders)
        assert mode == 0o700, "what reaches its socket is run"
        assert changed == {"SET_LATER": "1"}
        assert left == []
        assert all_end([parent]), "its pipe was all that kept it"


@pytest.mark.asyncio(loop_scope="session")
async def test_a_fork_looks_at_the_class_of_a_model_and_says_what_is_wrong_with_it(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`rig` has begun a fork server. vLLM would start an interpreter that imports all of it, for seconds of a core."""
    from vllm.model_executor.models import registry

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))  # without what it has noted before
    usual: Any = registry._run_in_subprocess
    with monkeypatch.context() as there, engines_by_forks():
        there.setattr(registry, "_SUBPROCESS_COMMAND", ["false"])
        models: Any = registry.ModelRegistry.models
        found = models["MistralForCausalLM"].inspect_model_cls()
        assert (found.architecture, found.is_text_generation_model) == ("MistralForCausalLM", True)
        assert os.listdir(tmp_path / "modelinfos"), "it is noted"
        gone = registry._LazyRegisteredModel("vllm.model_executor.models.llama", "NoSuchModel")
        with pytest.raises(RuntimeError, match="has no attribute 'NoSuchModel'"):
            gone.inspect_model_cls()
    assert registry._run_in_subprocess is usual
