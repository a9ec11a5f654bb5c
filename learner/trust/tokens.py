"""Sampled tokens of a step as the test of generators looks at them: whose they are, how old, what both sides say."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from protocol.model import PolicyVersion
from protocol.trajectories import Trajectory, TrajectoryGroup, VersionSpan

Place = tuple[int, int, int, int]
"""A sequence of the step: its group, its trajectory, its first token there, and its length."""

_NOBODY = -1


@dataclass(frozen=True)
class WholeText:
    """A trajectory that one process sampled from end to end. `prompt` and `whole` are digests of the tokens before the
    first sampled one, and of all; `logprob` that of all sampled tokens, in nats, by whichever side says more.
    """

    process: int
    prompt: int
    whole: int
    logprob: float


@dataclass(frozen=True)
class StepTokens:
    """N sampled tokens of a step, those alone of which it is known who sampled them and what the learner says.

    [N]: `processes` int64, an index into `names`; `lags` int64, versions between the learner and the token; `groups`
    and `texts` int64, its group and its trajectory; `old_cache` bool: sampled with keys and values of an older version;
    `theirs` and `ours` float64, logprobs in nats at the sampling temperature; `entropies` float64, of the learner's
    policy, NaN where it computed none. `instances` and `names` are those of the processes, in order.
    """

    instances: tuple[str, ...]
    names: tuple[str, ...]
    processes: NDArray[np.int64]
    lags: NDArray[np.int64]
    groups: NDArray[np.int64]
    texts: NDArray[np.int64]
    old_cache: NDArray[np.bool_]
    theirs: NDArray[np.float64]
    ours: NDArray[np.float64]
    entropies: NDArray[np.float64]
    whole: tuple[WholeText, ...] = ()


class _Processes:
    """Processes in the order in which they are met, and by which name their generator goes."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {}
        self.names: dict[str, str] = {}

    def number(self, span: VersionSpan, trajectory: Trajectory) -> int:
        instance = span.instance
        name = _name_of(span, trajectory)
        key = instance or name
        if not key:
            return _NOBODY
        if name or key not in self.names:
            self.names[key] = name or self.names.get(key, instance)
        return self._index.setdefault(key, len(self._index))

    @property
    def instances(self) -> tuple[str, ...]:
        return tuple(self._index)


def _name_of(span: VersionSpan, trajectory: Trajectory) -> str:
    """The generator of a span's turn; empty where several sampled that turn, of which the wire does not say which."""
    for turn in trajectory.turns:
        if turn.completion_start <= span.start < turn.end:
            return turn.generator_ids[0] if len(set(turn.generator_ids)) == 1 else ""
    return ""


def step_tokens(
    groups: Sequence[TrajectoryGroup],
    places: Iterable[Place],
    *,
    ours: NDArray[np.floating],
    entropies: NDArray[np.floating],
    version: int,
) -> StepTokens:
    """The tokens of a step at the learner's `version`. `ours` and `entropies` are over all `places` end to end; NaN in
    `ours`: a token that is not looked at.
    """
    found, at = _Processes(), 0
    parts: list[Mapping[str, NDArray[np.float64]]] = []
    said: dict[tuple[int, int], float] = defaultdict(float)
    for group, number, start, length in places:
        trajectory, stop = groups[group].trajectories[number], start + length
        of_us, of_them = ours[at : at + length], trajectory.behavior_logprobs[start:stop]
        known = np.isfinite(of_us) & (trajectory.loss_mask[start:stop] == 1)
        said[group, number] += float(np.maximum(of_us, of_them)[known].sum(dtype=np.float64))
        rows = _stamps(trajectory, found, start=start, length=length, version=version)
        rows |= {"ours": of_us, "theirs": of_them, "entropies": entropies[at : at + length]}
        rows |= {"groups": np.full(length, group), "texts": np.full(length, (group << 20) + number)}
        # What several branches share was sampled once, and is evidence once.
        kept = known & (rows["processes"] != _NOBODY) & (np.arange(start, stop) >= trajectory.own_start)
        parts.append({name: row[kept].astype(np.float64) for name, row in rows.items()})
        at += length
    whole = [text for place, logprob in said.items() if (text := _whole(groups, place, logprob, found)) is not None]
    return _joined(parts, found, whole)


def _stamps(
    trajectory: Trajectory, found: _Processes, *, start: int, length: int, version: int
) -> dict[str, NDArray[np.floating]]:
    processes, lags, old = np.full(length, float(_NOBODY)), np.zeros(length), np.zeros(length)
    for span in trajectory.version_spans:
        at = slice(max(span.start - start, 0), max(span.end - start, 0))
        if at.start < length and at.stop > 0:
            processes[at] = found.number(span, trajectory)
            lags[at] = version - PolicyVersion.parse(span.version).number
            old[at] = span.cache is not None
    return {"processes": processes, "lags": lags, "old_cache": old}


def _whole(
    groups: Sequence[TrajectoryGroup], place: tuple[int, int], logprob: float, found: _Processes
) -> WholeText | None:
    trajectory = groups[place[0]].trajectories[place[1]]
    numbers = {found.number(span, trajectory) for span in trajectory.version_spans}
    alike = bool(trajectory.forks)  # branches are alike more often than by chance
    if len(numbers) != 1 or _NOBODY in numbers or alike or not trajectory.loss_mask.any():
        return None
    first = int(trajectory.loss_mask.argmax())
    return WholeText(
        process=numbers.pop(),
        prompt=_digest(trajectory.token_ids[:first]),
        whole=_digest(trajectory.token_ids),
        logprob=logprob,
    )


def _digest(tokens: NDArray[np.int32]) -> int:
    digest: int = xxhash.xxh3_64_intdigest(np.ascontiguousarray(tokens).tobytes())
    return digest


def _joined(
    parts: Sequence[Mapping[str, NDArray[np.float64]]], found: _Processes, whole: Sequence[WholeText]
) -> StepTokens:
    def row(name: str) -> NDArray[np.float64]:
        return np.concatenate([part[name] for part in parts]) if parts else np.zeros(0)

    return StepTokens(
        instances=found.instances,
        names=tuple(found.names[instance] for instance in found.instances),
        processes=row("processes").astype(np.int64),
        lags=row("lags").astype(np.int64),
        groups=row("groups").astype(np.int64),
        texts=row("texts").astype(np.int64),
        old_cache=row("old_cache").astype(np.bool_),
        theirs=row("theirs"),
        ours=row("ours"),
        entropies=row("entropies"),
        whole=tuple(whole),
    )
