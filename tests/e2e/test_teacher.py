"""A generator that serves alone, as a teacher, and the learner's side of it."""

from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np
import pytest

from learner.teachers.config import TeacherConfig
from learner.teachers.teachers import TeacherFailed, Teachers
from protocol.trajectories import RewardRecord, Trajectory, TrajectoryGroup, Turn, VersionSpan
from services.http.metrics import Metrics
from services.http.waiting import Waiting
from services.model_folder import fingerprint_directory
from tests.e2e.processes import Launcher, until
from tests.e2e.run_files import free_ports

pytestmark = pytest.mark.e2e

TOKEN = "let-me-in"
PROMPT_LENGTH = 6
TEXTS = ("37+48=085", "12+30=042", "99+99=198", "40+02=777")


@pytest.fixture(scope="module")
def teacher(launcher: Launcher, model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its address, once it is ready. There is no learner."""
    (port,) = free_ports(1)
    file = tmp_path_factory.mktemp("teacher") / "teacher.toml"
    file.write_text(
        f"""
[generator]
model = "{model}"
http = {{ port = {port}, token = "{TOKEN}" }}
engine = {{ dtype = "float32", max_model_len = 64, kv_cache_gb = 0.25 }}
openai = false
join.learner = "none"
""",
        encoding="utf-8",
    )
    process = launcher("generator", "--config", str(file))
    url = f"http://127.0.0.1:{port}"
    until(lambda: ready(url), what="the teacher to be ready", during=[process])
    return url


def ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def of(token_ids: Sequence[int]) -> Trajectory:
    length = len(token_ids)
    mask = np.zeros(length, dtype=np.uint8)
    mask[PROMPT_LENGTH:] = 1
    return Trajectory(
        token_ids=np.array(token_ids, dtype=np.int32),
        loss_mask=mask,
        behavior_logprobs=np.zeros(length, dtype=np.float32),
        version_spans=(VersionSpan(version="1.0", start=PROMPT_LENGTH, end=length),),
        turns=(Turn(start=0, completion_start=PROMPT_LENGTH, end=length, finish_reason="stop", generator_ids=("g",)),),
        reward=RewardRecord(verifier="test", reward=0.0),
    )


def sampled(model: Path) -> TrajectoryGroup:
    """Answers to sums, right and wrong, each with the end token."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    token_ids = [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in TEXTS]
    assert {len(one) for one in token_ids} == {PROMPT_LENGTH + 4}, "one token for each character"
    return TrajectoryGroup(
        incarnation=1, lease_id=1, attempt=0, purpose="train", environment="addition", task_index=0,
        trajectories=tuple(map(of, token_ids)),
    )  # fmt: skip


def expected(model: Path, trajectory: Trajectory) -> list[float]:
    """By transformers: 0 before the completion, then log softmax of each of its tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    token_ids = torch.tensor(trajectory.token_ids, dtype=torch.int64)
    with torch.no_grad():
        rows = torch.log_softmax(policy(token_ids[None]).logits[0, :-1], -1)
    logprobs = rows.gather(-1, token_ids[1:, None])[:, 0].tolist()
    return [0.0] * PROMPT_LENGTH + logprobs[PROMPT_LENGTH - 1 :]


def teachers_at(url: str, *, tokenizer: str) -> Teachers:
    config = TeacherConfig.model_validate({"name": "adder", "urls": [url], "token": TOKEN})
    return Teachers([config], tokenizer=tokenizer, waits=Waiting(), registry=Metrics("learner"))


async def test_its_logprobs_are_those_of_transformers(teacher: str, model: Path) -> None:
    group = sampled(model)
    async with teachers_at(teacher, tokenizer=fingerprint_directory(model).tokenizer) as teachers:
        teachers.prefetch(group)
        found = await teachers.scores(group)
    assert found is not None
    for trajectory, scores in zip(group.trajectories, found, strict=True):
        assert scores.logprobs.tolist() == pytest.approx(expected(model, trajectory), abs=1e-3)
    assert min(min(scores.logprobs) for scores in found) < -1.0, (
        "a wrong answer is unlikely: the test would see no difference otherwise"
    )


async def test_a_learner_with_another_tokenizer_is_stopped(teacher: str, model: Path) -> None:
    async with teachers_at(teacher, tokenizer="0ther") as teachers:
        with pytest.raises(TeacherFailed, match=r"teacher adder .* the learner's has 0ther"):
            await teachers.scores(sampled(model))


def test_it_waits_for_nobody_and_takes_no_weights(teacher: str) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    state = httpx.get(f"{teacher}/v1/state", headers=headers).json()
    assert (state["serving"], state["policy_version"]) == (True, "0.0")
    status = httpx.get(f"{teacher}/v1/status", headers=headers).json()
    assert (status["peers"], status["waits"]) == ([], [])
    pull = httpx.post(f"{teacher}/v1/weights/pull", headers=headers, json={"version": "1.1", "deadline_s": 1.0})
    assert (pull.status_code, pull.json()["error"]["kind"]) == (404, "unknown_route")


def test_it_wants_its_token(teacher: str) -> None:
    answer = httpx.post(f"{teacher}/v1/logprobs", json={"request_id": "r", "sequences": [[3, 4]]})
    assert answer.status_code == 401
