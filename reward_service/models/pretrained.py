"""A Hugging Face model and its tokenizer, read from a directory that is still the one that was meant."""

from pathlib import Path
from typing import Any

import torch
import transformers

from reward_service.models.folder import fingerprint
from reward_service.models.messages import ModelToLoad
from reward_service.verifier.submission import UserError


def load_pretrained(
    auto: Any, given: ModelToLoad, *, is_it: str, unused: str | None = None, **settings: object
) -> tuple[Any, Any]:
    """The model of the class that `auto` finds, on its device, and its tokenizer. `unused` begins names of weights that
    may be missing.

    Raises UserError for files that are not those expected, and for weights that do not fill the model.
    """
    torch.set_num_threads(given.threads)
    if fingerprint(Path(given.path)) != given.fingerprint:
        raise UserError(f"the files in {given.path} have changed since the service was started: start it again")
    model, report = auto.from_pretrained(
        given.path,
        dtype=given.dtype,
        local_files_only=True,
        use_safetensors=True,  # the other format is a pickle
        output_loading_info=True,
        **settings,
    )
    missing = sorted(key for key in report["missing_keys"] if unused is None or not key.startswith(unused))
    if missing:
        raise UserError(f"the weights in {given.path} lack {', '.join(missing[:5])}: is it {is_it}?")
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.path, local_files_only=True)
    model.eval().to(given.device)
    return model, tokenizer
