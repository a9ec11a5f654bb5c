"""The HTTP bodies: JSON and back, and nothing in them that is not theirs."""

import re

import pytest
from pydantic import ValidationError

from protocol import fleet, generation, rewards, status
from protocol.model import WireModel
from protocol.trajectories import VersionSpan

FINGERPRINTS = fleet.Fingerprints(model="a1", tokenizer="b2", chat_template="c3")
BODIES: list[WireModel] = [
    generation.GenerateRequest(
        request_id="r-1",
        prompt_token_ids=(1, 2, (1 << 31) - 1),
        n=8,
        purpose="evaluate",
        sampling=generation.Sampling(max_tokens=16, temperature=0.0, stop_token_ids=(2,), seed=(1 << 63) - 1),
    ),
    generation.GeneratePart(
        index=3,
        token_ids=(5, 2),
        behavior_logprobs=(-0.25, -1.5e-7),
        version_spans=(VersionSpan(version="1.7", start=0, end=2),),
        finish_reason="stop",
    ),
    generation.LogprobsRequest(request_id="r-1", sequences=((1, 2, (1 << 31) - 1), (0, 0)), top=2),
    generation.LogprobsAnswer(
        generator_id="g",
        policy_version="0.0",
        tokenizer="b2",
        sequences=(
            generation.SequenceLogprobs(
                logprobs=(-0.25, -1.5e-7), top_token_ids=((2, 5), (7, 1)), top_logprobs=((-0.25, -3.0), (0.0, -17.5))
            ),
            generation.SequenceLogprobs(logprobs=(-0.1,)),
        ),
    ),
    generation.GeneratorState(
        generator_id="g", serving=True, policy_version="1.7", running=3, tokens_generated=99, idle_s=0.5, uptime_s=9.0
    ),
    rewards.ScoreRequest(
        items=(
            rewards.ScoreItem(id="a", verifier="exact_match", completion="085", arguments={"answer": ["085", None]}),
        ),
        deadline_s=5.0,
    ),
    rewards.ScoreResponse(
        service_id="rewards-0",
        results=(
            rewards.ScoreResult(
                id="a", verifier="math", verifier_version="1", reward=1.0, components={"x": 0.5}, latency_s=0.1
            ),
            rewards.ScoreResult(
                id="b", verifier="math", latency_s=5.0, error=rewards.ScoreError(kind="data", message="no number")
            ),
        ),
    ),
    rewards.VerifierList(
        verifiers=(
            rewards.VerifierInfo(name="m", version="1", description="…", arguments_schema={"properties": {"a": {}}}),
        )
    ),
    fleet.Announcement(
        generator_id="g",
        instance="5f1c",
        condition="stalled",
        kind="vllm 0, float32",
        url="http://127.0.0.1:1",
        protocol_version=1,
        fingerprints=FINGERPRINTS,
        backend="gloo",
        max_model_len=64,
        serving_version=None,
    ),
    fleet.AnnouncementAnswer(incarnation=2, announce_every_s=1.0),
    fleet.JoinGroup(
        epoch=1, backend="gloo", host="127.0.0.1", port=29500, rank_offset=1, world_size=2, bucket_timeout_s=10.0
    ),
    fleet.Prepare(
        version="1.7",
        epoch=1,
        buckets=(
            fleet.BucketSpec(
                nbytes=24,
                xxh3="00ff",
                tensors=(fleet.TensorSpec(name="model.norm.weight", dtype="float32", shape=(2, 3), offset=0),),
            ),
        ),
    ),
    fleet.PrepareResult(version="1.7", receive_s=0.25),
    fleet.Pull(version="1.7", deadline_s=120.0),
    fleet.PullPlan(
        version="1.7",
        chunk_bytes=4 << 20,
        buckets=(
            fleet.BucketSpec(
                nbytes=24,
                xxh3="00ff",
                tensors=(fleet.TensorSpec(name="model.norm.weight", dtype="float32", shape=(2, 3), offset=0),),
            ),
        ),
    ),
    fleet.Commit(version="1.7", epoch=1, probe=((1, 2, 3), (4, 5))),
    fleet.Commit(version="1.7", epoch=fleet.PULLED_EPOCH, digest="0123"),
    fleet.Reprobe(version="1.7", probe=((1, 2, 3), (4, 5))),
    fleet.ReprobeResult(version="1.7", probe_logprobs=(-1.0, -0.5)),
    fleet.CommitResult(version="1.7", fingerprint="00ff", probe_logprobs=(-1.0, -0.5), load_s=0.1, pause_s=0.03),
    fleet.CommitResult(
        version="1.7",
        fingerprint="00ff",
        probe_logprobs=(),
        load_s=0.1,
        pause_s=0.03,
        former=fleet.FormerLoad(version="1.6", digest="0123", fingerprint="00fe"),
    ),
    status.ErrorBody(
        error=status.ErrorDetail(kind="user", message="n is 0", field="n", expected="at least 1", got={"n": 0})
    ),
    status.Readiness(ready=False, waiting_for=("generator",), waiting_s=2.5),
]
NAMES = [type(body).__name__ for body in BODIES]


@pytest.mark.parametrize("body", BODIES, ids=NAMES)
def test_a_body_survives_json(body: WireModel) -> None:
    assert type(body).model_validate_json(body.model_dump_json()) == body


@pytest.mark.parametrize("body", BODIES, ids=NAMES)
def test_a_body_with_a_field_too_many_is_refused(body: WireModel) -> None:
    text = '{"colour": "red", ' + body.model_dump_json()[1:]
    with pytest.raises(ValidationError, match=r"colour\s+Extra inputs are not permitted"):
        type(body).model_validate_json(text)


@pytest.mark.parametrize("body", BODIES, ids=NAMES)
def test_a_body_cannot_be_changed(body: WireModel) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        setattr(body, next(iter(type(body).model_fields)), None)


@pytest.mark.parametrize(
    ("body_type", "text", "complaint"),
    [
        (
            generation.GenerateRequest,
            '{"request_id": "r", "prompt_token_ids": [], "sampling": {"max_tokens": 1}}',
            "1 item",
        ),
        (
            generation.GenerateRequest,
            '{"request_id": "r", "prompt_token_ids": [2147483648], "sampling": {"max_tokens": 1}}',
            "prompt_token_ids.0",
        ),
        (
            generation.GenerateRequest,
            '{"request_id": "r", "prompt_token_ids": [1.5], "sampling": {"max_tokens": 1}}',
            "prompt_token_ids.0",
        ),
        (
            generation.GenerateRequest,
            '{"request_id": "r", "prompt_token_ids": [true], "sampling": {"max_tokens": 1}}',
            "prompt_token_ids.0",
        ),
        (generation.LogprobsRequest, '{"request_id": "r", "sequences": []}', "1 item"),
        (generation.LogprobsRequest, '{"request_id": "r", "sequences": [[3, 4], [5]]}', "sequences.1"),
        (generation.LogprobsRequest, '{"request_id": "r", "sequences": [[3, -4]]}', "sequences.0.1"),
        (generation.LogprobsRequest, '{"request_id": "r", "sequences": [[3, 4]], "top": 129}', "top"),
        (generation.LogprobsRequest, '{"request_id": "r", "sequences": [[3, 4]], "temperature": 2.0}', "temperature"),
        (generation.SequenceLogprobs, '{"logprobs": [NaN]}', "finite number"),
        (
            generation.SequenceLogprobs,
            '{"logprobs": [-1.0, -2.0], "top_token_ids": [[1]], "top_logprobs": [[-1.0]]}',
            "for 2 logprobs",
        ),
        (
            generation.SequenceLogprobs,
            '{"logprobs": [-1.0], "top_token_ids": [[1, 2]], "top_logprobs": [[-1.0]]}',
            "for 1 logprobs",
        ),
        (generation.Sampling, '{"max_tokens": "16"}', "max_tokens"),
        (generation.Sampling, '{"max_tokens": 16, "temperature": NaN}', "temperature"),
        (generation.Sampling, '{"max_tokens": 16, "top_k": 2147483648}', "top_k"),
        (generation.Sampling, '{"max_tokens": 16, "logit_bias": {}}', "logit_bias"),
        (generation.Sampling, '{"max_tokens": 16, "min_tokens": 17}', "min_tokens 17 exceeds max_tokens 16"),
        (generation.Sampling, '{"max_tokens": 16, "presence_penalty": 3.0}', "presence_penalty"),
        (rewards.ScoreRequest, '{"items": []}', "items"),
        (rewards.ScoreResult, '{"id": "a", "verifier": "v", "latency_s": 0}', "either a reward or an error"),
        (status.Readiness, "[]", "object"),
        (status.Readiness, "{", "Invalid JSON"),
        (rewards.ScoreItem, '{"id": "a", "verifier": "v", "completion": "\\ud800"}', "Invalid JSON"),
        (
            rewards.ScoreItem,
            '{"id": "a", "verifier": "v", "completion": "", "arguments": {"a": ' + "[" * 9999 + "}",
            "recursion limit",
        ),
    ],
)
def test_a_body_that_does_not_fit_is_refused_with_its_field(
    body_type: type[WireModel], text: str, complaint: str
) -> None:
    with pytest.raises(ValidationError, match=complaint):
        body_type.model_validate_json(text)


@pytest.mark.parametrize(
    ("numbers", "complaint"),
    [
        ('"reward": NaN', "verifier v gave a reward of nan, expected a finite number"),
        ('"reward": -Infinity', "verifier v gave a reward of -inf"),
        ('"reward": 1.0, "components": {"length": NaN}', "verifier v gave a component 'length' of nan"),
        ('"reward": 1e9', "verifier v gave a reward of 1000000000.0, expected one of at most 1e\\+06"),
        (f'"reward": 1{"0" * 400}', "verifier v gave a reward of 1000"),
    ],
)
def test_a_reward_that_nobody_is_to_train_on_is_an_error_of_its_verifier_and_spoils_no_other(
    numbers: str, complaint: str
) -> None:
    good = '{"id": "b", "verifier": "v", "latency_s": 0, "reward": 1.0}'
    bad = f'{{"id": "a", "verifier": "v", "latency_s": 0, {numbers}}}'
    response = rewards.ScoreResponse.model_validate_json(f'{{"service_id": "s", "results": [{bad}, {good}]}}')
    error = response.results[0].error
    assert error is not None
    assert (error.kind, response.results[0].reward, response.results[0].components) == ("data", None, {})
    assert re.match(complaint, error.message)
    assert response.results[1].reward == 1.0


@pytest.mark.parametrize(
    ("lengths", "top", "complaint"),
    [((1 << 19, 1 << 19), 0, None), ((1 << 19, 1 << 19, 2), 1, "1048578 tokens exceed 1048576"),
     ((1 << 13,) * 2, 64, None), ((1 << 13, (1 << 13) + 1), 64, "16385 tokens times top 64 exceed 1048576")],
)  # fmt: skip
def test_a_request_for_logprobs_is_bounded_by_the_size_of_its_answer(
    lengths: tuple[int, ...], top: int, complaint: str | None
) -> None:
    sequences = tuple((3,) * length for length in lengths)
    if complaint is None:
        asked = generation.LogprobsRequest(request_id="r", sequences=sequences, top=top)
        assert tuple(map(len, asked.sequences)) == lengths
        return
    with pytest.raises(ValidationError, match=complaint):
        generation.LogprobsRequest(request_id="r", sequences=sequences, top=top)


def test_training_forbids_what_changes_the_sampled_distribution() -> None:
    assert generation.Sampling(max_tokens=4, temperature=0.7, seed=1).forbidden_in_training() == []
    shaped = generation.Sampling(max_tokens=4, top_p=0.9, top_k=5, min_tokens=2, temperature=0.0)
    assert shaped.forbidden_in_training() == ["top_p", "top_k", "min_tokens", "temperature"]


def test_a_whole_number_is_an_integer_however_it_is_written() -> None:
    item = {"id": "a", "verifier": "exact", "completion": "4", "group": "g"}
    assert rewards.ScoreItem.model_validate({**item, "group_size": 4.0}).group_size == 4
    with pytest.raises(ValidationError, match="group_size"):
        rewards.ScoreItem.model_validate({**item, "group_size": 4.5})
