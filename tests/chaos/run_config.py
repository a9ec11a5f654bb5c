"""A run.toml with short deadlines, and the task file of its one epoch."""

import json
from dataclasses import dataclass
from pathlib import Path

GROUP_SIZE = 4
MAX_DEADLINE_S = 6.0
"""After so long every deadline below has passed."""


@dataclass(frozen=True)
class RunSize:
    """Steps, groups a step, and the bound. The epoch has exactly as many tasks as the run trains groups."""

    steps: int
    groups_per_step: int = 8
    max_lag: int = 4
    checkpoint_every: int = 5

    @property
    def tasks(self) -> int:
        return self.steps * self.groups_per_step


def write_config(folder: Path, *, model: Path, size: RunSize, reward_urls: list[str]) -> Path:
    """Everything but ports and addresses, which each process is given on its command line."""
    tasks = folder / "tasks.jsonl"
    tasks.write_text("".join(_task(index) for index in range(size.tasks)), encoding="utf-8")
    path = folder / "run.toml"
    path.write_text(
        f"""
[run]
name = "chaos"
directory = "{folder / "runs"}"

[learner]
model = "{model}"
steps = {size.steps}
groups_per_step = {size.groups_per_step}
max_lag = {size.max_lag}
leases = {{ heartbeat_every_s = 0.5, timeout_s = 4.0, infrastructure_retries = 100 }}
lag = {{ straggler_timeout_s = 5.0 }}
rollouts = {{ group_size = {GROUP_SIZE}, max_tokens = 5 }}
evaluation = {{ tasks = 0, final_tasks = 0 }}
checkpoint = {{ every_steps = {size.checkpoint_every} }}
training.optimizer = {{ learning_rate = 3e-4 }}

[learner.weights]
same_host = "broadcast"  # whose links can fail
announce_every_s = 0.5
silence_s = 3.0
bucket_mb = 1
bucket_timeout_s = 3.0
meet_timeout_s = 5.0
commit_timeout_s = 5.0

[generator]
model = "{model}"
engine = {{ dtype = "float32", max_model_len = 64, max_num_seqs = 64, kv_cache_gb = 0.25 }}
drain_s = 2.0
join = {{ pause_ttl_s = 6.0 }}

[reward-service]
sandbox = "off"

[env-service]
model = "{model}"
capacity = 8
resend_s = 1.0
reward_urls = {json.dumps(reward_urls)}
retry = {{ generator_silence_s = 4.0, reward_timeout_s = 3.0, backoff_s = 0.1, backoff_max_s = 1.0 }}
environments = [{{ name = "sums", source = "jsonl", train_file = "{tasks}", chat = false, verifier = "exact_match" }}]
""",
        encoding="utf-8",
    )
    return path


def _task(index: int) -> str:
    left, right = divmod(index * 7919 % 10_000, 100)
    return json.dumps({"prompt": f"{left:02d}+{right:02d}=", "answer": f"{left + right:03d}"}) + "\n"
