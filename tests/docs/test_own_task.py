"""The first task of one's own, in README.md and docs/own-task.md: that of examples/own_task, and it can be run."""

import json
import re
from pathlib import Path

import pytest

from docs.reference.settings_pages import MODELS
from learner.config import LearnerConfig
from protocol.rewards import ScoreItem, ScoreRequest
from reward_service.config import RewardServiceConfig
from reward_service.included import build_registry
from reward_service.requests.scoring import Scorer
from reward_service.verifier.lanes import make_metrics
from services.config.models import load_config
from services.config.options import schema_of
from services.http.metrics import Metrics

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_task"
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["README.md", "docs/own-task.md"])
def test_what_is_shown_are_the_files_of_the_example(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    names = ("own_reward.py", "run.toml", "sums.jsonl")
    files = "\n".join((EXAMPLE / name).read_text(encoding="utf-8") for name in names)

    for language in ("python", "toml", "json"):
        block = re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)[0]
        assert re.sub(r"\A# examples/own_task/.*\n", "", block) in files, f"the {language} block of {page}"


def test_the_readme_is_short() -> None:
    assert README.count("\n") <= 120


def test_the_readme_counts_the_algorithms_right() -> None:
    learn_from_files = {"sft", "rm", "dpo", "distill"}
    variants = set(schema_of(LearnerConfig).choices["algo"].variants)

    assert learn_from_files < variants
    assert len(variants - learn_from_files - {"custom"}) == 20
    assert re.search(r"\btwenty\s+that sample\b", README)


@pytest.mark.parametrize("process", MODELS)
def test_each_process_takes_the_config(process: str) -> None:
    load_config(MODELS[process], process=process, argv=["--config", str(EXAMPLE / "run.toml")], environ={})


async def test_the_verifier_gives_the_share_of_right_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    config = load_config(
        RewardServiceConfig, process="reward-service", argv=["--config", str(EXAMPLE / "run.toml")], environ={}
    )
    task = json.loads((EXAMPLE / "sums.jsonl").read_text(encoding="utf-8").splitlines()[0])
    right = task["arguments"]["answer"]
    items = tuple(
        ScoreItem(id=text, verifier=task["verifier"], completion=text, arguments=task["arguments"])
        for text in (right, right[:2] + "x", "")
    )
    metrics = make_metrics(Metrics("reward-service"))

    async with Scorer(registry=build_registry(config), config=config, metrics=metrics, service_id="example") as scorer:
        response = await scorer.score(ScoreRequest(items=items, deadline_s=100.0))

    assert [result.reward for result in response.results] == [1.0, pytest.approx(2 / 3), 0.0]
