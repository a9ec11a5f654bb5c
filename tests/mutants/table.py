"""The table of faults, with who found each."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.mutants.catalog import Mutant
from tests.mutants.trying import MutantFinding


@dataclass(frozen=True, kw_only=True)
class MutantResult:
    """Findings on a fault; None for those it was not shown to."""

    id: str
    tests: MutantFinding | None = None
    seeds: MutantFinding | None = None


def kept_results(file: Path, *, code: str) -> dict[str, MutantResult]:
    """The results of a file that are of this very code, by id: none if it was changed since its commit. Of one that was
    tried again the newest.
    """
    if not file.exists() or "dirty" in code:
        return {}
    entries = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return {
        entry["id"]: MutantResult(id=entry["id"], tests=_finding(entry["tests"]), seeds=_finding(entry["seeds"]))
        for entry in entries
        if entry["code"] == code
    }


def survivors(mutants: Iterable[Mutant], results: Mapping[str, MutantResult]) -> list[str]:
    """The faults that were shown to the unit tests, and that none of these found."""
    tried = [result for each in mutants if (result := results.get(each.id)) is not None]
    return [each.id for each in tried if each.tests is not None and each.tests.by is None]


def former_finders(*files: Path | None) -> Mapping[str, str]:
    """The test that last found each fault, by its id, whatever the code was: to be tried before the others."""
    found: dict[str, str] = {}
    for entry in _entries(files):
        if entry["tests"] is not None and (by := entry["tests"]["by"]) is not None and " " not in by:
            found[entry["id"]] = by.partition("[")[0]  # of a case's name a part may be missing
    return found


def former_seeds(*files: Path | None) -> Mapping[str, list[int]]:
    """The seeds that found each fault, by its id, whatever the code was: to be tried before the others, the last one
    first.
    """
    found: dict[str, list[int]] = {}
    for entry in reversed(_entries(files)):
        if entry["seeds"] is not None and (by := entry["seeds"]["by"]) is not None:
            seeds, seed = found.setdefault(entry["id"], []), int(by.removeprefix("seed "))
            seeds.extend([seed] if seed not in seeds else [])
    return found


def keep(result: MutantResult, file: Path, *, code: str) -> None:
    """Appends a result."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps({**asdict(result), "code": code}) + "\n")


def _entries(files: Iterable[Path | None]) -> list[dict[str, Any]]:
    """The lines of those files that there are, oldest first."""
    there = [file for file in files if file is not None and file.exists()]
    return [json.loads(line) for file in there for line in file.read_text(encoding="utf-8").splitlines()]


def _finding(entry: Mapping[str, object] | None) -> MutantFinding | None:
    if entry is None:
        return None
    by = entry["by"]
    return MutantFinding(None if by is None else str(by), str(entry["how"]), float(str(entry["seconds"])))


def table(mutants: Sequence[Mutant], results: Mapping[str, MutantResult], *, code: str, seeds: range) -> str:
    """The results in Markdown; `code` names the commit."""
    tried = [(mutant, results[mutant.id]) for mutant in mutants if mutant.id in results]
    by_tests = [result.tests for _, result in tried if result.tests is not None]
    by_seeds = [result.seeds for mutant, result in tried if result.seeds is not None and mutant.simulated]
    areas = "\n".join(_area(area, tried) for area in sorted({mutant.area for mutant, _ in tried}))
    rows = "\n".join(_row(mutant, result) for mutant, result in tried)
    return f"""# Planted faults

`make mutants`, of {code}: each of {len(tried)} faults was planted by itself in a copy of the tree. It was shown to
the unit tests that are to find it and, if its world has what would show the fault, to seeds {seeds.start} to
{seeds.stop - 1} of [the simulator](../../docs/simulation.md). The faults stand in `tests/mutants/planted/`.

| who | shown | found | share |
|---|---|---|---|
| unit tests | {_share(by_tests)} |
| simulator | {_share(by_seeds)} |

Unit tests took {_minutes(by_tests)}, seeds {_minutes(by_seeds)}, on one core.

| area | faults | found by tests | the simulator can | found by seeds |
|---|---|---|---|---|
{areas}

| fault | what is wrong | found by the test | by seed |
|---|---|---|---|
{rows}
"""


def _share(findings: Sequence[MutantFinding]) -> str:
    found = sum(finding.by is not None for finding in findings)
    share = f"{found / len(findings):.1%}" if findings else "-"
    return f"{len(findings)} | {found} | {share}"


def _minutes(findings: Sequence[MutantFinding]) -> str:
    return f"{sum(finding.seconds for finding in findings) / 60:.0f} minutes"


def _area(area: str, tried: Sequence[tuple[Mutant, MutantResult]]) -> str:
    here = [(mutant, result) for mutant, result in tried if mutant.area == area]
    tests = sum(result.tests is not None and result.tests.by is not None for _, result in here)
    seeds = sum(result.seeds is not None and result.seeds.by is not None for _, result in here)
    return f"| {area} | {len(here)} | {tests} | {sum(mutant.simulated for mutant, _ in here)} | {seeds} |"


def _row(mutant: Mutant, result: MutantResult) -> str:
    seeds = _who(result.seeds) if mutant.simulated else "cannot"
    return f"| {mutant.id} | {mutant.what} | {_who(result.tests)} | {seeds} |"


def _who(finding: MutantFinding | None) -> str:
    if finding is None:
        return "not shown"
    if finding.by is None:
        return f"**survived**: {finding.how}"
    said = "" if finding.how == "failed" else f": {_plain(finding.how)}"
    name = f"`{finding.by.removeprefix('tests/')}`" if "/" in finding.by else finding.by
    return f"{name}{said}"


def _plain(text: str) -> str:
    """The text as a line of a table's cell."""
    line = " ".join(text.split()).replace("|", "/")
    return line if len(line) <= 120 else f"{line[:117]}..."
