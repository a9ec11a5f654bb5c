"""The life of a lease in lanes: where its time went, from its grant to the end of the step that trained its group.

    queue │▓▓░░░░░░░░│   granted, and no turn is asked for yet
    turn 1│  ▓▓▓░░░░░│   a bar for each trajectory of the group
    score │     ▓░░░░│
    buffer│      ▓▓▓░│   accepted, and no batch has taken it yet
    step  │         ▓│
            ↑    ↑       versions that were published meanwhile: each makes the group staler by one

Only times that somebody noted are drawn. For a lane without one there is a word instead.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from learner.page.curves import RunMoments
from learner.page.reading import MAX_SIBLINGS, Key, opened
from learner.page.store import FOLDER
from learner.reports.history import is_number

MAX_TURN_LANES = 12
"""Turns that have a lane each; all later ones share one more."""
MAX_PUBLISHES = 64

_OLDER = "no time of it is kept: the run is of an earlier release, or trained the group again after a resume"
_LEFT_OUT = "the group was left out of training"
_FORMER = "it was granted by a former life of the learner, whose times are not kept"
_NO_TURNS = "its env_service noted no times of turns"
_DISAGREE = "the clocks of the learner and of the env_service disagree"


@dataclass(frozen=True, kw_only=True)
class LifeBar:
    """A stretch of time, in seconds since the beginning of the picture. `place` is the trajectory's, None for all."""

    begin: float
    end: float
    place: int | None = None
    versions: Sequence[str] = ()
    generators: Sequence[str] = ()


@dataclass(frozen=True)
class LifeLane:
    """A row of the picture: bars of one name."""

    name: str
    bars: Sequence[LifeBar]


@dataclass
class LeaseLife:
    """The picture: lanes from the first to the last, `missing` says of the others why they are not there.

    `published` are versions with the seconds since the beginning.
    """

    lanes: list[LifeLane] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)
    published: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, name: str, begin: float | None, end: float | None, *, why: str) -> None:
        """A lane of one bar, or `why` it is left out."""
        if begin is None or end is None:
            self.missing.append((name, why))
        elif end < begin:
            self.missing.append((name, _DISAGREE))
        else:
            self.lanes.append(LifeLane(name, [LifeBar(begin=begin, end=end)]))


@dataclass(frozen=True)
class TimedTurn:
    """A turn of the trajectory at `place`: when it was asked for and ended, in seconds since the rollout began."""

    place: int
    number: int
    asked_s: float
    ended_s: float
    versions: Sequence[str] = ()
    generators: Sequence[str] = ()


def life_of(
    times: Mapping[str, Any], turns: Sequence[TimedTurn], moments: RunMoments, *, left_out: bool = False
) -> LeaseLife:
    """The life of a group, by its `times` as the store has them, its turns, and the moments of its step.

    Without the time of its grant the picture begins with the rollout where nothing else is known, and with what is
    known of the learner otherwise: where a rollout lay between grants and steps nobody can tell then.
    """
    granted, accepted, taken = (_number(times, f"{name}_unix_s") for name in ("granted", "accepted", "taken"))
    ended = None if left_out else moments.ended_unix_s
    if taken is None and ended is not None and moments.took_s is not None:
        taken = ended - moments.took_s
    known = [at for at in (granted, accepted, taken, ended) if at is not None]
    zero = min(known) if known else None

    def since(at: float | None) -> float | None:
        return None if at is None or zero is None else at - zero

    found = LeaseLife()
    if granted is not None or not known:
        _add_rollout(found, times, turns, queued=granted is not None)
    else:
        why = _FORMER if accepted is not None else _OLDER
        found.missing += [(name, why) for name in ("queue", "turns", "score")]
    rollout_s = _number(times, "rollout_s")
    back = None if granted is None or rollout_s is None else rollout_s
    learner = _LEFT_OUT if left_out else _OLDER
    if granted is not None:
        found.add("delivery", back, since(accepted), why=learner)
    found.add("buffer", since(accepted), since(taken), why=learner)
    found.add("step", since(taken), since(ended), why=_LEFT_OUT if left_out else "metrics.jsonl has no such step")
    found.seconds = max((bar.end for lane in found.lanes for bar in lane.bars), default=0.0)
    if zero is not None:
        meanwhile = [(each.version, each.unix_s - zero) for each in moments.published]
        found.published = [(version, at) for version, at in meanwhile if 0 <= at <= found.seconds][-MAX_PUBLISHES:]
    return found


def _add_rollout(found: LeaseLife, times: Mapping[str, Any], turns: Sequence[TimedTurn], *, queued: bool) -> None:
    """Lanes that the env_service tells of, which begin with the rollout: queue, turns and score."""
    first = min((turn.asked_s for turn in turns), default=None)
    found.add("queue" if queued else "opening", 0.0, first, why=_NO_TURNS)
    if not turns:
        found.missing.append(("turns", _NO_TURNS))
    lanes: dict[int, dict[int, LifeBar]] = {}
    for turn in turns:
        lane = lanes.setdefault(min(turn.number, MAX_TURN_LANES), {})
        lane[turn.place] = _joined(lane.get(turn.place), _bar(turn))
    last = max((turn.number for turn in turns), default=0)
    for number, bars in sorted(lanes.items()):
        shared = number == MAX_TURN_LANES and last > number
        name = f"turns {number + 1} to {last + 1}" if shared else f"turn {number + 1}"
        found.lanes.append(LifeLane(name, list(bars.values())))
    scoring = times.get("scoring_s")
    known = isinstance(scoring, list) and len(scoring) == 2 and all(map(is_number, scoring))
    begin, end = scoring if known and scoring is not None else (None, None)
    found.add("score", begin, end, why="no verifier was asked, or its env_service noted no times of it")


def _bar(turn: TimedTurn) -> LifeBar:
    return LifeBar(
        begin=turn.asked_s, end=turn.ended_s, place=turn.place, versions=turn.versions, generators=turn.generators
    )


def _joined(bar: LifeBar | None, other: LifeBar) -> LifeBar:
    if bar is None:
        return other
    return LifeBar(
        begin=min(bar.begin, other.begin),
        end=max(bar.end, other.end),
        place=bar.place,
        versions=list(dict.fromkeys([*bar.versions, *other.versions])),
        generators=list(dict.fromkeys([*bar.generators, *other.generators])),
    )


def _number(times: Mapping[str, Any], name: str) -> float | None:
    value = times.get(name)
    return float(value) if isinstance(value, int | float) and is_number(value) else None


def turns_in(facts: Iterable[tuple[int, Mapping[str, Any]]]) -> list[TimedTurn]:
    """The turns whose times are known, of trajectories by their places with their facts as the store has them."""
    found = []
    for place, each in facts:
        for number, turn in enumerate(each.get("turns", ())):
            asked, ended = turn.get("asked_s"), turn.get("ended_s")
            if not (is_number(asked) and is_number(ended)) or ended < asked:
                continue
            versions = {
                version: None
                for version, start, end in each.get("spans", ())
                if start < turn["end"] and turn["completion_start"] < end
            }
            found.append(TimedTurn(place, number, asked, ended, list(versions), list(turn.get("generator_ids", ()))))
    return found


def kept_life(folder: Path, key: Key, moments_of: Callable[[int], RunMoments]) -> dict[str, Any] | None:
    """The life of a group that is kept, for JSON; None if it is not there. `moments_of` is asked for its step.

    At most 64 of its trajectories are drawn. Raises sqlite3.DatabaseError for a part that cannot be read.
    """
    path = folder / FOLDER / f"part-{key.part:010d}.db"
    if not path.exists():
        return None
    with opened(path) as database:
        head = database.execute("SELECT * FROM groups WHERE id = ?", (key.row,)).fetchone()
        rows = database.execute(
            "SELECT place, facts FROM rows WHERE grp = ? ORDER BY place LIMIT ?", (key.row, MAX_SIBLINGS)
        ).fetchall()
    if head is None:
        return None
    times: Any = {}
    with suppress(ValueError, IndexError, TypeError):  # a part of an earlier release has no such column
        times = json.loads(head["times"])
    turns = turns_in((row["place"], json.loads(row["facts"])) for row in rows)
    life = life_of(
        times if isinstance(times, dict) else {}, turns, moments_of(head["step"]), left_out=bool(head["why"])
    )
    return {**asdict(life), "step": head["step"]}
