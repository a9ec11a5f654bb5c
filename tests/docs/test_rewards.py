"""`docs/rewards.md`: what it shows is done as it says."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from env_service.config import EnvServiceConfig
from env_service.environments.interface import Task
from env_service.environments.jsonl import JsonlTaskSource
from env_service.environments.task_configs import JsonlTasks
from protocol.rewards import ExecuteRequest, ScoreItem, ScoreRequest
from protocol.status import Readiness
from reward_service.config import RewardServiceConfig
from reward_service.included import INCLUDED, build_registry
from reward_service.requests.scoring import Scorer
from reward_service.service import build_app
from reward_service.verifier.lanes import make_metrics
from reward_service.verifier.submission import validate_arguments
from services.config.models import load_config
from services.http.metrics import Metrics

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
OFFERED = {verifier.name: verifier for verifier in INCLUDED}
EXECUTE_CALL = re.compile(r"curl [^\n]*/v1/execute [^\n]*-d '(.*?)'\n", re.DOTALL)
SCORE_CALL = re.compile(r"curl [^\n]*/v1/score [^\n]*-d '(.*?)'\n", re.DOTALL)


def blocks(language: str, *, section: str) -> list[str]:
    """The fenced blocks of a section, by its heading."""
    (text,) = re.findall(rf"^##+ {re.escape(section)}\n(.*?)(?=^## |\Z)", TEXT, flags=re.DOTALL | re.MULTILINE)
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def load(kind: type[RewardServiceConfig], folder: Path, text: str) -> RewardServiceConfig:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(kind, process="reward-service", argv=["--config", str(path)], environ={})


def tasks(path: Path) -> Iterator[Task]:
    source = JsonlTaskSource(JsonlTasks(source="jsonl", name="documented", train_file=path))
    return (source.task("train", index) for index in range(source.train_tasks))


def scorer_of(config: RewardServiceConfig) -> Scorer:
    metrics = make_metrics(Metrics("reward-service"))
    return Scorer(registry=build_registry(config), config=config, metrics=metrics, service_id="documented")


async def test_the_verifier_in_ten_lines_judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = "A verifier of your own, in ten lines"
    (code, *_), (toml,), (line,) = (blocks(language, section=section) for language in ("python", "toml", "json"))
    assert len([text for text in code.splitlines() if text and not text.startswith("#")]) <= 10
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    (tmp_path / "task.jsonl").write_text(line, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    (task,) = tasks(tmp_path / "task.jsonl")

    items = tuple(
        ScoreItem(id=text, verifier=task.verification.verifier, completion=text, arguments=task.verification.arguments)
        for text in ("They sail.", "They sink.")
    )
    async with scorer_of(load(RewardServiceConfig, tmp_path, toml)) as scorer:
        response = await scorer.score(ScoreRequest(items=items, deadline_s=100.0))

    assert [(result.reward, result.verifier_version) for result in response.results] == [(1.0, "1"), (0.0, "1")]


def test_the_lines_for_each_verifier_are_tasks_with_arguments_that_fit(tmp_path: Path) -> None:
    (text,) = blocks("jsonl", section="The verifiers")
    path = tmp_path / "tasks.jsonl"
    path.write_text(text, encoding="utf-8")

    for task in tasks(path):
        verifier = OFFERED.get(task.verification.verifier)
        if verifier is not None:
            validate_arguments(model=verifier.arguments, arguments=task.verification.arguments)


def test_every_verifier_that_comes_with_the_service_is_in_the_table() -> None:
    named = set(re.findall(r"^\| `(\w+)` \|", TEXT, flags=re.MULTILINE))

    assert set(OFFERED) <= named


def test_the_lines_of_the_example_have_arguments_that_fit() -> None:
    for name in ("tasks.jsonl", "held_out.jsonl"):
        for task in tasks(ROOT / "examples" / "mixed" / name):
            verifier = OFFERED.get(task.verification.verifier)
            if verifier is not None:
                validate_arguments(model=verifier.arguments, arguments=task.verification.arguments)


async def test_the_calls_of_the_api_are_answered(tmp_path: Path) -> None:
    config = load(RewardServiceConfig, tmp_path, "[reward-service]\n")
    bodies = [json.loads(body) for body in SCORE_CALL.findall(TEXT)]
    assert len(bodies) == 3
    metrics, registry = Metrics("reward-service"), build_registry(config)
    scorer = Scorer(registry=registry, config=config, metrics=make_metrics(metrics), service_id="documented")
    async with scorer:
        app = build_app(
            config=config,
            registry=registry,
            scorer=scorer,
            metrics=metrics,
            readiness=lambda: Readiness(ready=True),
            version="0",
        )
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://rewards") as client:
            answers = [await client.post("/v1/score", json=body) for body in bodies]
    (shown,) = (json.loads(text.replace("…", "")) for text in blocks("json", section="The API"))

    results = [answer.json()["results"] for answer in answers]
    assert [[one["reward"] for one in each] for each in results] == [[1.0, None], [1.0], [1.0]]
    assert [set(one) for one in shown["results"]] == [set(one) for one in results[0]]
    assert [one["error"] and one["error"]["kind"] for one in shown["results"]] == [None, "user"]


def test_the_call_of_the_sandbox_is_a_request() -> None:
    (body,) = EXECUTE_CALL.findall(TEXT)

    assert ExecuteRequest.model_validate_json(body).code is not None


@pytest.mark.parametrize("section", ["Mixing tasks in a run", "Several reward services"])
def test_the_tables_of_the_env_service_can_be_read(section: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    tables = blocks("toml", section=section)[0].replace("[env-service]\n", "")
    path.write_text(f'[env-service]\nmodel = "m"\n{tables}', encoding="utf-8")

    config = load_config(EnvServiceConfig, process="env-service", argv=["--config", str(path)], environ={})

    assert config.rewards or len(config.environments) == 3


@pytest.mark.skipif("judges" not in RewardServiceConfig.model_fields, reason="there are no judges to be configured")
def test_the_tables_of_judges_and_remotes_can_be_read(tmp_path: Path) -> None:
    (toml,) = blocks("toml", section="Reward models, judges, and verifiers elsewhere")

    load(RewardServiceConfig, tmp_path, toml)


async def test_the_program_that_uses_the_client_can_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = blocks("python", section="Several reward services")

    compile(code, "documented", "exec")
    for line in code.splitlines():
        if found := re.match(r"from (\S+) import (\w+)", line):
            assert hasattr(__import__(found[1], fromlist=[found[2]]), found[2])
