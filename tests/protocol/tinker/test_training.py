import base64
import json
import subprocess
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from protocol.tinker.messages import MESSAGES
from protocol.tinker.tensors import TinkerWireError, write_csr
from protocol.tinker.training import identify_forward_backward, read_forward_backward, write_forward_backward
from tests.protocol.tinker.sdk import sdk_python

PROGRAM = __file__.replace("test_training", "sdk_bodies")


def exchanged(answers: Mapping[str, bytes]) -> Any:
    """The SDK's requests, and what it reads in our answers."""
    given = json.dumps({name: base64.b64encode(body).decode() for name, body in answers.items()})
    done = subprocess.run(
        [sdk_python(), PROGRAM], input=given, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def requests() -> dict[str, bytes]:
    return {name: base64.b64decode(body) for name, body in exchanged({})["requests"].items()}


def test_a_dense_request_of_the_sdk_is_read(requests: dict[str, bytes]) -> None:
    body = read_forward_backward(requests["dense"])
    assert (body.model_id, body.seq_id, body.loss, body.config) == ("s:train:0", 3, "ppo", {"beta": 0.5})
    assert (body.forward_only, body.tokens) == (False, 3)
    (datum,) = body.data
    assert datum.token_ids.tolist() == [1, 2, 3]
    assert datum.inputs["target_tokens"].tolist() == [2, 3, 4]
    assert datum.inputs["logprobs"].tolist() == [-0.5, -1.5, -2.5]
    assert datum.inputs["logprobs"].dtype == np.float32


def test_texts_of_the_config_come_in_the_newer_map(requests: dict[str, bytes]) -> None:
    assert read_forward_backward(requests["texts"]).config == {"headway": "grpo_tis", "kl": 0.25}


def test_soft_targets_keep_their_shape(requests: dict[str, bytes]) -> None:
    (datum,) = read_forward_backward(requests["wide"]).data
    assert datum.inputs["target_tokens"].tolist() == [[1, 2, 3], [4, 5, 6]]


def test_a_sparse_tensor_of_the_sdk_becomes_dense(requests: dict[str, bytes]) -> None:
    (datum,) = read_forward_backward(requests["sparse"]).data
    expected = np.zeros((4, 6), np.float32)
    expected[0, 1], expected[3, 5] = 0.25, 0.75
    np.testing.assert_array_equal(datum.inputs["weights"], expected)


def test_chunks_of_text_are_joined_and_an_image_is_refused_by_name(requests: dict[str, bytes]) -> None:
    assert read_forward_backward(requests["chunks"]).data[0].token_ids.tolist() == [1, 2, 3]
    with pytest.raises(TinkerWireError, match=r"data\[0\]\.model_input\[0\]: an image"):
        read_forward_backward(requests["image"])


def test_the_sdk_reads_our_answer_in_order_whatever_shapes_it_has() -> None:
    outputs = [
        {"logprobs": np.array([-1, -2], np.float32)},
        {"logprobs": np.array([-3], np.float32)},
        {"logprobs": np.array([[-1, -2], [-3, -4]], np.float32)},
        {"logprobs": np.array([-5], np.float32)},
    ]
    body = write_forward_backward(outputs, {"loss:sum": 6.5})
    read = exchanged({"training": body})["answers"]["training"]
    assert read["metrics"] == {"loss:sum": 6.5}
    assert [each["logprobs"]["shape"] for each in read["outputs"]] == [[2], [1], [2, 2], [1]]
    assert [each["logprobs"]["data"] for each in read["outputs"]] == [[-1, -2], [-3], [-1, -2, -3, -4], [-5]]
    assert len(MESSAGES["ForwardBackwardOutput"].FromString(body).loss_fn_outputs) == 3


def test_the_order_of_a_map_does_not_make_another_request() -> None:
    bodies = []
    for names in (("a", "b", "c"), ("c", "b", "a")):
        request = MESSAGES["ForwardBackwardRequest"](model_id="m", seq_id=1)
        datum = request.data.add()
        for name in names:
            datum.loss_fn_inputs[name].dtype = 1
        bodies.append(request.SerializeToString())
    assert identify_forward_backward(bodies[0]) == identify_forward_backward(bodies[1])


def test_sparse_tensors_of_more_cells_than_a_call_may_have_are_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes stand for 128 MiB in each of them, and a body has room for thousands."""
    request = MESSAGES["ForwardBackwardRequest"](model_id="m", seq_id=1)
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = bytes(4)
    empty = write_csr(np.zeros(0), np.zeros(2, np.int64), np.zeros(0, np.int64), (1, 1 << 24))
    for name in ("one", "two"):
        datum.loss_fn_inputs[name].CopyFrom(empty)
    datum.loss_fn_inputs["three"].CopyFrom(empty)
    monkeypatch.setattr("protocol.tinker.training.read_tensor", lambda *_: pytest.fail("it was unpacked"))
    with pytest.raises(TinkerWireError, match=f"data: sparse tensors of {3 << 24} cells in all"):
        read_forward_backward(request.SerializeToString())


def test_what_is_no_request_is_refused() -> None:
    with pytest.raises(TinkerWireError, match="body: not a protobuf ForwardBackwardRequest"):
        read_forward_backward(b"\xff\xff")
    with pytest.raises(TinkerWireError, match="seq_id: 0"):
        identify_forward_backward(MESSAGES["ForwardBackwardRequest"](model_id="m").SerializeToString())
    request = MESSAGES["ForwardBackwardRequest"](model_id="m", seq_id=1)
    request.data.add()
    with pytest.raises(TinkerWireError, match=r"data\[0\]\.model_input: no tokens"):
        read_forward_backward(request.SerializeToString())
