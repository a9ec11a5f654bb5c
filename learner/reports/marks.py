"""Marks on the curves where something happened: which events are marks, where they stand, and what they say.

metrics.jsonl ──▶ RunHistory.events ──▶ marks_in ──▶ page, report
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from learner.reports.history import Entry, is_number

MAX_MARKS = 500
"""Of a kind; of more, neighbours are made one."""
_MAX_TEXT = 200
_VERDICTS = ("healthy", "bounded", "sick")
_GUARD = {
    "tightened": ("▼", "the guard lowers the lag bound from {before} to {after}"),
    "loosened": ("▲", "the guard raises the lag bound from {before} to {after}"),
    "powerless": ("▼", "the guard cannot lower the lag bound below {after}"),
}
_MEASURED = ("accuracy", "reward", "nll")


@dataclass(frozen=True)
class MarkKind:
    """A kind of events that are marked: its name in `metrics.jsonl`, what it is called, its symbol and its colour.

    `regular`: a run that goes well has one every so many steps. It belongs to its version, and stands there on every
    axis; the others stand where they were by the clock, if the axis is one of time.
    """

    kind: str
    title: str
    symbol: str
    color: str
    regular: bool = False


MARK_KINDS = (
    MarkKind("resume", "restarts", "↻", "red"),
    MarkKind("suspicion", "distrusted generators", "!", "red"),
    MarkKind("leave", "generators gone", "×", "red"),
    MarkKind("guard", "lag bound", "▼", "orange"),
    MarkKind("verdict", "verdicts", "●", "orange"),
    MarkKind("join", "generators joined", "+", "green"),
    MarkKind("evaluation", "evaluations", "○", "blue", regular=True),
    MarkKind("checkpoint", "checkpoints", "◆", "violet", regular=True),
)
"""All kinds; where several marks are close to each other, the first of them is drawn."""


@dataclass(frozen=True)
class CurveMark:
    """Something that happened after a step: its kind, what it was, and when, in seconds since 1970 if that is known."""

    kind: str
    step: int
    symbol: str
    text: str
    unix_s: float | None = None


def is_marked(kind: str) -> bool:
    """Tells whether events of a kind can be marks."""
    return any(one.kind == kind for one in MARK_KINDS)


def marks_in(events: Sequence[Entry], *, most: int = MAX_MARKS) -> list[CurveMark]:
    """The marks of a `RunHistory`'s events, kind by kind, in their order; of a kind with more than `most`, equally many
    in a row are made one. A restart from a version that a later one took back stands where the later one does.
    """
    found, kept = [], float("inf")
    for event in reversed(events):
        step = int(min(event["step"], kept))
        kept = step if event["kind"] == "resume" else kept
        if (mark := _mark(event, step)) is not None:
            found.append(mark)
    found.reverse()
    by_kind = ([mark for mark in found if mark.kind == one.kind] for one in MARK_KINDS)
    return [mark for marks in by_kind for mark in _joined(marks, most=most)]


def near_each_other(
    marks: Iterable[CurveMark], place: Callable[[int], float], *, apart: float
) -> list[tuple[float, list[CurveMark]]]:
    """Groups marks whose places, by their steps, are less than `apart` from the leftmost one of them. A group stands at
    the place of its most important mark, which comes first in it: `marks` are in that order, as `marks_in` gives them.
    """
    placed = sorted(enumerate((place(mark.step), mark) for mark in marks), key=lambda each: each[1][0])
    groups: list[list[tuple[int, tuple[float, CurveMark]]]] = []
    for each in placed:
        if groups and each[1][0] - groups[-1][0][1][0] < apart:
            groups[-1].append(each)
        else:
            groups.append([each])
    found = [[pair for _, pair in sorted(group, key=lambda each: each[0])] for group in groups]
    return [(group[0][0], [mark for _, mark in group]) for group in found]


def _joined(marks: Sequence[CurveMark], *, most: int) -> Iterable[CurveMark]:
    width = max(1, -(-len(marks) // most))
    for first in range(0, len(marks), width):
        head, others = marks[first], len(marks[first : first + width]) - 1
        yield (
            replace(head, text=f"{head.text}; {others} more up to step {marks[first + others].step}")
            if others
            else head
        )


def _mark(event: Entry, step: int) -> CurveMark | None:
    kind = next((one for one in MARK_KINDS if one.kind == event["kind"]), None)
    if kind is None or (kind.kind == "verdict" and event.get("state") not in _VERDICTS):
        return None
    symbol = _GUARD.get(str(event.get("change")), (kind.symbol,))[0]
    text, unix_s = _text(kind.kind, event), event.get("unix_s")
    short = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"
    return CurveMark(kind.kind, step, symbol, short, unix_s if is_number(unix_s) else None)


def _text(kind: str, event: Entry) -> str:
    match kind:
        case "resume":
            return f"the learner was started again, from version {event['step']}"
        case "suspicion":
            expelled = ", and is expelled" if event.get("quarantined") else ""
            return (
                f"generator {event.get('generator_id')} is not believed any more (by its {event.get('test')}){expelled}"
            )
        case "leave":
            why = event.get("expelled")
            return f"generator {event.get('generator_id')} {f'was expelled: {why}' if why else 'has gone'}"
        case "join":
            return f"generator {event.get('generator_id')} has caught up with version {event['step']}"
        case "guard":
            return _guarded(event)
        case "verdict":
            return f"{event['state']}: {event.get('sentence')}"
        case "checkpoint":
            return f"checkpoint, written in {_short(event.get('seconds'))} s"
    return f"evaluation: {', '.join(_measured(event)) or 'without a number'}"


def _guarded(event: Entry) -> str:
    _, said = _GUARD.get(str(event.get("change")), ("", "the guard moves the lag bound from {before} to {after}"))
    text = said.format(before=_short(event.get("before")), after=_short(event.get("after")))
    measure, value, limit = event.get("measure"), _short(event.get("value")), _short(event.get("limit"))
    return f"{text}: {measure} is {value}, its limit {limit}" if measure else text


def _measured(event: Entry) -> Iterable[str]:
    low, high = event.get("accuracy_low"), event.get("accuracy_high")
    for name in _MEASURED:
        if is_number(event.get(name)):
            interval = f" ({_short(low)} to {_short(high)})" if name == "accuracy" and is_number(low) else ""
            yield f"{name} {_short(event[name])}{interval}"


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) else "–"
