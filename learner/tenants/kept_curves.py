"""The curves of training runs on the disk, so that a learner that was started again goes on with them.

    <folder>/<hash>.json   a run: its totals, its curve, and the last operation that is in them

Nobody waits for it: what changed is written about once a minute and at the end. After a SIGKILL the points of that time
may be missing; none is there twice, since operations that the journal has done again are known by their numbers.
"""

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from learner.tenants.run_curves import RunCurve
from learner.tenants.run_records import RunRecord, RunRecords

logger = logging.getLogger(__name__)
_EVERY_S = 60.0
_TOTALS = ("rows", "tokens", "operations", "failures", "steps", "seq_id")
_HASH_CHARS = 32


class KeptCurves:
    """The files of a folder, and the records that they are of. `clock` is in seconds."""

    def __init__(self, folder: Path, records: RunRecords, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._records, self._clock = folder, records, clock
        self._written_at = clock()
        self._writing: asyncio.Task[None] | None = None

    def read(self) -> None:
        """Take up what former lives left. A file that cannot be read is no reason not to start."""
        paths = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for path in paths[-self._records.most :]:
            try:
                self._take_up(json.loads(path.read_bytes()))
            except (OSError, ValueError, KeyError, TypeError) as error:
                logger.warning("the curve in %s is left out: %r", path, error)

    def _take_up(self, told: dict[str, Any]) -> None:
        curve, totals = RunCurve.of(told["curve"]), {name: int(told[name]) for name in _TOTALS}
        passes: list[Mapping[str, float]] = [dict(each) for each in told["passes"]]
        loss = None if told["loss"] is None else float(told["loss"])
        record = self._records.take_up(str(told["model_id"]), str(told["owner"]))
        record.curve, record.passes, record.loss = curve, passes, loss
        for name, total in totals.items():
            setattr(record, name, total)

    async def write(self, *, now: bool = False) -> None:
        """Write what has changed, if that is due, and remove files of runs that are kept no more. Raises OSError, and
        then has all of it to write at the next call.
        """
        while self._writing is not None and not self._writing.done():
            await asyncio.wait([self._writing])  # one whose caller was cancelled goes on
        if not now and self._clock() - self._written_at < _EVERY_S:
            return
        self._writing = asyncio.create_task(self._write())
        await asyncio.shield(self._writing)

    async def _write(self) -> None:
        before, self._written_at = self._written_at, self._clock()
        runs = self._records.runs
        changed, self._records.changed = self._records.changed & runs.keys(), set()
        told = {_path(self._folder, each): _told(each, runs[each]) for each in changed}
        kept = {_path(self._folder, each) for each in runs}
        try:
            await asyncio.to_thread(self._put, told, kept)
        except OSError:
            self._records.changed |= changed
            self._written_at = before
            raise

    def _put(self, told: dict[Path, dict[str, Any]], kept: set[Path]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for path, content in told.items():
            aside = path.with_suffix(".part")
            aside.write_text(json.dumps(content), encoding="utf-8")
            aside.replace(path)
        for path in self._folder.glob("*.json"):
            if path not in kept:
                path.unlink(missing_ok=True)


def _path(folder: Path, model_id: str) -> Path:
    return folder / f"{hashlib.sha256(model_id.encode()).hexdigest()[:_HASH_CHARS]}.json"


def _told(model_id: str, record: RunRecord) -> dict[str, Any]:
    return {
        "model_id": model_id,
        "owner": record.owner,
        "loss": record.loss,
        "passes": [dict(each) for each in record.passes],
        "curve": record.curve.state(),
        **{name: getattr(record, name) for name in _TOTALS},
    }
