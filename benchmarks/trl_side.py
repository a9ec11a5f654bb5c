"""TRL's side of the benchmarks: its virtual environment, single steps on given tokens, and whole runs.

The environment is made in build/trl at the first call: TRL and what it lacks are installed, and all other packages
(torch, transformers) are this environment's, so that both sides compute with the same ones.

    build/trl/bin/python -m benchmarks.trl_side FOLDER      a run by FOLDER/given.json; writes FOLDER/steps.json
"""

import importlib
import json
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.step_sides import Given

RELEASE = "trl==1.16.0"
NAMED = "TRL 1.16.0, eager attention, fused AdamW, one microbatch"
FOLDER = Path("build/trl")
LOCK = Path("requirements/cpu.lock")


@dataclass(frozen=True)
class TrlRun:
    """A completion is worth 1 if it equals its prompt's answer; without `answers`, it is to have 12 to 18 words.

    A step's groups are trained on in so many `updates`, and so many times over (`iterations`); `warmup` is in updates.
    """

    model: str
    dtype: str
    prompts: list[str]
    answers: list[str]
    steps: int
    groups: int
    group_size: int
    max_tokens: int
    learning_rate: float
    schedule: str
    warmup: int
    beta2: float
    threads: int
    updates: int = 1
    iterations: int = 1


def trl_python() -> Path:
    """The interpreter of TRL's environment, which is made if it is not there."""
    python = FOLDER / "bin" / "python"
    if not (FOLDER / ".installed").exists():
        print(f"making {FOLDER} with {RELEASE}", file=sys.stderr)
        venv.create(FOLDER, with_pip=True, clear=True)
        ask = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        own = Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())
        shared = sysconfig.get_path("purelib")
        (own / "headway.pth").write_text(f"import site; site.addsitedir({shared!r})\n", encoding="utf-8")
        install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", str(LOCK), RELEASE]
        subprocess.run(install, check=True)
        (FOLDER / ".installed").touch()
    return python


def _settings(folder: str, **more: object) -> Any:
    trl = importlib.import_module("trl")
    given: dict[str, object] = {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "optim": "adamw_torch_fused",
        "gradient_checkpointing": False,
        "gradient_accumulation_steps": 1,
        "adam_beta1": 0.9,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "beta": 0.0,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        **more,
    }
    return trl.GRPOConfig(**given)


def _model_settings(dtype: str) -> dict[str, object]:
    return {"dtype": dtype, "attn_implementation": "eager", "local_files_only": True}


def steps_on_given_tokens(given: "Given", *, wait: Callable[[], bool], tell: Callable[[float, float], None]) -> None:
    """Its step on a batch that is there: forward, loss, backward, clipping, AdamW.

    One for each time that `wait` returns True; `tell` is told its seconds and its CPU seconds.
    """
    trl, torch = importlib.import_module("trl"), importlib.import_module("torch")
    transformers, datasets = importlib.import_module("transformers"), importlib.import_module("datasets")
    torch.set_num_threads(given.threads)
    inputs = _padded_batch(given)
    began: list[float] = []

    class StepTimes(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, *_: object, **__: object) -> None:
            tell(time.perf_counter() - began[0], time.process_time() - began[1])

    class GivenTokens(trl.GRPOTrainer):  # type: ignore[misc, name-defined]
        def _prepare_inputs(self, _: object) -> Any:
            if not wait():
                sys.exit(0)
            began[:] = [time.perf_counter(), time.process_time()]
            return dict(inputs)

    with tempfile.TemporaryDirectory() as folder:
        count = given.groups * given.group_size
        settings = _settings(
            folder,
            per_device_train_batch_size=count,
            num_generations=given.group_size,
            max_completion_length=given.longest,
            learning_rate=1e-6,
            max_steps=1_000_000,
            logging_strategy="no",
            model_init_kwargs=_model_settings(given.dtype),
        )
        GivenTokens(
            model=given.model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=settings,
            train_dataset=datasets.Dataset.from_list([{"prompt": "1"}] * count),
            processing_class=transformers.AutoTokenizer.from_pretrained(given.model),
            callbacks=[StepTimes()],
        ).train()


def _padded_batch(given: "Given") -> Mapping[str, object]:
    """The batch of the other sides as TRL's generation leaves it."""
    torch = importlib.import_module("torch")
    from benchmarks.step_sides import batch_of

    sequences = batch_of(given, shared=True)
    longest = max(given.lengths())
    prompts = torch.tensor([sequence.token_ids[: given.prompt].tolist() for sequence in sequences])
    completions, mask = torch.zeros(2, len(sequences), longest, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        own = sequence.token_ids[given.prompt :].tolist()
        completions[row, : len(own)] = torch.tensor(own)
        mask[row, : len(own)] = 1
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": mask,
        "advantages": torch.tensor([sequence.reward for sequence in sequences], dtype=torch.float32),
        "num_items_in_batch": mask.sum(),
    }


def run(folder: Path) -> None:
    """A whole run, as TrlRun says."""
    given = TrlRun(**json.loads((folder / "given.json").read_text(encoding="utf-8")))
    trl, torch = importlib.import_module("trl"), importlib.import_module("torch")
    transformers, datasets = importlib.import_module("transformers"), importlib.import_module("datasets")
    torch.set_num_threads(given.threads)
    updates = given.updates * given.iterations
    steps: dict[str, list[float]] = {"times": [], "rewards": [], "lengths": []}
    began = [0.0]

    class RewardTimes(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_train_begin(self, *_: object, **__: object) -> None:
            began[0] = time.perf_counter()

        def on_log(self, *_: object, logs: Mapping[str, float], **__: object) -> None:
            if "reward" in logs:
                steps["times"].append(time.perf_counter() - began[0])
                steps["rewards"].append(float(logs["reward"]))
                steps["lengths"].append(float(logs["completions/mean_length"]))

    rows = [{"prompt": prompt} for prompt in given.prompts]
    for row, answer in zip(rows, given.answers, strict=False):
        row["answer"] = answer
    trl.GRPOTrainer(
        model=given.model,
        reward_funcs=_right if given.answers else _of_length,
        args=_settings(
            str(folder / "output"),
            per_device_train_batch_size=given.groups * given.group_size // given.updates,
            steps_per_generation=given.updates,
            num_iterations=given.iterations,
            num_generations=given.group_size,
            max_completion_length=given.max_tokens,
            learning_rate=given.learning_rate,
            lr_scheduler_type=given.schedule,
            warmup_steps=given.warmup,
            adam_beta2=given.beta2,
            max_steps=given.steps * updates,
            logging_steps=updates,
            model_init_kwargs=_model_settings(given.dtype),
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(given.model, padding_side="left"),
        callbacks=[RewardTimes()],
    ).train()
    (folder / "steps.json").write_text(json.dumps(steps), encoding="utf-8")


def _right(completions: Sequence[str], answer: Sequence[str], **_: object) -> list[float]:
    return [float(completion == wanted) for completion, wanted in zip(completions, answer, strict=True)]


def _of_length(completions: Sequence[str], **_: object) -> list[float]:
    words = [len(completion.split()) for completion in completions]
    return [max(0.0, 1.0 - 0.1 * max(12 - count, count - 18, 0)) for count in words]


if __name__ == "__main__":
    run(Path(sys.argv[1]))
