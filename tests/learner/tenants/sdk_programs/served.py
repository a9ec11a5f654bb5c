"""Trains an adapter, samples from it, and compares logprobs of sampler and trainer: `served.py MODEL`.

With a path behind it, a model that was saved is taken up. Runs in the SDK's own environment; the address and the key
are those of TINKER_BASE_URL and TINKER_API_KEY. Prints JSON.
"""

import json
import os
import sys

import tinker
from tinker import types

MODEL = sys.argv[1]
WAIT_S = 240
TOKENS = [(7 * place) % 250 for place in range(24)]
PROMPT = TOKENS[:8]


def datum(tokens):
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": list(tokens[1:])}
    )


def trained(training, steps):
    losses = []
    for _ in range(steps):
        passed = training.forward_backward([datum(TOKENS)], "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(passed.result(WAIT_S).metrics["loss:sum"])
        stepped.result(WAIT_S)
    return losses


def compared(training, sampler, **params):
    """Logprobs that tokens were sampled with, and those of a forward pass over them."""
    asked = types.SamplingParams(max_tokens=12, stop=[], **params)
    (sequence,) = sampler.sample(types.ModelInput.from_ints(PROMPT), 1, asked).result(WAIT_S).sequences
    whole = [*PROMPT, *sequence.tokens]
    passed = training.forward([datum(whole)], "cross_entropy").result(WAIT_S)
    own = list(passed.loss_fn_outputs[0]["logprobs"].data)[len(PROMPT) - 1 :]
    return [list(sequence.logprobs), own]


def whole_round():
    report = {"models": [each.model_name for each in service.get_server_capabilities().supported_models]}
    training = service.create_lora_training_client(base_model=MODEL, rank=8, seed=1).result(WAIT_S)
    report["losses"] = trained(training, 6)
    snapshot = training.save_weights_and_get_sampling_client().result(WAIT_S)
    report["snapshot"] = compared(training, snapshot, temperature=1.0, seed=3)
    inflight = training.save_weights_and_get_sampling_client(kind="inflight").result(WAIT_S)
    report["inflight"] = compared(training, inflight, temperature=1.0, seed=4)
    trained(training, 2)
    training.save_weights_and_get_sampling_client(kind="inflight").result(WAIT_S)
    report["replaced"] = compared(training, inflight, temperature=1.0, seed=5)
    scored = inflight.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result(WAIT_S)
    passed = training.forward([datum(TOKENS)], "cross_entropy").result(WAIT_S)
    report["prompt"] = [scored[1:], list(passed.loss_fn_outputs[0]["logprobs"].data)]
    report["last"] = passed.metrics["loss:sum"]
    report["path"] = training.save_state("kept").result(WAIT_S).path
    return report


def taken_up(path):
    training = service.create_training_client_from_state_with_optimizer(path).result(WAIT_S)
    first = training.forward([datum(TOKENS)], "cross_entropy").result(WAIT_S).metrics["loss:sum"]
    sampler = training.save_weights_and_get_sampling_client().result(WAIT_S)
    return {"first": first, "sampled": compared(training, sampler, temperature=1.0, seed=6)}


service = tinker.ServiceClient()
print(json.dumps(taken_up(sys.argv[2]) if sys.argv[2:] else whole_round()))
sys.stdout.flush()
os._exit(0)  # the SDK's threads would wait for the server
