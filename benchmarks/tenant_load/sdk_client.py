"""A tenant with the unmodified SDK, told what to do by lines: `sdk_client.py URL KEY MODEL NUMBER ROWS`.

`new` makes a training model and takes a step of it, `go STEPS THINK` takes so many, and waits THINK seconds after each.
Each line is answered by one of JSON. Runs in the SDK's own environment. A step is a forward_backward and an optim_step,
sent together and awaited together, as the cookbook does.
"""

import json
import os
import sys
import time

import tinker
from tinker import types

URL, KEY, MODEL = sys.argv[1:4]
NUMBER, ROWS = map(int, sys.argv[4:6])
LENGTH, RANKS = 32, (4, 8, 12)
TEXTS = [[(7 * NUMBER + 3 * row + place) % 250 for place in range(LENGTH + 1)] for row in range(ROWS)]
DATA = [
    types.Datum(
        model_input=types.ModelInput.from_ints(text[:-1]),
        loss_fn_inputs={"target_tokens": text[1:], "weights": [1.0] * LENGTH},
    )
    for text in TEXTS
]


def step(training):
    passed = training.forward_backward(DATA, "cross_entropy")
    stepped = training.optim_step(types.AdamParams(learning_rate=1e-3))
    metrics = passed.result().metrics
    # A server without the sum, which SDK 0.38 wants, is asked for the logprobs.
    loss = (
        metrics["loss:sum"]
        if "loss:sum" in metrics
        else -sum(sum(each["logprobs"].data) for each in passed.result().loss_fn_outputs)
    )
    stepped.result()
    return loss


def say(**answer):
    print(json.dumps(answer), flush=True)


service = tinker.ServiceClient(base_url=URL, api_key=KEY)
say(ready=True)
training = None
for line in sys.stdin:
    word, *numbers = line.split()
    if word == "new":
        rank = int(os.environ.get("TENANT_RANK", RANKS[NUMBER % len(RANKS)]))
        training = service.create_lora_training_client(base_model=MODEL, rank=rank, seed=NUMBER).result()
        say(loss=step(training))
    else:
        used, began = time.process_time(), time.monotonic()
        for _ in range(int(numbers[0])):
            loss = step(training)
            time.sleep(float(numbers[1]))
        say(loss=loss, took=time.monotonic() - began, cpu=time.process_time() - used)
os._exit(0)  # the SDK's threads would wait for the server
