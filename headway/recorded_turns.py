"""When the turns of a run were asked for and ended, by its store of trajectories, and what an engine's step took then.

The store keeps all groups of a run whose steps take a second or more, and a few of a faster one's. Where none is left
out, the turns that an engine had at once are known at each moment, and with them how its time for a token grew.
"""

import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from learner.page.reading import opened
from learner.page.store import FOLDER

_LEAST_TURNS = 50
_SPREAD = 0.1
"""Standard deviation over mean of the turns at once from which on a line can be fitted."""
_MAX_LEFT_OUT = 0.05
"""Share of the groups that may be left out, as when a disk was slow, for the others to tell how many ran at once."""
_KEPT = "SELECT coalesce(sum(groups), 0), coalesce(sum(left_out), 0) FROM steps WHERE step > ?"
_TURNS = "SELECT times, facts FROM rows JOIN groups ON groups.id = grp WHERE rows.step > ?"
_TIMES = "SELECT times FROM groups WHERE step > ?"


@dataclass(frozen=True)
class SampledTurns:
    """Turns of a run, all of them: when each began and ended, in seconds since 1970, and its sampled tokens, [N]."""

    began: NDArray[np.float64]
    ended: NDArray[np.float64]
    tokens: NDArray[np.float64]

    @property
    def open(self) -> float:
        """Turns that were open, on average from the first one's begin to the last one's end."""
        return float(np.sum(self.ended - self.began) / max(1e-9, np.max(self.ended) - np.min(self.began)))

    def at_once(self, open_for_one: float) -> NDArray[np.float64]:
        """Turns that an engine had at once during each one, itself included, on average over its time, [N].

        `open_for_one` are open for each of these: those of other generators, and those not yet, or no longer, in it.
        """
        times = np.concatenate([self.began, self.ended])
        order = np.argsort(times, kind="stable")
        times = times[order]
        change = np.concatenate([np.ones(len(self.began)), -np.ones(len(self.ended))])[order]
        area = np.concatenate([[0.0], np.cumsum(np.cumsum(change)[:-1] * np.diff(times))])
        spent = np.maximum(self.ended - self.began, 1e-9)
        found = (np.interp(self.ended, times, area) - np.interp(self.began, times, area)) / spent
        at_once: NDArray[np.float64] = np.maximum(1.0, found / open_for_one)
        return at_once


def sampled_turns(folder: Path, *, after_step: int) -> SampledTurns | None:
    """Turns of a run's later steps; None where more than a few groups were left out, or nobody noted the times."""
    rows: list[tuple[float, float, int]] = []
    kept = left_out = 0
    try:
        for path in _parts(folder):
            with opened(path) as database:
                groups, missed = database.execute(_KEPT, (after_step,)).fetchone()
                kept, left_out = kept + groups, left_out + missed
                if left_out > _MAX_LEFT_OUT * (kept + left_out):
                    return None
                rows += [turn for row in database.execute(_TURNS, (after_step,)) for turn in _turns(*row)]
    except (sqlite3.DatabaseError, ValueError, KeyError, TypeError):
        return None  # of an earlier release, or damaged
    if len(rows) < _LEAST_TURNS:
        return None
    began, ended, tokens = np.array(rows, dtype=np.float64).T
    return SampledTurns(began, ended, tokens)


def scoring_times(folder: Path, *, after_step: int) -> NDArray[np.float64]:
    """Seconds that the scoring of groups took, of those that were kept, in order of size, [N]; empty if none tells."""
    found: list[float] = []
    try:
        for path in _parts(folder):
            with opened(path) as database:
                pairs = [
                    json.loads(times or "{}").get("scoring_s") for (times,) in database.execute(_TIMES, (after_step,))
                ]
                found += [pair[1] - pair[0] for pair in pairs if pair]
    except (sqlite3.DatabaseError, ValueError, IndexError, TypeError, AttributeError):
        return np.array([])
    return np.sort(np.array(found, dtype=np.float64))


def engine_curve(turns: SampledTurns, *, open_for_one: float, paused: float = 0.0) -> tuple[float, float] | None:
    """Seconds of an engine's step, and those that each sequence adds: a turn's time for a token, as a line over the
    turns at once, which neither falls nor begins below 0. None if all turns had as many beside them.

    Engines paused for `paused` of the time, in which nothing was sampled.
    """
    at_once = turns.at_once(open_for_one)
    per_token = (1 - paused) * (turns.ended - turns.began) / turns.tokens
    mean, mean_s = float(np.mean(at_once)), float(np.mean(per_token))
    if float(np.std(at_once)) < _SPREAD * mean:
        return None
    slope = max(0.0, float(np.polyfit(at_once, per_token, 1)[0]))
    return max(0.0, mean_s - slope * mean), min(slope, mean_s / mean)


def computed_share(curve: tuple[float, float], turns: SampledTurns, *, open_for_one: float, engine_s: float) -> float:
    """Computed seconds for one second of this curve, of an engine to which a turn cost `engine_s` of them on average:
    the rest it waited, for a core or for what came before it.
    """
    step_s, sequence_s = curve
    costs = turns.tokens * (step_s / turns.at_once(open_for_one) + sequence_s)
    return engine_s / float(np.mean(costs))


def _parts(folder: Path) -> list[Path]:
    return sorted((folder / FOLDER).glob("part-*.db"))


def _turns(times: str, facts: str) -> Iterator[tuple[float, float, int]]:
    granted = json.loads(times)["granted_unix_s"]
    for turn in json.loads(facts)["turns"]:
        if turn["end"] > turn["completion_start"]:
            yield granted + turn["asked_s"], granted + turn["ended_s"], turn["end"] - turn["completion_start"]
