"""Bodies as the unmodified SDK writes and reads them; runs in its own environment.

Prints one JSON object: `requests`, bodies by name in base64, and `answers`, what the SDK reads in the answers that come
on standard input, also by name and in base64.
"""

import base64
import json
import math
import sys

import torch
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response
from tinker.types.forward_backward_request import ForwardBackwardRequest


def request(data, loss="ppo", config=None, **more):
    body = ForwardBackwardRequest(
        model_id="s:train:0",
        seq_id=3,
        forward_backward_input=types.ForwardBackwardInput(data=data, loss_fn=loss, loss_fn_config=config),
        **more,
    )
    return base64.b64encode(forward_backward_request_to_proto(body).SerializeToString()).decode()


def datum(tokens, **inputs):
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def requests():
    wide = torch.zeros(4, 6)
    wide[0, 1], wide[3, 5] = 0.25, 0.75
    sparse = types.TensorData.from_torch_sparse(wide)
    assert sparse.sparse_crow_indices is not None
    yield (
        "dense",
        request([datum([1, 2, 3], target_tokens=[2, 3, 4], logprobs=[-0.5, -1.5, -2.5])], config={"beta": 0.5}),
    )
    yield "texts", request([datum([1], target_tokens=[2])], config={"headway": "grpo_tis", "kl": 0.25})
    yield "wide", request([datum([1, 2], target_tokens=[[1, 2, 3], [4, 5, 6]])], loss="cross_entropy")
    yield "sparse", request([datum([1, 2, 3, 4], target_tokens=[1, 2, 3, 4], weights=sparse)])
    chunks = [types.EncodedTextChunk(tokens=[1, 2]), types.EncodedTextChunk(tokens=[3])]
    parts = types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs={"target_tokens": [2, 3, 4]})
    yield "chunks", request([parts])
    image = types.ImageChunk(data=b"x", format="png", expected_tokens=1)
    yield "image", request([types.Datum(model_input=types.ModelInput(chunks=[image]), loss_fn_inputs={})])


def numbers(tensor):
    return None if tensor is None else {"data": [plain(value) for value in tensor.data], "shape": list(tensor.shape)}


def plain(value):
    return None if value is None or (isinstance(value, float) and math.isnan(value)) else float(value)


def training_answer(body):
    read = deserialize_forward_backward_output(body)
    return {
        "metrics": read.metrics,
        "outputs": [{name: numbers(value) for name, value in each.items()} for each in read.loss_fn_outputs],
    }


def sample_answer(body):
    read = deserialize_sample_response(body)
    return {
        "sequences": [
            {
                "stop": each.stop_reason,
                "tokens": list(each.tokens),
                "logprobs": list(each.logprobs),
                "top": each.topk_logprobs,
            }
            for each in read.sequences
        ],
        "prompt": None if read.prompt_logprobs is None else [plain(value) for value in read.prompt_logprobs],
        "top": None if read.topk_prompt_logprobs is None else len(read.topk_prompt_logprobs),
        "targets": numbers(read.target_prompt_logprobs),
        "crow": None if read.target_prompt_logprobs is None else read.target_prompt_logprobs.sparse_crow_indices,
        "alternatives": None if read.prompt_alt_tokens is None else numbers(read.prompt_alt_tokens.tokens),
    }


READERS = {"training": training_answer, "sample": sample_answer}
answers = {name: base64.b64decode(body) for name, body in json.load(sys.stdin).items()}
print(
    json.dumps(
        {
            "requests": dict(requests()),
            "answers": {name: READERS[name.split()[0]](body) for name, body in answers.items()},
        }
    )
)
