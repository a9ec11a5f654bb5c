"""Faults of the model that a run is of, found in its files: what vLLM lacks for it, ids without a row of the embedding,
no token that ends what it says.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from services.config.devices import visible
from services.config.models import ProcessConfig
from services.model_folder import vocabulary_size

Configs = Mapping[str, ProcessConfig]


def unserved(configs: Configs, *, elsewhere: bool) -> Iterator[str]:
    """Faults of the generator's model that the installed vLLM cannot serve. Raises ModuleNotFoundError without vLLM.

    For a start `elsewhere` nothing is known of the device.
    """
    from generator.config import GeneratorConfig
    from generator.engine.fitting import engine_faults

    generator = configs.get("generator")
    if generator is None:
        return
    assert isinstance(generator, GeneratorConfig)
    on_cpu = not elsewhere and generator.collective != "nccl" and not visible(os.environ)
    for fault in engine_faults(
        generator.model, on_cpu=on_cpu, dtype=generator.engine.dtype, extra=generator.engine.extra
    ):
        yield f"[generator] {fault}"


def token_problems(configs: Configs) -> Iterator[str]:
    """Of each model that is trained or sampled from, once; one without a tokenizer that can be read has none here."""
    from env_service.environments.tokenization import Tokenization, TokenizerError

    folders: dict[Path, list[str]] = {}
    for name in ("learner", "generator", "env-service"):
        folder = getattr(configs.get(name), "model", None)
        if isinstance(folder, Path) and folder.is_dir():
            folders.setdefault(folder.resolve(), []).append(name)
    for folder, names in folders.items():
        try:
            tokenization, rows = Tokenization(folder), vocabulary_size(folder)
        except (OSError, ValueError, TokenizerError):
            continue
        yield from (f"[{names[0]}] model: {fault}" for fault in _more_ids(folder, tokenization.largest_id, rows))
        ends = [number for token in tokenization.end_tokens if (number := tokenization.id_of(token)) is not None]
        if _samples(configs) and not any(number < rows for number in ends):
            yield (
                f"[{names[0]}] model: {folder} names no end token, so that each completion would go on to its last "
                "token: expected eos_token_id in config.json or generation_config.json, or eos_token in "
                "tokenizer_config.json, a token of the tokenizer. Write it there, or set [learner] "
                "rollouts.stop_token_ids"
            )


def _more_ids(folder: Path, largest: int, rows: int) -> Iterator[str]:
    if largest >= rows:
        yield (
            f"the tokenizer in {folder} has ids up to {largest}, and the model has {rows} rows of embedding "
            f"(vocab_size): expected ids up to {rows - 1}, as neither training nor vLLM takes others. Take the "
            "tokenizer that belongs to the model, or load the model with transformers, "
            "resize_token_embeddings(len(tokenizer)) and write it with save_pretrained"
        )


def _samples(configs: Configs) -> bool:
    """True if completions are sampled that end by the model's own token alone."""
    from learner.config import LearnerConfig

    learner = configs.get("learner")
    return isinstance(learner, LearnerConfig) and not learner.learns_from_files and not learner.rollouts.stop_token_ids
