"""Memory that models of some sizes want, by process: the table of `headway doctor --memory`."""

import math
import sys
from collections.abc import Sequence

from headway.doctor.before import BARE_BYTES, GIB, MODEL_TIMES
from services.config.sources import ConfigError

TABLED = ("135M", "0.5B", "1.5B", "7B", "32B", "70B")
"""Numbers of parameters for which memory is tabled if none is named."""
_UNITS = {"M": 1e6, "B": 1e9}
_PARAMETER_BYTES = 2
_ON_GPU = {"learner": 16, "generator": 2}
"""Bytes of a parameter: weights, gradients and two moments in float32; weights in bfloat16. The rest is elsewhere."""


def memory_table(sizes: Sequence[str] = TABLED, *, cache_gb: float = 1.0) -> str:
    """A Markdown table of GiB by numbers of parameters ("135M", "7B"), by the same rule as `check_memory`.

    For a model that is kept in bfloat16, trained in float32 by one rank, without activations. Raises ValueError.
    """
    heads = ("parameters", "learner", "of it on its GPU", "generator", "of it on its GPU")
    rows = [heads, ("---",) * len(heads)]
    for size in sizes:
        count = _parameters(size)
        cells = [size]
        for process in ("learner", "generator"):
            cache = cache_gb * GIB if process == "generator" else 0.0
            everything = BARE_BYTES[process] + MODEL_TIMES[process] * _PARAMETER_BYTES * count + cache
            cells += [f"{everything / GIB:.1f}", f"{(_ON_GPU[process] * count + cache) / GIB:.1f}"]
        rows.append(tuple(cells))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _parameters(size: str) -> float:
    number, unit = size[:-1], _UNITS.get(size[-1:].upper())
    try:
        count = float(number) * (unit or 0)
    except ValueError:
        count = 0
    if not 0 < count < math.inf:
        raise ValueError(f"--memory: got {size!r}: expected numbers of parameters such as {', '.join(TABLED[:3])}")
    return count


def tell_memory(sizes: Sequence[str]) -> int:
    """Prints what models of these sizes want, or of usual ones. Raises ConfigError."""
    try:
        text = memory_table(sizes or TABLED)
    except ValueError as error:
        raise ConfigError([f"command line: {error}"]) from error
    note = (
        "GiB: bfloat16 files, trained in float32 by one rank, 1 GiB of cache in the generator; activations not counted"
    )
    sys.stdout.write(f"{text}\n{note}\n")
    return 0
