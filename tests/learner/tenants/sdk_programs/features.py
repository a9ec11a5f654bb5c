"""Asks a server for every feature of the SDK that a client may use: `features.py URL MODEL [NAME ...]`.

Runs in the SDK's own environment. Prints one JSON object: each feature's name with `yes`, or what came instead.
"""

import json
import os
import sys

import tinker
import torch
from tinker import types

URL, MODEL = sys.argv[1:3]
WAIT_S = 60
KEY = os.environ.get("TINKER_API_KEY", "tml-probe")
TOKENS = [(7 * place) % 250 for place in range(24)]
PROMPT = types.ModelInput.from_ints(TOKENS[:8])
SHORT = types.SamplingParams(max_tokens=4)
service = tinker.ServiceClient(base_url=URL, api_key=KEY)
FEATURES = {}


def feature(name):
    def remember(function):
        FEATURES[name] = function
        return function

    return remember


def client(**more):
    wanted = {"rank": 8, "seed": 1, "train_unembed": False, **more}
    return service.create_lora_training_client(base_model=MODEL, **wanted).result(WAIT_S)


def datum(**inputs):
    return types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs={"target_tokens": TOKENS[1:], **inputs}
    )


def plain():
    return datum(weights=[1.0] * 23)


def sampled(sampler=None, count=2, params=SHORT, **more):
    sampler = sampler or client().save_weights_and_get_sampling_client().result(WAIT_S)
    return sampler.sample(PROMPT, count, params, **more).result(WAIT_S)


def moved(steps=1, passes=1, **adam):
    """The sum of the logprobs after a step."""
    training = client()
    for _ in range(passes):
        training.forward_backward([plain()], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1e-2, **adam)).result(WAIT_S)
    output = training.forward([plain()], "cross_entropy").result(WAIT_S).loss_fn_outputs[0]
    return sum(output["logprobs"].data)


@feature("train_unembed, the SDK's default")
def _():
    return client(train_unembed=True)


@feature("another rank beside the first")
def _():
    return client(rank=4)


def loss_feature(label, name, config=None, **extra):
    @feature(label)
    def _():
        inputs = {"weights": [1.0] * 23}
        if name != "cross_entropy":
            inputs = {"logprobs": [-5.0] * 23, "advantages": [0.5] * 23, **extra}
        return client().forward_backward([datum(**inputs)], name, config).result(WAIT_S).metrics["loss:sum"]


for each in ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro"):
    loss_feature(each, each)
loss_feature("gspo", "gspo", sequence_ratio_mask=[1.0] * 23)
loss_feature("ppo thresholds", "ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1})


@feature("soft targets [T, K]")
def _():
    item = types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS[:4]),
        loss_fn_inputs={"target_tokens": [[1, 2]] * 4, "weights": torch.tensor([[0.25, 0.75]] * 4)},
    )
    output = client().forward_backward([item], "cross_entropy").result(WAIT_S).loss_fn_outputs[0]
    return output["logprobs"].shape == [4, 2]


@feature("custom loss in the client")
def _():
    done = client().forward_backward_custom([datum()], lambda data, logprobs: ((logprobs[0] ** 2).sum(), {}))
    return done.result(WAIT_S).metrics["loss:sum"]


@feature("custom loss in the server")
def _():
    def squares(logprobs):
        return (logprobs**2).sum(), {}

    handle = service.create_custom_loss(squares, input_ranks={"logprobs": 1}).result(WAIT_S)
    assert handle.loss_id, "the server takes no custom losses"
    return client().forward_backward_custom([datum()], handle).result(WAIT_S).metrics["loss:sum"]


@feature("gradients add up over calls")
def _():
    return moved(passes=1, eps=1e3) != moved(passes=2, eps=1e3)


@feature("grad_clip_norm")
def _():
    return abs(moved(eps=1.0, grad_clip_norm=0.0) - moved(eps=1.0, grad_clip_norm=1e-6)) > 1e-4


@feature("optimizer metrics")
def _():
    return client().optim_step(types.AdamParams()).result(WAIT_S).metrics


def restored(make):
    training = client()
    path = training.save_state("a").result(WAIT_S).path
    return make(path).result(WAIT_S).model_id != training.model_id


@feature("training client from a state")
def _():
    return restored(service.create_training_client_from_state)


@feature("training client from a state with its optimizer")
def _():
    return restored(service.create_training_client_from_state_with_optimizer)


@feature("sample")
def _():
    return sampled().sequences[0].logprobs


@feature("sample: temperature 0")
def _():
    first, second = sampled(params=types.SamplingParams(max_tokens=4, temperature=0)).sequences
    return first.tokens == second.tokens


@feature("sample: prompt logprobs")
def _():
    return sampled(include_prompt_logprobs=True).prompt_logprobs


@feature("sample: prompt logprobs, last n")
def _():
    scored = sampled(include_prompt_logprobs=True, prompt_logprobs_last_n=2).prompt_logprobs
    return [each is None for each in scored] == [True] * 6 + [False] * 2


@feature("sample: top-k prompt logprobs")
def _():
    return len(sampled(include_prompt_logprobs=True, topk_prompt_logprobs=2).topk_prompt_logprobs) == 8


@feature("sample: top-k sampled logprobs")
def _():
    return len(sampled(topk_sample_logprobs=2).sequences[0].topk_logprobs[0]) == 2


@feature("sample: target logprobs")
def _():
    targets = types.TensorData(data=[[3]] * 7, dtype="int64", shape=[7, 1])
    return sampled(target_prompt_logprobs=targets).target_prompt_logprobs is not None


@feature("sample: alternative tokens")
def _():
    return sampled(prompt_alt_tokens_k=2).prompt_alt_tokens is not None


@feature("inflight sampling client")
def _():
    live = client().save_weights_and_get_sampling_client(kind="inflight").result(WAIT_S)
    return sampled(live, count=1).sequences[0].tokens


@feature("sampler from a path")
def _():
    path = client().save_weights_for_sampler("s").result(WAIT_S).path
    return sampled(service.create_sampling_client(model_path=path).result(WAIT_S)).sequences[0].tokens


@feature("base model sampling")
def _():
    return sampled(service.create_sampling_client(base_model=MODEL).result(WAIT_S)).sequences[0].tokens


@feature("weights info")
def _():
    path = client().save_state("w").result(WAIT_S).path
    rest = tinker.RestClient(base_url=URL, api_key=KEY)
    return rest.get_weights_info_by_tinker_path(path).result(WAIT_S).lora_rank == 8


def answer_of(function):
    try:
        return "yes" if function() not in (None, False) else "no: nothing came"
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the answer
        return f"no: {type(error).__name__}: {' '.join(str(error).split())[:300]}"


print(
    json.dumps({name: answer_of(each) for name, each in FEATURES.items() if name in sys.argv[3:] or not sys.argv[3:]})
)
sys.stdout.flush()
os._exit(0)  # the SDK's threads would wait for the server
