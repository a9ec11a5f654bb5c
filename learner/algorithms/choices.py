"""Names of choices that configs and pure functions share. Loads no torch."""

from __future__ import annotations

from typing import Literal

KlForm = Literal["k1", "k2", "k3"]
TruncationRule = Literal["keep", "mask", "penalise"]
