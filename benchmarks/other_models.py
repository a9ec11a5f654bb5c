"""The addition demo with models of other architectures: does the whole loop teach them, as they are sampled?

    python -m benchmarks.other_models [--steps 500] [NAME ...]

Each model is made small and random, warmed up on worked sums as `make demo` warms up its Llama, and trained by
`examples/addition/run.toml` in which only the model, and the number of steps, differ. Results go to
benchmarks/results/other_models.md, a row after each run.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.machine import described_machine
from benchmarks.whole_runs import run_headway
from examples.addition.make_model import make_tokenizer, write_examples

CONFIG, WARM_UP = Path("examples/addition/run.toml"), Path("examples/addition/sft.toml")
RESULT = Path(__file__).with_name("results") / "other_models.md"
SIZES: Mapping[str, object] = {
    "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32,
    "max_position_embeddings": 128, "tie_word_embeddings": True, "bos_token_id": None,
}  # fmt: skip
KINDS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "qwen3-moe": ("Qwen3Moe", {
        "intermediate_size": 128, "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }),
    # A window shorter than a sum and its answer.
    "gemma3": ("Gemma3Text", {
        "intermediate_size": 384, "sliding_window": 4, "query_pre_attn_scalar": 32,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }),
    # A gated delta net below gated attention, as in Qwen3.5. vLLM wants a layer of experts, and a head of its own.
    "qwen3-next": ("Qwen3Next", {
        "num_hidden_layers": 2, "tie_word_embeddings": False, "intermediate_size": 384, "mlp_only_layers": [0],
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128, "norm_topk_prob": True,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    }),
}  # fmt: skip
# vLLM's gated delta net for a CPU takes nothing else.
OPTIONS: Mapping[str, Mapping[str, object]] = {"qwen3-next": {"generator.engine.dtype": "bfloat16"}}
NOTES = (
    "qwen3-next is a hybrid: a layer of a gated delta net, as Qwen3.5 has them, below one of gated attention and four "
    "experts. The learner trains it in float32; the generator computes in bfloat16, since vLLM has a gated delta net "
    'on a CPU in nothing else ("CPU GDN attention requires BF16.").',
    "",
    "So its gap and KL are those of bfloat16. KL was at most 7e-4 in 79 of the 80 steps that could measure it. The "
    "0.07 of the other step is of four tokens at one position of one prompt, apart by 1.8 to 5.2 nats, of 11,776 "
    "tokens sampled with the learner's own weights. transformers alone does the like: with the weights after 100 "
    "steps, bfloat16 against float32 differs by a KL of 4.3 at one of 9,000 positions, where rounding chooses other "
    "experts at a near tie. Weights of the step itself were not kept, so that it was not seen to be the same.",
    "",
    "Qwen3.5 itself has no row. vLLM's module of it imports torchvision, which the CPU installation leaves out: "
    '"Model architectures [\'Qwen3_5ForCausalLM\'] failed to be inspected", and above it "ModuleNotFoundError: No '
    "module named 'torchvision'\".",
)


def write_model(kind: str, traits: Mapping[str, object], folder: Path) -> int:
    """A random model of a kind of transformers, its tokenizer and its worked sums; returns the number of parameters.

    `traits` of its config come on top of those of all models here.
    """
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = getattr(transformers, f"{kind}Config")(vocab_size=len(tokenizer), **{**SIZES, **traits, **ends})
    model = AutoModelForCausalLM.from_config(config).float()
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_examples(folder / "sft.jsonl")
    return sum(parameter.numel() for parameter in model.parameters())


def warm_up(model: Path, *, folder: Path) -> Path:
    """The model after the demo's warm-up."""
    options = {
        "model": model, "output": folder / "warm", "data.path": model / "sft.jsonl", "run.directory": folder / "runs",
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    subprocess.run(
        [str(Path(sys.executable).with_name("learner")), "--config", str(WARM_UP), *words],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return folder / "warm"


def row(name: str, *, steps: int) -> str:
    """Trains the model; returns its line of the table."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        parameters = write_model(*KINDS[name], folder / "random")
        model = warm_up(folder / "random", folder=folder)
        options = {f"{one}.model": model for one in ("learner", "generator", "env-service")}
        schedule = {"learner.steps": steps, "learner.training.optimizer.total-updates": 4 * steps}
        made = run_headway(CONFIG, folder=folder, options={**options, **schedule, **OPTIONS.get(name, {})})
    lines = [line for line in made.entries if line["kind"] == "step"]
    tenth = max(1, len(lines) // 10)
    found = made.summary
    return (
        f"| {name} | {parameters / 1e6:.2f} | {_mean(lines[:tenth], 'reward_mean'):.3f} "
        f"| **{_mean(lines[-tenth:], 'reward_mean'):.3f}** | {found['accuracy_before']:.3f} "
        f"| **{found['accuracy_after']:.3f}** | {max(_gaps(made.entries)):.1g} | {_kl(lines):.1g} "
        f"| {_load(lines)} | {found['train_wall_s']:.0f} |"
    )


def _mean(lines: list[dict[str, Any]], name: str) -> float:
    return sum(float(line[name]) for line in lines) / len(lines)


def _gaps(entries: list[dict[str, Any]]) -> list[float]:
    return [float(line["probe_gap"]) for line in entries if line["kind"] == "publish"]


def _kl(lines: list[dict[str, Any]]) -> float:
    return max(abs(float(line["mismatch_kl"])) for line in lines if line["mismatch_kl"] is not None)


def _load(lines: list[dict[str, Any]]) -> str:
    """The largest load at first and at last, and how many experts were dead at last."""
    first, last = lines[0], lines[-1]
    if last.get("expert_load_max") is None:
        return "–"
    return f"{first['expert_load_max']:.2f} → {last['expert_load_max']:.2f}, {last['dead_experts']} dead"


def main() -> None:
    """Rewrites the table after each run; rows of models that are not run stay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(KINDS)}; all")
    parser.add_argument("--steps", type=int, default=500, help="of each run; %(default)s")
    arguments = parser.parse_args()
    rows: dict[str, str] = {}
    kept = RESULT.with_suffix(".json")
    if kept.exists():
        rows = json.loads(kept.read_text(encoding="utf-8"))
    for name in arguments.names or KINDS:
        rows[name] = f"{row(name, steps=arguments.steps)[:-2]} | {arguments.steps} | {described_machine()} |"
        print(rows[name], flush=True)
        kept.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        lines = [
            "# The addition demo with other architectures",
            "",
            "`python -m benchmarks.other_models`. Reward: the mean of the first and of the last tenth of the steps. "
            "Accuracy: on held-out tasks. Gap: the largest of a probe's logprobs, engine against learner, over all "
            "publishes; KL: the largest of a step's at equal weights. Load: the largest of an expert over an even one, "
            "in the first and in the last step.",
            "",
            "| model | M parameters | reward before | after | accuracy before | after | gap | KL | load | training, s "
            "| steps | machine |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|",
            *(rows[each] for each in KINDS if each in rows),
            "",
            *NOTES,
        ]
        RESULT.write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
