"""An agent, a match against a frozen opponent and self-play, trained together by all processes with the real vLLM."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from env_service.environments.tokenization import Tokenization
from protocol.model import PolicyVersion
from protocol.trajectories import Trajectory, TrajectoryGroup, Turn
from tests.conftest import launching
from tests.e2e.run_files import RunFolder, free_ports, write_run_file

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SOURCES = Path(__file__).parent / "several_turns"
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{{ eos_token if message.role == 'assistant' else '=' }}"
    "{% endfor %}"
)
STEPS = 4
STANDSTILL = "1e-12"
"""A learning rate with which the weights stay, so that every token of every version can be held against the model.
(tests/generator/test_several_turns.py has new weights in the midst of a conversation.)
"""
TOLERANCE = 1e-3
PARTS = ("agent", "frozen", "selfplay")


@pytest.fixture(scope="module")
def chat_model(untrained_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The addition model with a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    for file in untrained_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return folder


def environments(opponent: str) -> list[dict[str, Any]]:
    tasks = {"train_tasks": 50, "evaluation_tasks": 0}
    return [
        {"source": "agent", "name": "agent", "options": {"run": "higher:asks_twice"}, **tasks},
        {
            "source": "higher:Higher", "name": "frozen", **tasks,
            "opponent": {"urls": [opponent], "plays": ["second"]},
        },
        {"source": "higher:Higher", "name": "selfplay", **tasks},
        {"source": "mix", "name": "all", "parts": [{"environment": name} for name in PARTS]},
    ]  # fmt: skip


@dataclass(frozen=True)
class EndedAgentsRun:
    run: RunFolder
    replies: list[list[str]]
    model: Path

    def of(self, part: str) -> list[tuple[int, TrajectoryGroup]]:
        """The groups that a part's environment rolled out, with the versions at which they were trained."""
        return [
            (version, group)
            for version, groups in self.run.batches()
            for group in groups
            if group.trajectories[0].reward.verifier.partition("/")[0] == part
        ]


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest, chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> EndedAgentsRun:
    folder = tmp_path_factory.mktemp("mixed")
    run_file, (port,) = write_run_file(folder, model=chat_model), free_ports(1)
    # The opponent serves its folder as it is.
    alone = folder / "opponent.toml"
    alone.write_text(
        f'[generator]\nmodel = "{chat_model}"\nhttp = {{ port = {port} }}\njoin = {{ learner = "none" }}\n'
        'engine = { dtype = "float32", max_model_len = 64, max_num_seqs = 64, kv_cache_gb = 0.25 }\n'
    )
    config = ("--config", str(run_file.path))
    replies = folder / "replies.jsonl"
    beside = {"PYTHONPATH": str(SOURCES), "REPLIES": str(replies)}
    with launching(request.config, folder, environment=beside) as launch:
        launch("generator", "--config", str(alone))
        launch("generator", *config)
        launch("reward-service", *config)
        launch("env-service", *config, "--environments", json.dumps(environments(f"http://127.0.0.1:{port}")))
        learner = launch(
            "learner", *config, "--rollouts.environment", "all", "--steps", str(STEPS), "--groups-per-step", "12",
            "--rollouts.group-size", "4", "--rollouts.drop-uniform-groups", "false", "--evaluation.tasks", "0",
            "--evaluation.final-tasks", "0", "--training.optimizer.learning-rate", STANDSTILL,
        )  # fmt: skip
        assert learner.wait(timeout_s=500) == 0, learner.text()
    lines = replies.read_text(encoding="utf-8").splitlines()
    return EndedAgentsRun(RunFolder(folder / "runs" / "e2e"), [json.loads(line) for line in lines], chat_model)


def trajectories(groups: list[tuple[int, TrajectoryGroup]]) -> list[Trajectory]:
    return [one for _, group in groups for one in group.trajectories]


def sampled(one: Trajectory, turn: Turn) -> list[int]:
    ids: list[int] = one.token_ids[turn.completion_start : turn.end].tolist()
    return ids


def test_what_the_agent_was_told_is_what_was_trained(ended: EndedAgentsRun) -> None:
    words, told = Tokenization(ended.model), Counter(map(tuple, ended.replies))
    found = trajectories(ended.of("agent"))

    trained = Counter(tuple(words.decode([sampled(one, turn) for turn in one.turns])) for one in found)
    assert trained
    assert not trained - told, "each trained conversation is one that an agent had"
    assert {len(one.turns) for one in found} == {2}
    assert {one.sequence_starts for one in found} == {()}, "the second call goes on from the tokens of the first"


def test_the_opponents_tokens_are_nobodys_and_each_side_of_self_play_is_trained(ended: EndedAgentsRun) -> None:
    assert {one.player for one in trajectories(ended.of("frozen"))} == {"first"}
    assert Counter(one.player for one in trajectories(ended.of("selfplay"))).keys() == {"first", "second"}
    for one in trajectories([*ended.of("frozen"), *ended.of("selfplay")]):
        assert [turn.end - turn.completion_start for turn in one.turns] == [1, 1]
        assert one.loss_mask.sum() == 2


def test_each_trained_token_has_the_version_that_sampled_it(ended: EndedAgentsRun) -> None:
    published = {report["version"] for report in ended.run.metrics("publish")}
    for part in PARTS:
        groups = ended.of(part)
        assert groups, part
        for version, group in groups:
            for one in group.trajectories:
                marked = np.zeros(len(one.token_ids), dtype=bool)
                for span in one.version_spans:
                    marked[span.start : span.end] = True
                    assert PolicyVersion.parse(span.version).number in published
                assert (marked == (one.loss_mask == 1)).all()
                numbers = one.token_versions()[one.loss_mask == 1]
                assert numbers.max() <= version


def test_the_logprobs_are_those_of_the_policy_on_the_trained_tokens(ended: EndedAgentsRun) -> None:
    """With a single id that differed, in what was sampled or shown before, the logprobs would not agree."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(ended.model)
    checked: Counter[str] = Counter()
    for part in PARTS:
        for one in trajectories(ended.of(part)):
            ids = torch.tensor([one.token_ids.tolist()])
            with torch.no_grad():
                rows = torch.log_softmax(model(ids).logits[0].float(), -1)
            scored = np.array([rows[place, token].item() for place, token in enumerate(ids[0, 1:].tolist())])
            own = np.flatnonzero(one.loss_mask == 1)
            assert np.abs(scored[own - 1] - one.behavior_logprobs[own]).max() < TOLERANCE
            checked[part] += len(own)
    assert all(checked[part] for part in PARTS)


def test_the_learner_finds_them_as_the_engine_gave_them(ended: EndedAgentsRun) -> None:
    steps = ended.run.metrics("step")
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    gaps = [step["mismatch_kl"] for step in steps if step["mismatch_kl"] is not None]
    assert gaps
    assert max(map(abs, gaps)) < TOLERANCE
    assert max(report["probe_gap"] for report in ended.run.metrics("publish")) < TOLERANCE
