"""Trains, saves, loads and samples for a while, and prints what came of it as JSON: `history.py URL MODEL STEPS`.

Runs in the SDK's own environment; knows nothing of what may happen to the server meanwhile.
"""

import json
import os
import sys
import time

import tinker
from tinker import types

URL, MODEL, STEPS = sys.argv[1], sys.argv[2], int(sys.argv[3])
TOKENS = [(5 * place) % 250 for place in range(40)]
PAUSE_S = 0.05

service = tinker.ServiceClient(base_url=URL, api_key=os.environ.get("TINKER_API_KEY", "tml-kill"))
training = service.create_lora_training_client(base_model=MODEL, rank=4, seed=5).result()
item = types.Datum(
    model_input=types.ModelInput.from_ints(TOKENS[:-1]),
    loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [1.0] * 39},
)
prompt = types.ModelInput.from_ints(TOKENS[:8])
losses, counts, greedy, sampled, paths = [], [], [], 0, []
for step in range(STEPS):
    futures = [training.forward_backward([item], "cross_entropy") for _ in range(3)]
    stepped = training.optim_step(types.AdamParams(learning_rate=1e-3))
    losses += [future.result().metrics["loss:sum"] for future in futures]
    counts.append(stepped.result().metrics.get("step:max"))
    if step % 5 == 1:
        kind = "inflight" if step % 10 == 1 else "snapshot"
        sampler = training.save_weights_and_get_sampling_client(kind=kind).result()
        answer = sampler.sample(prompt, 2, types.SamplingParams(max_tokens=20, temperature=0, stop=[])).result()
        sampled += len(answer.sequences)
        if kind == "snapshot":
            greedy.append([list(each.tokens) for each in answer.sequences])
    if step % 7 == 3:
        paths.append(training.save_state(f"step-{step}").result().path.rpartition("/")[2])
    if step % 14 == 10:
        training.load_state_with_optimizer(f"tinker://{training.model_id}/weights/{paths[-1]}").result()
    time.sleep(PAUSE_S)
print(json.dumps({"losses": losses, "counts": counts, "greedy": greedy, "sampled": sampled, "paths": paths}))
sys.stdout.flush()
os._exit(0)  # the SDK's threads would wait for the server
