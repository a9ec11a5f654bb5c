"""The page of a run at `/`, its data, and the stream that keeps it up to date.

    GET /                      the page; /page/static/... is what it loads
    GET /page/data/runs        which runs there are: one in a learner, several under `headway view`
    GET /page/data/figures     which figures there are, and the curves of each
    GET /page/data/marks       which kinds of events are marked on the curves
    GET /page/data/steps       curves, events and marks of all steps so far, and up to which place of the file they go
    GET /page/data/events      what comes after such a place, as server-sent events whose id is the next one
    GET /page/data/machines    of each process CPU, memory, GPUs and the end of its log
    GET /page/data/made_with   the configuration, and what in it differs from the defaults
    GET /page/data/rows        a page of trajectories that fit a filter, or of their groups with rows=groups;
                               .../overview what there is; .../group one group; .../life where its time went;
                               .../same_task a task's completions at several steps
    GET /page/data/what_ifs    the run trained again by other settings; the form for it is in what_if_routes.py

Where the process has a token, all data want it: as `Authorization: Bearer`, or as the cookie that `POST /page/login`
gives for it, which no other route knows.
"""

import asyncio
import json
import logging
import sqlite3
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_args

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, SecretStr

from learner.page.curves import RunCurves, figures
from learner.page.files import HEADERS, is_pass, let_in, page_cookie, page_file, page_itself, pass_of
from learner.page.grouped import groups_page, ordered_groups
from learner.page.life import kept_life
from learner.page.reading import (
    MAX_ROWS,
    Filter,
    Key,
    Order,
    decoder_of,
    group,
    kept_of_step,
    ordered,
    overview,
    page,
    whole_text,
)
from learner.page.same_task import Member, same_task
from learner.page.what_if_routes import WhatIfRoutes, WhatIfSettings
from learner.reports.growing import FileRestarted, Mark
from learner.reports.marks import MARK_KINDS
from protocol.model import PolicyVersion
from protocol.status import FailureStatus, Report, WaitStatus
from services.config import made_with
from services.diagnosis.asked import AskedProcess
from services.diagnosis.verdict import RunVerdict
from services.http.bodies import json_body
from services.http.refusals import RequestRefused
from services.rotating_secrets import is_shown
from services.run_lock import life_in

logger = logging.getLogger(__name__)
T = TypeVar("T")

_NEWS_EVERY_S = 1.0
_STATUS_EVERY_S = 2.0
_ORDERS = get_args(Order)
_MAX_SKIPPED = 10_000
_NUMBERS = {"step": int, "max_step": int, "task": int, "min_length": int, "max_length": int, "min_lag": int,
            "min_step": int, "min_ratio": float, "min_reward": float, "max_reward": float}  # fmt: skip

Processes = Callable[[], Mapping[str, Any]]
"""Status of the learner and the other processes, for JSON."""
Machines = Callable[[], list[dict[str, Any]]]
"""Of each process its machine, what it takes of that, and the last lines of its log, for JSON."""
_FRESH = {"Cache-Control": "no-store"}
_PAGE = "the page of a run"


@dataclass(frozen=True)
class ShownRun:
    """A run's folder, and where it lives, who tells of its processes."""

    name: str
    folder: Path
    processes: Processes | None = None
    machines: Machines = list


def shown_processes(
    report: Report,
    *,
    waits: Sequence[WaitStatus],
    failures: Sequence[FailureStatus],
    rates: Mapping[str, Mapping[str, float]],
    rewards: Sequence[Mapping[str, Any]],
    verdict: RunVerdict | None = None,
    standing_s: float | None = None,
) -> dict[str, Any]:
    """The four kinds of processes as the page shows them, by what the learner knows.

    `rates` are by generator, `rewards` what is known of each reward service, `standing_s` for how long no step ends.
    """
    said = report.model_dump(mode="json", include={"queues", "problems"})
    number = None if report.policy_version is None else PolicyVersion.parse(report.policy_version).number
    learner = {
        **said,
        "notes": report.notes,
        "version": number,
        "total": None if report.progress is None else report.progress.total,
        "waits": [each.model_dump(mode="json") for each in waits],
        "failures": [each.model_dump(mode="json") for each in failures],
    }
    peers: dict[str, list[dict[str, Any]]] = {"generator": [], "env-service": []}
    for peer in report.peers:
        shown = peer.model_dump(mode="json", include={"name", "url", "last_heard_s", "state"})
        peers.setdefault(peer.kind, []).append({**shown, "version": peer.serving_version, **rates.get(peer.name, {})})
    return {
        "verdict": None if verdict is None else {**asdict(verdict), "text": verdict.text},
        "learner": {**learner, "standing_s": standing_s},
        "generators": peers["generator"],
        "env_services": peers["env-service"],
        "reward_services": list(rewards),
    }


def shown_machines(procs: Iterable[AskedProcess]) -> list[dict[str, Any]]:
    """Each process with its machine, as the page shows it; of one that does not answer, why."""
    found = []
    for proc in procs:
        status = proc.status
        shown = {"name": proc.name, "kind": proc.kind, "condition": proc.condition.value}
        if status is None:
            found.append({**shown, "complaint": proc.complaint})
            continue
        told = status.model_dump(mode="json", include={"id", "host", "pid", "uptime_s", "usage", "log"})
        found.append({**shown, **told})
    return found


class Login(BaseModel):
    """The body of `POST /page/login`."""

    model_config = ConfigDict(extra="forbid")
    token: SecretStr


class RunPage:
    """Adds its routes to an application; `run` is its loop, at whose end all streams end."""

    def __init__(
        self, runs: Sequence[ShownRun], *, token: SecretStr | None, what_ifs: WhatIfSettings | None = None
    ) -> None:
        """Without `what_ifs` the page has no form for them."""
        self._runs = runs
        self._curves = [RunCurves(each.folder) for each in runs]
        self._what_ifs = None if what_ifs is None else WhatIfRoutes([each.folder for each in runs], what_ifs)
        self._token = token
        self._over = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled. A stream that nobody ended would hold up the end of the process."""
        try:
            await (asyncio.Event().wait() if self._what_ifs is None else self._what_ifs.watch())
        finally:
            self._over.set()
            if self._what_ifs is not None:
                await self._what_ifs.end()

    def add_routes(self, app: FastAPI) -> None:
        """The application must leave PAGE_PATHS open."""
        known = [Depends(self._check)]
        get = partial(app.get, include_in_schema=False)
        get("/")(lambda: page_itself("index.html"))
        get("/page/static/{path:path}")(page_file)
        app.post("/page/login", include_in_schema=False)(self._login)
        get("/page/data/runs", dependencies=known)(self._list_runs)
        get("/page/data/figures", dependencies=known)(figures)
        get("/page/data/marks", dependencies=known)(self._mark_kinds)
        get("/page/data/steps", dependencies=known)(self._steps)
        get("/page/data/events", dependencies=known)(self._events)
        get("/page/data/made_with", dependencies=known)(self._made_with)
        get("/page/data/machines", dependencies=known)(self._machines)
        get("/page/data/overview", dependencies=known)(self._overview)
        get("/page/data/rows", dependencies=known)(self._rows)
        get("/page/data/group", dependencies=known)(self._group)
        get("/page/data/life", dependencies=known)(self._life)
        get("/page/data/same_task", dependencies=known)(self._same_task)
        get("/page/data/text", dependencies=known)(self._text)
        if self._what_ifs is not None:
            self._what_ifs.add_routes(app, check=self._check)

    # Who may read

    def _check(self, request: Request) -> None:
        if not self._may_read(request):
            raise RequestRefused(401, "unauthorized", "the page wants the learner's http.token: log in at /")

    def _may_read(self, request: Request) -> bool:
        if self._token is None:
            return True
        shown = request.headers.get("authorization", "")
        cookie = request.cookies.get(page_cookie(request), "")
        return is_shown(shown, self._token, prefix="Bearer ") or is_pass(cookie, self._token, page=_PAGE)

    def _login(self, request: Request, body: Annotated[Login, Depends(json_body(Login))]) -> Response:
        if self._token is None:
            return Response(status_code=204)
        given = body.token.get_secret_value()
        if not is_shown(given, self._token):
            raise RequestRefused(401, "unauthorized", "this is not the learner's http.token")
        return let_in(request, pass_of(given, page=_PAGE))

    # Its data

    def _of(self, run: int) -> int:
        if not 0 <= run < len(self._runs):
            raise RequestRefused(404, "unknown_run", f"there is no run {run}: 0 to {len(self._runs) - 1} are shown")
        return run

    def _list_runs(self) -> list[dict[str, Any]]:
        return [{"name": each.name, "live": each.processes is not None} for each in self._runs]

    def _mark_kinds(self) -> list[dict[str, Any]]:
        return [asdict(each) for each in MARK_KINDS]

    async def _steps(self, request: Request, run: int = 0) -> Response:
        packs = "gzip" in request.headers.get("accept-encoding", "")
        data = await asyncio.to_thread(self._curves[self._of(run)].whole, packed=packs)
        headers = {**_FRESH, **({"Content-Encoding": "gzip"} if packs else {})}
        return Response(data, media_type="application/json", headers=headers)

    async def _events(self, request: Request, at: str = "", run: int = 0) -> Response:
        self._of(run)
        try:
            mark = Mark.parse(request.headers.get("last-event-id") or at or str(Mark()))
        except ValueError as error:
            raise RequestRefused(422, "invalid_field", "at: expected what `steps` gave as `at`", field="at") from error
        headers = {**_FRESH, "X-Accel-Buffering": "no"}
        return StreamingResponse(
            self._stream(run, mark, partial(self._may_read, request)), media_type="text/event-stream", headers=headers
        )

    async def _stream(self, run: int, mark: Mark, may_read: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        """Ends with the page, and when the token that it was asked for with is accepted no more."""
        yield b"retry: 2000\n\n"
        told_in_s = 0.0
        while not self._over.is_set() and may_read():
            try:
                data, mark = await asyncio.to_thread(self._curves[run].news, mark)
            except FileRestarted:
                yield b"event: reset\ndata: {}\n\n"
                return
            if data is not None:
                yield f"id: {mark}\ndata: ".encode() + data + b"\n\n"
                continue
            if told_in_s <= 0:
                told_in_s = _STATUS_EVERY_S
                yield await self._status(run)  # also finds out that the reader has gone
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), _NEWS_EVERY_S)
            told_in_s -= _NEWS_EVERY_S

    async def _status(self, run: int) -> bytes:
        shown = self._runs[run]
        told: dict[str, Any] = {"live": shown.processes is not None}
        if shown.processes is not None:
            told |= shown.processes()
        else:
            told["life"] = await asyncio.to_thread(life_in, shown.folder)
        return b"event: status\ndata: " + json.dumps(told).encode() + b"\n\n"

    def _made_with(self, run: int = 0) -> dict[str, Any]:
        return made_with.read(self._runs[self._of(run)].folder)

    def _machines(self, run: int = 0) -> list[dict[str, Any]]:
        return self._runs[self._of(run)].machines()

    async def _overview(self, run: int = 0) -> dict[str, Any]:
        return await asyncio.to_thread(overview, self._runs[self._of(run)].folder)

    async def _rows(self, request: Request, run: int = 0) -> dict[str, Any]:
        asked = dict(request.query_params)
        older = asked.get("direction", "older") == "older"
        try:
            start = Key.parse(asked["start"]) if asked.get("start") else None
            limit = max(1, min(MAX_ROWS, int(asked.get("limit", "50"))))
            wanted, order, skip = _filter_of(asked), asked.get("order"), int(asked.get("skip", "0"))
            if order not in (None, "", *_ORDERS) or not 0 <= skip <= _MAX_SKIPPED:
                raise ValueError(f"order {order!r}, skip {skip}")
            if asked.get("rows", "") not in ("", "groups"):
                raise ValueError(f"rows {asked['rows']!r}: expected groups, or nothing for trajectories")
        except ValueError as error:
            raise RequestRefused(422, "invalid_field", f"a filter that cannot be read: {error}") from error
        folder = self._runs[self._of(run)].folder
        newest, by_number = (groups_page, ordered_groups) if asked.get("rows") else (page, ordered)
        look = partial(newest, folder, wanted, limit=limit, start=start, direction="older" if older else "newer")
        if order:
            look = partial(by_number, folder, wanted, order=cast(Order, order), limit=limit, skip=skip)
        try:
            found = await asyncio.to_thread(look)
            kept = None if wanted.step is None else await asyncio.to_thread(kept_of_step, folder, wanted.step)
        except OverflowError as error:  # numbers beyond what SQLite has are none of its rows
            raise RequestRefused(422, "invalid_field", f"a filter with too large a number: {error}") from error
        return {"rows": found.rows, "unreadable": found.unreadable, "kept": kept}

    async def _group(self, key: str, run: int = 0, only: int | None = None, begin: int = 0) -> dict[str, Any]:
        folder = self._runs[self._of(run)].folder
        return await _kept(key, lambda wanted: group(folder, wanted, decode=decoder_of(folder), only=only, begin=begin))

    async def _life(self, key: str, run: int = 0) -> dict[str, Any]:
        folder, moments = self._runs[self._of(run)].folder, self._curves[run].moments
        return await _kept(key, lambda wanted: kept_life(folder, wanted, moments))

    async def _same_task(
        self, environment: str, task: int, run: int = 0, steps: str = "", member: Member = "best"
    ) -> dict[str, Any]:
        folder = self._runs[self._of(run)].folder
        try:
            wanted = [int(step) for step in steps.split(",") if step]
            return await asyncio.to_thread(same_task, folder, environment, task, steps=wanted, member=member)
        except (ValueError, OverflowError) as error:  # numbers beyond what SQLite has are none of its rows
            raise RequestRefused(422, "invalid_field", f"steps or task: {error}", field="steps") from error

    async def _text(self, key: str, run: int = 0, place: int | None = None) -> Response:
        """A file to keep, never a page of ours: a completion may hold anything."""
        folder = self._runs[self._of(run)].folder
        text = await _kept(key, lambda wanted: whole_text(folder, wanted, place=place))
        name = f"{Key.parse(key)}-{'prompt' if place is None else place}.txt"
        headers = {**HEADERS, "Content-Disposition": f'attachment; filename="{name}"'}
        return Response(text.encode(errors="replace"), media_type="text/plain; charset=utf-8", headers=headers)


async def _kept(key: str, look: Callable[[Key], T | None]) -> T:
    """The group that `look` finds in a thread. Raises RequestRefused if there is none of that key."""
    try:
        wanted = Key.parse(key)
        found = await asyncio.to_thread(look, wanted)
    except (ValueError, OverflowError) as error:  # numbers beyond what SQLite has are none of its rows
        raise RequestRefused(422, "invalid_field", f"key: {error}", field="key") from error
    except sqlite3.DatabaseError as error:
        raise RequestRefused(409, "damaged", f"this group cannot be read: {error}") from error
    if found is None:
        raise RequestRefused(404, "unknown_group", f"group {key} is not kept, or no longer")
    return found


def _filter_of(asked: Mapping[str, str]) -> Filter:
    """Raises ValueError for a number that is none."""
    names = [each.name for each in fields(Filter)]
    return Filter(**{name: _NUMBERS.get(name, str)(asked[name]) for name in names if asked.get(name)})
