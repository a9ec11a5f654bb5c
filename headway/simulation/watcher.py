"""What a world is told of the product's inner moments, for those who look whether it keeps its promises."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Told = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], None]


@dataclass
class Watcher:
    """Each is told the result of a call, and its arguments: a ledger was made, a run was taken up from its folder, a
    generator was expelled, or left the fleet.
    """

    ledger_made: Told
    recovered: Told
    expelled: Told
    dropped: Told
