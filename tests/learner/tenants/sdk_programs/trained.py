"""Trains two models at once, and prints what came of it as JSON: `trained.py URL MODEL STEPS`.

Runs in the SDK's own environment. A line `step N` says that N steps of both are done.
"""

import json
import os
import sys

import tinker
from tinker import types

URL, MODEL, STEPS = sys.argv[1], sys.argv[2], int(sys.argv[3])
LENGTHS = (40, 13, 25, 8)
RANKS = {"one": 4, "two": 8}

tokens = [[(5 * place + 7 * number) % 250 for place in range(length)] for number, length in enumerate(LENGTHS)]
data = [
    types.Datum(
        model_input=types.ModelInput.from_ints(each[:-1]),
        loss_fn_inputs={"target_tokens": each[1:], "weights": [1.0] * (len(each) - 1)},
    )
    for each in tokens
]
service = tinker.ServiceClient(base_url=URL, api_key=os.environ["TINKER_API_KEY"])
models = {
    name: service.create_lora_training_client(base_model=MODEL, rank=rank, seed=rank).result()
    for name, rank in RANKS.items()
}
losses: dict[str, list[float]] = {name: [] for name in models}
norms: dict[str, list[float]] = {name: [] for name in models}
for step in range(STEPS):
    passes = {name: model.forward_backward(data, "cross_entropy") for name, model in models.items()}
    steps = {name: model.optim_step(types.AdamParams(learning_rate=1e-2)) for name, model in models.items()}
    for name in models:
        losses[name].append(passes[name].result().metrics["loss:sum"])
        norms[name].append(steps[name].result().metrics["grad_norm:mean"])
    print("step", step + 1, flush=True)
print(json.dumps({"tokens": tokens, "ranks": RANKS, "losses": losses, "norms": norms}), flush=True)
os._exit(0)  # the SDK's threads would wait for the server
