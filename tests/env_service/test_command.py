"""The real process against scripted peers."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from env_service.command import main
from protocol.messages import FinishedLease, Goodbye, OutcomeReceipt
from services.zmq.sockets import RouterSocket
from tests.env_service.peers import (
    END,
    ScriptedCompletions,
    ScriptedLearner,
    ScriptedRewards,
    lease,
    part,
    served,
    serving,
)

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from env_service.command import main; main()"]


def test_help_answers_within_a_second_and_loads_nothing_heavy() -> None:
    probe = (
        "import sys, runpy; sys.argv = ['env-service', '--help']\n"
        "from env_service.command import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'vllm', 'transformers', 'reasoning_gym', 'tokenizers', 'fastapi'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    answer = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, timeout=30)

    assert answer.returncode == 0, answer.stderr
    assert "--reward-urls" in answer.stdout


def test_a_host_of_an_environment_that_is_none_is_told_in_a_sentence() -> None:
    for words in (["no-class", "--port", "0"], ["http://127.0.0.1:1", "--port", "0"]):
        answer = subprocess.run([*COMMAND, "host", *words], cwd=ROOT, capture_output=True, text=True, timeout=60)

        assert answer.returncode == 2, answer.stderr
        assert answer.stderr.startswith("env-service: ")
        assert not any(word in answer.stderr for word in ("validation error", "pydantic", "Traceback", "type="))


CLASS = """
class Guess:
    def reset(self, task, seed): return "say it:"
    def step(self, action): ...
"""


def test_a_class_in_the_current_folder_is_found_without_a_run_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CLASS, encoding="utf-8")
    console_script = str(Path(sys.executable).with_name("env-service"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    shown = subprocess.run(
        [console_script, "show", "mine:Guess"], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    assert "say it:" in shown.stdout

    hosting = [console_script, "host", "mine:Guess", "--port", "0"]
    with subprocess.Popen(hosting, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as host:
        assert host.stderr is not None
        try:
            said = next((line for line in host.stderr if "listening" in line or "CRITICAL" in line), "")
        finally:
            host.terminate()
    assert "listening at http://127.0.0.1:" in said


def test_the_running_process_loads_no_torch() -> None:
    probe = "import sys, env_service.app; sys.exit(bool({'torch', 'vllm', 'transformers'} & set(sys.modules)))"

    answer = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, timeout=60)

    assert answer.returncode == 0, answer.stderr


def test_help_names_the_commands_beside_serving(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["env-service", "--help"])
    with pytest.raises(SystemExit):
        main()

    named = re.findall(r"^  env-service ([a-z, ]+?)  ", capsys.readouterr().out, flags=re.MULTILINE)
    words = re.findall(r"[a-z]+", " ".join(named))
    assert {"list", "show", "play", "bench", "try", "host", "runtime", "tasks", "harness"} <= set(words)


async def _ready(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/readyz") as answer:
        return answer.status, await answer.text()


async def test_the_process_rolls_out_a_lease_reports_its_state_and_leaves_on_sigterm(model: Path) -> None:
    generator = ScriptedCompletions(lambda request: [part(index, [0, 8, 5, END]) for index in range(request.n)])
    rewards = ScriptedRewards(lambda text, arguments: 1.0 if text == arguments["answer"] else 0.0)
    async with (
        RouterSocket.bind("tcp://127.0.0.1:*") as router,
        served(generator.handle, "/v1/generate") as generator_url,
        served(rewards.handle, "/v1/score") as reward_url,
    ):
        options = ["--model", str(model), "--learner", router.address, "--reward-urls", reward_url, "--http.port", "0"]
        process = await asyncio.create_subprocess_exec(
            *COMMAND, *options, cwd=ROOT, env=dict(os.environ), stderr=asyncio.subprocess.PIPE
        )
        assert process.stderr is not None
        url = ""
        while "listening at" not in url:
            async with asyncio.timeout(60):
                url = (await process.stderr.readline()).decode()
        url = url.split("listening at ")[1].partition(";")[0].strip()
        learner = ScriptedLearner(router)
        status, body = await _ready(url)
        assert status == 503, body
        await learner.welcome(serving("g0", generator_url))
        await learner.grant(lease(3))
        group = (await learner.expect(FinishedLease)).group
        assert (group.lease_id, group.trajectories[0].completion_text) == (3, "085")
        await learner.say(OutcomeReceipt(incarnation=1, lease_id=3, attempt=0, purpose="train"))
        assert (await _ready(url))[0] == 200
        process.send_signal(signal.SIGTERM)
        await learner.expect(Goodbye)
        assert await asyncio.wait_for(process.wait(), 30) == 0
