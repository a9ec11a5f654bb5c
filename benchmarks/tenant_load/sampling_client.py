"""A tenant with the unmodified SDK that saves and samples, told what to do by lines: `sampling_client.py MODEL RANK`.

`first KIND` takes a step, saves the weights for a sampler of the kind, and samples one token from it, twice: seconds
from the call of the save to the sampler, to the first token, and of the second sample. `samples N LENGTH` has N
completions of so many tokens under way at once. Each line is answered by one of JSON. Runs in the SDK's own
environment; the address and the key are those of TINKER_BASE_URL and TINKER_API_KEY.
"""

import json
import os
import sys
import time

import tinker
from tinker import types

MODEL, RANK = sys.argv[1], int(sys.argv[2])
PROMPT = types.ModelInput.from_ints([3, 4, 5, 6, 7, 8])
TOKENS = [3, 4, 5, 6, 7, 8, 9, 10]
DATUM = types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs={"target_tokens": TOKENS[1:]})


def say(**answer):
    print(json.dumps(answer), flush=True)


def sampled(sampler, length):
    return sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=length, stop=[], temperature=1.0))


def first_token(kind):
    passed = training.forward_backward([DATUM], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1e-4)).result()
    passed.result()
    began = time.monotonic()
    sampler = training.save_weights_and_get_sampling_client(kind=kind).result()
    saved = time.monotonic()
    sampled(sampler, 1).result()
    first = time.monotonic()
    sampled(sampler, 1).result()
    return {"saved": saved - began, "first": first - began, "second": time.monotonic() - first}


service = tinker.ServiceClient()
training = service.create_lora_training_client(base_model=MODEL, rank=RANK).result()
base = service.create_sampling_client(base_model=MODEL)
sampled(base, 1).result()
say(ready=True)
for line in sys.stdin:
    word, *rest = line.split()
    if word == "first":
        say(**first_token(rest[0]))
    else:
        began = time.monotonic()
        for each in [sampled(base, int(rest[1])) for _ in range(int(rest[0]))]:
            each.result()
        say(took=time.monotonic() - began)
os._exit(0)  # the SDK's threads would wait for the server
