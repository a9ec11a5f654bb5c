"""A whole run from Python, with a function as reward and a chat template of one's own, then its evaluation."""

import json
from pathlib import Path
from typing import Any

import pytest

import headway
from services.model_folder import chat_template
from tests.e2e.run_files import write_run_file

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]  # torch, vLLM and DeepSpeed are loaded on a busy machine

REWARD = '''
from pydantic import BaseModel
from reward_service.verifier import Submission

class Arguments(BaseModel):
    wanted: str

def wanted(submission: Submission, arguments: Arguments) -> float:
    """The share of wanted characters."""
    return sum(one in arguments.wanted for one in submission.completion) / max(1, len(submission.completion))
'''
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}="
STEPS = 10


def settings(folder: Path) -> dict[str, Any]:
    (folder / "wanting.py").write_text(REWARD)
    tasks = [{"prompt": f"{a}+{a}", "verifier": "wanted", "arguments": {"wanted": "0123"}} for a in range(10, 40)]
    for name, some in (("tasks.jsonl", tasks[:20]), ("held_out.jsonl", tasks[20:])):
        (folder / name).write_text("".join(json.dumps(each) + "\n" for each in some))
    (folder / "mine.jinja").write_text(TEMPLATE)
    files = {"train_file": str(folder / "tasks.jsonl"), "evaluation_file": str(folder / "held_out.jsonl")}
    return {
        "run": {"name": "mine", "chat_template": str(folder / "mine.jinja")},
        "learner": {
            "steps": STEPS,
            "training": {"optimizer": {"learning_rate": 3e-3}},
            "evaluation": {"tasks": 0, "final_tasks": 0},
        },
        "reward_service": {"verifiers": [{"name": "wanted", "function": "wanting:wanted"}]},
        "env_service": {"environments": [{"name": "sums", "source": "jsonl", **files}]},
    }


async def test_a_model_is_trained_and_evaluated_from_python_where_an_event_loop_runs(
    untrained_model: Path, tmp_path: Path
) -> None:
    path = write_run_file(tmp_path, model=untrained_model).path
    given = settings(tmp_path)

    run = headway.train(path, quiet=True, **given)

    steps = run.metrics("step")
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert steps[0]["grad_norm"] > 0
    assert run.summary["reward_last"] > run.summary["reward_first"], [step["reward_mean"] for step in steps]
    assert {sample["prompt"][-1] for sample in run.samples()} == {"="}, "by the template"
    assert chat_template(run.model) == TEMPLATE
    assert chat_template(untrained_model) == ""

    found = headway.evaluate(path, model=run.model, tasks=10, samples=8, quiet=True, **given)

    assert found["result"]["tasks"] == 10
    assert found["result"]["reward"] > steps[0]["reward_mean"]
