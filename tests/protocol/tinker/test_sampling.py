from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from protocol.tinker.bodies import SampleBody
from protocol.tinker.messages import MESSAGES
from protocol.tinker.sampling import (
    NO_TARGET,
    BestTokens,
    SampleAnswer,
    SampledTokens,
    read_sample,
    write_sample,
)
from protocol.tinker.tensors import TinkerWireError
from tests.protocol.tinker.test_training import exchanged


def body(**more: Any) -> SampleBody:
    given = {
        "sampling_session_id": "s:sample:0",
        "seq_id": 4,
        "prompt": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}, {"tokens": [3]}]},
        "sampling_params": {"max_tokens": 5},
    }
    return SampleBody.model_validate({**given, **more})


CSR = {
    "data": [7, 8],
    "dtype": "int64",
    "shape": [2, 3],
    "sparse_crow_indices": [0, 1, 2],
    "sparse_col_indices": [2, 0],
}


def test_a_prompt_in_chunks_is_one_prompt() -> None:
    request = read_sample(body())
    assert (request.prompt, request.max_tokens, request.samples, request.stop) == ((1, 2, 3), 5, 1, None)


@pytest.mark.parametrize(
    ("stop", "read"), [("x", ("x",)), (["x", "yz"], ("x", "yz")), ([3, 4], (3, 4)), ([], ()), (None, None)]
)
def test_each_form_of_stop_is_read(stop: Any, read: Any) -> None:
    assert read_sample(body(sampling_params={"stop": stop})).stop == read


def test_targets_are_read_dense_and_sparse() -> None:
    dense = read_sample(body(target_prompt_logprobs={"data": [1, -1], "dtype": "int64", "shape": [2, 1]})).targets
    assert dense is not None
    assert dense.tolist() == [[1], [-1]]
    sparse = read_sample(body(target_prompt_logprobs=CSR)).targets
    assert sparse is not None
    assert sparse.tolist() == [[NO_TARGET, NO_TARGET, 7], [8, NO_TARGET, NO_TARGET]]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": {"chunks": []}},
        {"prompt": {"chunks": [{"type": "image"}]}},
        {"prompt_logprobs_last_n": 1},
        {"prompt_logprobs_last_n": 3, "prompt_logprobs": True},
        {"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [1, 1]}},
        {"target_prompt_logprobs": {"data": [1.0, 2.0], "dtype": "float32", "shape": [2, 1]}},
        {"target_prompt_logprobs": {"data": [1, 1 << 70], "dtype": "int64", "shape": [2, 1]}},
        {"target_prompt_logprobs": {"data": [1.5, 1e300], "dtype": "int64", "shape": [2, 1]}},
        {"target_prompt_logprobs": {"data": [1.5, float("nan")], "dtype": "int64", "shape": [2, 1]}},
        {"target_prompt_logprobs": {**CSR, "sparse_col_indices": [2, 1 << 70]}},
        {"target_prompt_logprobs": {**CSR, "shape": [2, 1 << 24]}},
    ],
)
def test_a_request_that_does_not_fit_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(TinkerWireError):
        read_sample(body(**fields))


@pytest.mark.parametrize("fields", [{"num_samples": 0}, {"sampling_params": {"temperature": -1}}])
def test_numbers_out_of_range_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        body(**fields)


def test_the_sdk_reads_all_parts_of_our_answer() -> None:
    two = BestTokens(np.array([[1, 2], [3, 4]], np.int32), np.array([[-1, -2], [-3, -4]], np.float32))
    answer = SampleAnswer(
        sequences=(
            SampledTokens([5, 6], [-0.5, -0.25], [1, 2], stopped=True, top=two),
            SampledTokens([7], [-0.125], [2], stopped=False),
        ),
        prompt_logprobs=[float("nan"), -1.0, -2.0],
        topk_prompt=BestTokens(np.zeros((3, 2), np.int32), np.zeros((3, 2), np.float32)),
        targets=np.array([[0, 0, -7], [-8, 0, 0]], np.float32),
        alternatives=(np.array([[1, 2], [3, 4]]), np.zeros((2, 2), np.float32)),
    )
    plain = SampleAnswer(sequences=(SampledTokens([5], [-0.5], [0], stopped=True),))
    sent = {
        "sample all": write_sample(answer, body(target_prompt_logprobs=CSR)),
        "sample plain": write_sample(plain, body()),
    }
    read = exchanged(sent)["answers"]
    whole = read["sample all"]
    assert [each["stop"] for each in whole["sequences"]] == ["stop", "length"]
    assert [each["tokens"] for each in whole["sequences"]] == [[5, 6], [7]]
    assert whole["sequences"][0]["logprobs"] == [-0.5, -0.25]
    assert whole["sequences"][0]["top"] == [[[1, -1.0], [2, -2.0]], [[3, -3.0], [4, -4.0]]]
    assert whole["prompt"] == [None, -1.0, -2.0]
    assert whole["top"] == 3
    assert whole["targets"] == {"data": [-7.0, -8.0], "shape": [2, 3]}
    assert whole["crow"] == [0, 1, 2]
    assert whole["alternatives"]["data"] == [1, 2, 3, 4]
    assert read["sample plain"]["targets"] is read["sample plain"]["prompt"] is None


def test_versions_ride_along_for_those_who_know_them() -> None:
    answer = SampleAnswer(sequences=(SampledTokens([5, 6], [-0.5, -0.25], [1, 2], stopped=True),))
    (sequence,) = MESSAGES["SampleResponse"].FromString(write_sample(answer, body())).sequences
    assert np.frombuffer(sequence.versions, "<i8").tolist() == [1, 2]
