"""Agreement of the `math` verifier with labels made by hand: by form, and apart by what each error costs.

    .venv/bin/python -m benchmarks.math_agreement
    .venv/bin/python -m benchmarks.math_agreement --pairs elsewhere.jsonl --result elsewhere.md

Judges each pair in this process, and by math-verify alone, and writes a table with every disagreement of ours. The
pairs of tests/reward_service/verifiers/math_pairs.jsonl corrected our verifier, and not math-verify: on them the
comparison says in which forms it errs. `--pairs` judges others, in the same format, such as those of a peer's tests.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from benchmarks.math_verify_alone import MathVerifyAlone
from reward_service.verifier.submission import Submission, VerifierError
from reward_service.verifiers.arguments import MathArguments
from reward_service.verifiers.mathematics.math_answer import math_answer

ROOT = Path(__file__).parent.parent
PAIRS = ROOT / "tests/reward_service/verifiers/math_pairs.jsonl"
RESULT = Path(__file__).with_name("results") / "math_agreement.md"


class Pair(BaseModel):
    """A completion and a right answer of one form, and whether the completion's answer is it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    form: str
    gold: str | tuple[str, ...]
    completion: str
    equal: bool
    arguments: dict[str, JsonValue] = Field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A pair with the verifier's reward, or the error in its place, and math-verify's own verdict, if it had one."""

    pair: Pair
    verdict: float | str
    alone: bool | None = None

    @property
    def agrees(self) -> bool:
        """True if the verdict is the label; an error never is."""
        return self.verdict == float(self.pair.equal)

    def __str__(self) -> str:
        label = "equal" if self.pair.equal else "not equal"
        end = self.pair.completion[-120:]
        return f"{self.pair.form}: {self.pair.gold!r} against {end!r}: labelled {label}, judged {self.verdict}"


def read_pairs(path: Path = PAIRS) -> tuple[Pair, ...]:
    """All pairs, in the order of the file."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return tuple(Pair.model_validate_json(line) for line in lines if line)


def judge(pair: Pair) -> Judged:
    """The verifier's verdict on a pair."""
    golds = pair.gold if isinstance(pair.gold, str) else list(pair.gold)
    arguments = MathArguments.model_validate({"answer": golds, **pair.arguments})
    try:
        return Judged(pair=pair, verdict=math_answer(Submission(completion=pair.completion), arguments).reward)
    except VerifierError as error:
        return Judged(pair=pair, verdict=f"{error.kind} error: {error}")


def judge_by_both(pairs: Iterable[Pair]) -> list[Judged]:
    """The verdicts of the verifier and of math-verify alone."""
    with MathVerifyAlone() as alone:
        return [
            replace(judge(pair), alone=alone.equal(golds=_golds(pair), completion=pair.completion)) for pair in pairs
        ]


def _golds(pair: Pair) -> list[str]:
    return [pair.gold] if isinstance(pair.gold, str) else list(pair.gold)


def table(judged: Sequence[Judged]) -> str:
    """The agreement by form, and the disagreements, as Markdown."""
    agreed = sum(one.agrees for one in judged)
    lines = [
        "# `math` against hand-made labels",
        "",
        "Made by `python -m benchmarks.math_agreement`. math-verify alone had no answer in ten seconds for "
        f"{sum(one.alone is None for one in judged)} pairs.",
        "",
        "| verifier | pairs | agree | wrong answers accepted | right answers refused |",
        "|---|---|---|---|---|",
        _summary("`math`", judged, [one.verdict == 1.0 for one in judged]),
        _summary("math-verify alone", judged, [one.alone is True for one in judged]),
        "",
        "| form | pairs | labelled equal | agree | math-verify alone |",
        "|---|---|---|---|---|",
        *_rows(judged),
        "",
        "Disagreements:" if agreed < len(judged) else "No disagreements.",
        *(f"- {one}" for one in judged if not one.agrees),
    ]
    return "\n".join(lines) + "\n"


def _summary(name: str, judged: Sequence[Judged], accepted: Sequence[bool]) -> str:
    """An error, or no answer in time, counts as a refusal."""
    wrong = sum(yes and not one.pair.equal for one, yes in zip(judged, accepted, strict=True))
    missed = sum(one.pair.equal and not yes for one, yes in zip(judged, accepted, strict=True))
    agreed = len(judged) - wrong - missed
    return f"| {name} | {len(judged)} | {agreed} ({agreed / len(judged):.1%}) | {wrong} | {missed} |"


def _rows(judged: Sequence[Judged]) -> Iterable[str]:
    ordered = sorted(judged, key=lambda one: one.pair.form)
    for form, group in groupby(ordered, key=lambda one: one.pair.form):
        members = list(group)
        equal = sum(one.pair.equal for one in members)
        yield f"| {form} | {len(members)} | {equal} | {sum(one.agrees for one in members)} | {_agreed_alone(members)} |"


def _agreed_alone(judged: Iterable[Judged]) -> int:
    return sum(one.alone == one.pair.equal for one in judged)


def main() -> None:
    """Judge all pairs, and write and print the table."""
    parser = argparse.ArgumentParser(description="Compare the math verifier with labelled pairs.")
    parser.add_argument("--pairs", type=Path, default=PAIRS, help="JSON lines of form, gold, completion, equal")
    parser.add_argument("--result", type=Path, default=RESULT, help="the Markdown file to write")
    options = parser.parse_args()
    text = table(judge_by_both(read_pairs(options.pairs)))
    options.result.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
