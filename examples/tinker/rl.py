"""RL on two-digit addition in a loop of one's own, with the Tinker SDK: `rl.py [STEPS]`.

Against `headway serve models/addition`, in whose folder it is started: the SDK looks for the tokenizer there.
"""

import random
import sys

import tinker
from tinker import types

MODEL, STEPS = "models/addition", int(sys.argv[1]) if len(sys.argv) > 1 else 40
PROMPTS, SAMPLES = 32, 8

training = tinker.ServiceClient().create_lora_training_client(base_model=MODEL, rank=16, seed=1).result()
tokenizer = training.get_tokenizer()
dice = random.Random(0)


def datum(prompt, sequence, advantage):
    """A completion, each of whose tokens has the advantage; those of the prompt have none."""
    tokens, before = prompt + list(sequence.tokens), len(prompt) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [0.0] * before + list(sequence.logprobs),
            "advantages": [0.0] * before + [advantage] * len(sequence.tokens),
        },
    )


for step in range(1, STEPS + 1):
    sampler = training.save_weights_and_get_sampling_client().result()
    sums = [(dice.randrange(100), dice.randrange(100)) for _ in range(PROMPTS)]
    prompts = [tokenizer.encode(f"{a:02d}+{b:02d}=", add_special_tokens=False) for a, b in sums]
    params = types.SamplingParams(max_tokens=5, temperature=1.0)
    answers = [sampler.sample(types.ModelInput.from_ints(prompt), SAMPLES, params) for prompt in prompts]
    data, right = [], 0
    for (a, b), prompt, answer in zip(sums, prompts, answers, strict=True):
        sequences = answer.result().sequences
        rewards = [tokenizer.decode(each.tokens, skip_special_tokens=True) == f"{a + b:03d}" for each in sequences]
        right, mean = right + sum(rewards), sum(rewards) / SAMPLES
        data += [
            datum(prompt, each, reward - mean)
            for each, reward in zip(sequences, rewards, strict=True)
            if reward != mean
        ]
    print(f"rl   step {step:3d}  reward {right / PROMPTS / SAMPLES:.3f}", flush=True)
    if data:
        passed = training.forward_backward(data, "importance_sampling")
        training.optim_step(types.AdamParams(learning_rate=3e-3)).result()
        passed.result()
