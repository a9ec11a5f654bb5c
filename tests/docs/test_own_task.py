"""docs/own-task.md shows the run file of examples/own_task, which can be run; the README is short and counts right."""

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


def test_the_settings_that_are_shown_are_those_of_the_example() -> None:
    text = (ROOT / "docs/own-task.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```toml\n# examples/own_task/run.toml\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)

    assert shown in (EXAMPLE / "run.toml").read_text(encoding="utf-8")


def test_each_of_the_three_first_pages_shows_what_the_others_do_not() -> None:
    """README, the tutorial and the how-to link to each other in place of telling the same again."""
    pages = [
        (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/from-zero.md", "docs/own-task.md")
    ]
    said = [line for page in pages for line in {line for line in page.splitlines() if len(line) > 60}]

    assert sorted({line for line in said if said.count(line) > 1}) == []


def test_the_readme_is_short() -> None:
    assert README.count("\n") <= 120


def test_the_readme_counts_the_algorithms_right() -> None:
    learn_from_files = {"sft", "rm", "dpo", "distill"}
    variants = set(schema_of(LearnerConfig).choices["algo"].variants)

    assert learn_from_files < variants
    assert len(variants - learn_from_files - {"custom"}) == 34
    assert re.search(r"\bthirty-four\s+that sample\b", README)


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
