"""Files that a soak starts from: a tiny model, one short epoch of sums, and a run.toml with short deadlines."""

import json
from dataclasses import dataclass
from pathlib import Path

GROUPS_PER_STEP = 2
GROUP_SIZE = 2
MAX_LAG = 4
TASKS = 1000
"""Of an epoch: 500 steps."""
CHECKPOINT_EVERY = 100
TRAJECTORIES_MB = 4
"""Little, so that the oldest trajectories go, as in a long run."""


@dataclass(frozen=True)
class SoakPorts:
    """Ports of each process on this machine."""

    learner: int
    leases: int
    generator: int
    rewards: int
    env: int


def make_model(folder: Path, *, seed: int) -> None:
    """A random Llama of 11 thousand parameters that reads and writes sums, in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from examples.addition.make_model import make_tokenizer

    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, dtype=torch.float32,
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    LlamaForCausalLM(config).save_pretrained(folder)


def write_tasks(path: Path) -> None:
    """Sums of two-digit numbers. A random policy comes within half of the right one now and then."""
    path.write_text("".join(_task(index) for index in range(TASKS)), encoding="utf-8")


def _task(index: int) -> str:
    left, right = divmod(index * 7919 % 10_000, 100)
    arguments = {"answer": left + right, "relative_tolerance": 0.5}
    return json.dumps({"prompt": f"{left:02d}+{right:02d}=", "verifier": "numeric", "arguments": arguments}) + "\n"


def write_run_file(folder: Path, *, steps: int, seed: int, ports: SoakPorts) -> Path:
    """Model, tasks and run.toml; the path of the latter."""
    model, tasks = folder / "model", folder / "tasks.jsonl"
    make_model(model, seed=seed)
    write_tasks(tasks)
    path = folder / "run.toml"
    path.write_text(
        f"""
[run]
name = "soak"
directory = "{folder / "runs"}"

[learner]
model = "{model}"
steps = {steps}
groups_per_step = {GROUPS_PER_STEP}
max_lag = {MAX_LAG}
http = {{ port = {ports.learner} }}
lag = {{ straggler_timeout_s = 5.0 }}
rollouts = {{ group_size = {GROUP_SIZE}, max_tokens = 4, drop_uniform_groups = false }}
evaluation = {{ tasks = 0, final_tasks = 0 }}
checkpoint = {{ every_steps = {CHECKPOINT_EVERY} }}
samples = {{ budget_mb = {TRAJECTORIES_MB} }}
training.optimizer = {{ learning_rate = 1e-5 }}

[learner.leases]
address = "tcp://127.0.0.1:{ports.leases}"
heartbeat_every_s = 1.0
timeout_s = 6.0
infrastructure_retries = 100

[learner.weights]
announce_every_s = 1.0
silence_s = 4.0
bucket_mb = 1
bucket_timeout_s = 3.0
meet_timeout_s = 5.0
commit_timeout_s = 5.0
probe_tokens = 32

[generator]
model = "{model}"
id = "g1"
openai = false
http = {{ port = {ports.generator} }}
engine = {{ dtype = "float32", max_model_len = 64 }}
drain_s = 1.0
join = {{ learner = "http://127.0.0.1:{ports.learner}", pause_ttl_s = 6.0 }}

[reward-service]
sandbox = "off"
http = {{ port = {ports.rewards} }}

[env-service]
model = "{model}"
env_id = "e1"
http = {{ port = {ports.env} }}
learner = "tcp://127.0.0.1:{ports.leases}"
capacity = 8
resend_s = 1.0
drain_s = 1.0
reward_urls = ["http://127.0.0.1:{ports.rewards}"]
retry = {{ generator_silence_s = 4.0, reward_timeout_s = 4.0, backoff_s = 0.1, backoff_max_s = 1.0 }}
environments = [{{ name = "sums", source = "jsonl", train_file = "{tasks}", chat = false }}]
""",
        encoding="utf-8",
    )
    return path
