"""Runs one recipe as `python -m` would, with tables of sums for its data sets: `run_recipe.py MODULE ...`.

In the cookbook's environment, which has nothing of Headway.
"""

import runpy
import sys

import datasets

SUMS = [(number % 10, number // 10 % 10) for number in range(300)]


def load_dataset(path, *_, split=None, **__):
    """Rows as the recipes read them."""
    if "gsm8k" in path:
        rows = [{"question": f"{a}+0=", "answer": f"so\n#### {a}"} for a in (3, 7) * 150]
    elif "DeepMath" in path:
        rows = [{"question": f"{a}+{b}=", "final_answer": str(a + b)} for a, b in SUMS]
    elif "hh-rlhf" in path:
        talk = "\n\nHuman: {}+{}=\n\nAssistant: {}"
        rows = [{"chosen": talk.format(a, b, a + b), "rejected": talk.format(a, b, "x")} for a, b in SUMS]
    else:
        said = [
            ({"role": "user", "content": f"{a}+{b}="}, {"role": "assistant", "content": str(a + b)}) for a, b in SUMS
        ]
        rows = [{"messages": list(each)} for each in said]
    table = datasets.Dataset.from_list(rows)
    return table if split else datasets.DatasetDict({"train": table, "test": table})


if __name__ == "__main__":
    datasets.load_dataset = load_dataset
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
