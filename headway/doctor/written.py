"""The report of the doctor: text for people, or JSON for scripts."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from headway.doctor.before import Finding, Level
from protocol.status import PeerStatus, Status
from services.diagnosis.asked import AskedProcess
from services.diagnosis.culprits import Diagnosis
from services.diagnosis.verdict import verdict_on

_HEADINGS = ("process", "state", "waits for", "since", "heard", "version", "queues")
_MAX_CELL = 64


def table(procs: Sequence[AskedProcess]) -> str:
    """A line for each process, one more for each further wait of it."""
    rows = [row for proc in procs for row in _rows(proc, procs)]
    return _aligned([_HEADINGS, *rows])


def verdict(diagnosis: Diagnosis) -> str:
    """Remarks, and who is to blame, why, and what to do; nothing for a run in which nobody is."""
    lines = [f"note: {remark}" for remark in diagnosis.remarks]
    for culprit in diagnosis.culprits:
        lines += [f"culprit: {culprit.who}", f"    {culprit.what}"]
        lines += [f"    evidence: {reason}" for reason in culprit.because]
        lines.append(f"    what to do: {culprit.remedy}")
    return "".join(f"{line}\n" for line in lines)


def findings_text(findings: Iterable[Finding]) -> str:
    """A line for each finding, and one for its remedy."""
    rows = [(finding.level.value, finding.what, finding.found) for finding in findings]
    remedies = [finding.remedy for finding in findings]
    lines = _aligned(rows, longest_cell=None).splitlines()
    paired = zip(lines, remedies, strict=True)
    return "".join(f"{line}\n" + (f"         what to do: {remedy}\n" if remedy else "") for line, remedy in paired)


def as_json(*, procs: Sequence[AskedProcess], diagnosis: Diagnosis) -> str:
    """A JSON object: `mode`, `verdict`, `healthy` (nobody is to blame), `culprits`, `remarks` and `processes`."""
    body = {
        "mode": "running",
        "verdict": asdict(verdict_on(procs, diagnosis)),
        "healthy": not diagnosis.culprits,
        "culprits": [asdict(culprit) for culprit in diagnosis.culprits],
        "remarks": diagnosis.remarks,
        "processes": [
            {
                "name": proc.name,
                "kind": proc.kind,
                "url": proc.target.url,
                "condition": proc.condition.value,
                "complaint": proc.complaint,
                "pid": proc.status.pid if proc.status else proc.process.pid if proc.process else None,
                "status": None if proc.status is None else proc.status.model_dump(mode="json"),
            }
            for proc in procs
        ],
    }
    return json.dumps(body, indent=2) + "\n"


def findings_json(findings: Iterable[Finding]) -> str:
    """A JSON object: `mode`, `healthy` and `findings`."""
    listed = [asdict(finding) for finding in findings]
    healthy = all(finding["level"] is not Level.ERROR for finding in listed)
    return json.dumps({"mode": "before start", "healthy": healthy, "findings": listed}, indent=2) + "\n"


def _rows(proc: AskedProcess, procs: Sequence[AskedProcess]) -> list[tuple[str, ...]]:
    status = proc.status
    if status is None:
        return [(proc.name, proc.condition.value, "?", "", _heard(proc, procs), "", "")]
    waits = [(wait.whom, f"{wait.since_s:.0f} s") for wait in status.waits] or [("nobody", "")]
    version = "" if status.policy_version is None else status.policy_version
    queues = ", ".join(f"{queue.name} {_depth(queue.depth, queue.limit)}" for queue in status.queues)
    first = (proc.name, _state(status), *waits[0], _heard(proc, procs), version, queues)
    return [first, *(("", "", *wait, "", "", "") for wait in waits[1:])]


def _state(status: Status) -> str:
    if status.problems:
        return "broken"
    if status.stopping:
        return "stopping"
    if any(wait.whom == "its own start" for wait in status.waits):
        return "starting"
    return "waiting" if any(wait.blocks_readiness for wait in status.waits) else "ready"


def _heard(proc: AskedProcess, procs: Sequence[AskedProcess]) -> str:
    """Seconds since another process last heard of this one."""
    others = (other.status for other in procs if other is not proc and other.status is not None)
    ages = [
        peer.last_heard_s
        for status in others
        for peer in status.peers
        if peer.last_heard_s is not None and _is_about(peer, proc)
    ]
    return f"{min(ages):.1f} s" if ages else ""


def _is_about(peer: PeerStatus, proc: AskedProcess) -> bool:
    """The learner is one; others are told apart by id, or by address if they did not answer."""
    if peer.kind != proc.kind:
        return False
    names = {proc.target.url, *(() if proc.status is None else (proc.status.id,))}
    return proc.kind == "learner" or peer.name in names or (peer.url or "").rstrip("/") in names


def _depth(depth: int, limit: int | None) -> str:
    return str(depth) if limit is None else f"{depth}/{limit}"


def _aligned(rows: Sequence[Sequence[str]], *, longest_cell: int | None = _MAX_CELL) -> str:
    """Columns side by side; the last one is not cut."""
    cut = [[_shortened(cell, longest_cell) for cell in row[:-1]] + [row[-1]] for row in rows]
    widths = [max(len(row[column]) for row in cut) for column in range(len(cut[0]))] if cut else []
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cut)
    return "".join(f"{line}\n" for line in lines)


def _shortened(text: str, longest: int | None) -> str:
    return text if longest is None or len(text) <= longest else text[: longest - 3] + "..."
