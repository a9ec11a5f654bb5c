"""SFT on worked sums, `37+48=085`, in a loop of one's own, with the Tinker SDK: `sft.py [STEPS]`.

Against `headway serve models/addition`, in whose folder it is started: the SDK looks for the tokenizer there.
"""

import random
import sys

import tinker
from tinker import types

MODEL, STEPS = "models/addition", int(sys.argv[1]) if len(sys.argv) > 1 else 200
ROWS = 64

training = tinker.ServiceClient().create_lora_training_client(base_model=MODEL, rank=32, seed=2).result()
tokenizer = training.get_tokenizer()
dice = random.Random(0)


def example(a, b):
    """The tokens of a question, and those of its answer with its end."""
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in (f"{a:02d}+{b:02d}=", f"{a + b:03d}")]
    return ids[0], [*ids[1], tokenizer.eos_token_id]


def datum(question, answer):
    """Only the answer is learned."""
    tokens = question + answer
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "weights": [0.0] * (len(question) - 1) + [1.0] * len(answer),
        },
    )


for step in range(1, STEPS + 1):
    rows = [datum(*example(dice.randrange(100), dice.randrange(100))) for _ in range(ROWS)]
    passed = training.forward_backward(rows, "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=3e-3 * (1 - step / (STEPS + 1)))).result()
    loss = passed.result().metrics["loss:sum"] / ROWS / 4
    if step % 10 == 0:
        print(f"sft  step {step:3d}  loss {loss:.3f} a token", flush=True)

sampler = training.save_weights_and_get_sampling_client().result()
asked = [example(dice.randrange(100), dice.randrange(100)) for _ in range(200)]
params = types.SamplingParams(max_tokens=5, temperature=0.0)
answers = [sampler.sample(types.ModelInput.from_ints(question), 1, params) for question, _ in asked]
right = sum(
    list(given.result().sequences[0].tokens) == wanted for given, (_, wanted) in zip(answers, asked, strict=True)
)
print(f"sft  {right / len(asked):.1%} of 200 sums are right", flush=True)
