"""Compares what a server says with torch, call by call: `formulas.py URL MODEL [PRESET ...]`.

Prints JSON; runs with the SDK.
"""

import json
import os
import sys

import tinker
import torch
from tinker import types

URL, MODEL = sys.argv[1:3]
TEXT = [(11 * place) % 250 for place in range(30)]
BOUNDS = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}


def gspo(ratio, policy, behavior, gains):
    sequence = torch.exp((policy - behavior).mean())
    return -torch.min(sequence * gains, sequence.clamp(0.8, 1.2) * gains).sum()


LOSSES = {
    "importance_sampling": (None, lambda r, p, q, a: -(r * a).sum()),
    "ppo": (BOUNDS, lambda r, p, q, a: -torch.min(r * a, r.clamp(0.9, 1.1) * a).sum()),
    "cispo": (None, lambda r, p, q, a: -(r.clamp(0.0, 4.0) * p * a).sum()),
    "dro": ({"beta": 0.05}, lambda r, p, q, a: -(p * a - 0.025 * (p - q) ** 2).sum()),
    "gspo": (None, gspo),
}


def datum(tokens, **inputs):
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:], **inputs}
    )


def gradient_norm(training):
    return training.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["grad_norm:mean"]


def losses(training):
    """The server's value and torch's, of each loss."""
    gains = torch.linspace(-1, 1.5, len(TEXT) - 1)
    scored = training.forward([datum(TEXT, weights=[1.0] * (len(TEXT) - 1))], "cross_entropy").result()
    policy = torch.tensor(scored.loss_fn_outputs[0]["logprobs"].data)
    behavior = policy - torch.linspace(-0.2, 0.5, len(policy))
    found = {}
    for name, (config, formula) in LOSSES.items():
        extra = {"sequence_ratio_mask": torch.ones(len(policy))} if name == "gspo" else {}
        item = datum(TEXT, logprobs=behavior, advantages=gains, **extra)
        value = training.forward_backward([item], name, config).result().metrics["loss:sum"]
        found[name] = [value, float(formula(torch.exp(policy - behavior), policy, behavior, gains))]
    return found


def custom_norms(training, service):
    """Gradient norms of one loss, computed in the server and in the client."""
    gains = torch.linspace(-1, 1.5, len(TEXT) - 1)

    def squares(logprobs, advantages):
        return (torch.clamp(logprobs, min=-5.0) ** 2 * advantages).sum(), {}

    handle = service.create_custom_loss(squares, input_ranks={"logprobs": 1, "advantages": 1}).result()
    norms = []
    for loss in (handle, lambda data, logprobs: squares(logprobs[0], gains)):
        gradient_norm(training)  # throws away what there is
        training.forward_backward_custom([datum(TEXT, advantages=gains)], loss).result()
        norms.append(gradient_norm(training))
    return norms


def presets(training, sampler, names):
    """The server's value of each preset of ours on a sampled sequence, with what it is a function of.

    One that rests on lags gets them by the sequence's spans, since the SDK tells its clients no versions.
    """
    prompt = TEXT[:8]
    asked = types.SamplingParams(max_tokens=12, stop=[], seed=5)
    (sequence,) = sampler.sample(types.ModelInput.from_ints(prompt), 1, asked).result().sequences
    training.optim_step(types.AdamParams(learning_rate=3e-2)).result()
    whole, blank = [*prompt, *sequence.tokens], [0.0] * 7
    gains = [*blank, *torch.linspace(-1, 1.5, 12).tolist()]
    item = datum(whole, logprobs=[*blank, *sequence.logprobs], advantages=gains)

    def part(kind, offset, length):
        return kind(sequence_id=sequence.sequence_id, offset=offset, length=length)

    first, later = types.PromptProvenanceSpan, types.SampledProvenanceSpan
    spanned = item.with_provenance(
        model_input=[part(first, 0, 8), part(later, 0, 11)], loss_fn_inputs=[part(first, 1, 7), part(later, 0, 12)]
    )
    scored = training.forward([datum(whole)], "cross_entropy").result()
    configs = {name: {"headway": name} for name in names} | {
        "interpolated": {"headway": "grpo", "proximal": "interpolate"}
    }
    values = {
        name: training.forward_backward([spanned], "ppo", config).result().metrics["loss:sum"]
        for name, config in configs.items()
    }
    refused = []
    for config in (configs["interpolated"], {"headway": "grpo_9"}, {"headway": "grpo", "clip": "0.2"}):
        try:
            training.forward_backward([item], "ppo", config).result()
        except tinker.RequestFailedError as error:
            refused.append(str(error))
    return {
        "values": values,
        "policy": list(scored.loss_fn_outputs[0]["logprobs"].data)[7:],
        "behavior": list(sequence.logprobs),
        "advantages": gains[7:],
        "refused": refused,
    }


service = tinker.ServiceClient(base_url=URL, api_key="tml-a")
training = service.create_lora_training_client(base_model=MODEL, rank=8, seed=1).result()
first = training.forward_backward([datum(TEXT)], "cross_entropy").result().metrics["loss:sum"]
training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
sampler = training.save_weights_and_get_sampling_client().result()
sampled_logprobs = sampler.compute_logprobs(types.ModelInput.from_ints(TEXT)).result()[1:]
trained = training.forward([datum(TEXT)], "cross_entropy").result()
report = {
    "first": first,
    "then": trained.metrics["loss:sum"],
    "sampler and trainer": [sampled_logprobs, list(trained.loss_fn_outputs[0]["logprobs"].data)],
    "losses": losses(training),
    "custom": custom_norms(training, service),
    "presets": presets(training, sampler, sys.argv[3:]),
}
print(json.dumps(report))
sys.stdout.flush()
os._exit(0)  # the SDK's threads would wait for the server
