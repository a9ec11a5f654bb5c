"""Samples many at once from an adapter, in rounds: `fleet.py MODEL`; each line that it reads begins another round.

A round trains a step, saves, and prints as JSON the largest gap between the logprobs of what was sampled and those of a
forward pass. Runs in the SDK's own environment; the address and the key are in TINKER_BASE_URL and TINKER_API_KEY.
"""

import json
import os
import sys

import tinker
from tinker import types

MODEL = sys.argv[1]
WAIT_S = 600
PROMPT = [(7 * place) % 250 for place in range(12)]
SAMPLES = 16


def datum(tokens):
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": list(tokens[1:])}
    )


def gap(sequence):
    passed = training.forward([datum([*PROMPT, *sequence.tokens])], "cross_entropy").result(WAIT_S)
    own = list(passed.loss_fn_outputs[0]["logprobs"].data)[len(PROMPT) - 1 :]
    return max(abs(ours - theirs) for ours, theirs in zip(own, sequence.logprobs, strict=True))


service = tinker.ServiceClient()
training = service.create_lora_training_client(base_model=MODEL, rank=8, seed=1).result(WAIT_S)
for _ in sys.stdin:
    passed = training.forward_backward([datum(PROMPT)], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result(WAIT_S)
    sampler = training.save_weights_and_get_sampling_client().result(WAIT_S)
    prompt = types.ModelInput.from_ints(PROMPT)
    asked = [
        sampler.sample(prompt, 1, types.SamplingParams(max_tokens=12, stop=[], temperature=1.0, seed=seed))
        for seed in range(SAMPLES)
    ]
    sequences = [each.result(WAIT_S).sequences[0] for each in asked]
    print(json.dumps({"samples": len(sequences), "gap": max(map(gap, sequences))}), flush=True)
os._exit(0)  # the SDK's threads would wait for the server
