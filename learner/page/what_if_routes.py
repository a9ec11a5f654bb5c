"""Routes of the page's what-ifs.

    GET  /page/data/what_if_form    the settings that can be changed, and why none can be trained now
    GET  /page/data/what_ifs        those that are there, with how far each is
    GET  /page/data/what_if         both curves of one, and the groups whose pull changed most
    POST /page/what_if              trains one, in a process of its own
    POST /page/what_if/stop         ends it

A body must say that it is JSON, also where there is a token: a page of another origin then has to ask first, and is
refused.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from learner.page.what_if_results import listed, result_of
from learner.page.what_if_runs import WhatIfBusy, WhatIfNotOwn, WhatIfRunner
from services.http.bodies import json_body
from services.http.refusals import RequestRefused
from services.process import WrongSettings

_LOOK_S = 1.0


@dataclass(frozen=True)
class WhatIfSettings:
    """Knowledge of the settings of runs, by their folders, which the page itself does not have.

    `form` gives what a form shows. `check` looks at changes KEY=VALUE, and returns in words what they change; it raises
    WrongSettings or ValidationError with what a command line would say.
    """

    form: Callable[[Path], dict[str, Any]]
    check: Callable[[Path, Sequence[str]], Sequence[str]]


class AskedWhatIf(BaseModel):
    """The body of `POST /page/what_if`: the number of the run, changes KEY=VALUE, and where to begin.

    With `groups` the run's own settings are trained, too, and its groups are compared.
    """

    model_config = ConfigDict(extra="forbid")
    run: int = 0
    changes: list[Annotated[str, StringConstraints(max_length=2000)]] = Field(min_length=1, max_length=100)
    groups: bool = True
    version: int | None = Field(None, ge=0, le=1 << 53)


class StoppedWhatIf(BaseModel):
    """The body of `POST /page/what_if/stop`: the number of the run, and which one: it may be another's turn by now."""

    model_config = ConfigDict(extra="forbid")
    run: int = 0
    name: str = Field(max_length=100)


class WhatIfRoutes:
    """Trains what-ifs of the runs that a page shows, in their order; `watch` is its loop, `end` ends what it began."""

    def __init__(self, folders: Sequence[Path], settings: WhatIfSettings) -> None:
        self._folders = folders
        self._settings = settings
        self._runners = [WhatIfRunner(each) for each in folders]
        self._starting = asyncio.Lock()

    def add_routes(self, app: FastAPI, *, check: Callable[[Request], None]) -> None:
        """`check` refuses whoever may not read the page."""
        known = [Depends(check)]
        app.get("/page/data/what_if_form", include_in_schema=False, dependencies=known)(self._form)
        app.get("/page/data/what_ifs", include_in_schema=False, dependencies=known)(self._list)
        app.get("/page/data/what_if", include_in_schema=False, dependencies=known)(self._result)
        asking = [*known, Depends(_check_type)]
        app.post("/page/what_if", include_in_schema=False, dependencies=asking, status_code=202)(self._start)
        app.post("/page/what_if/stop", include_in_schema=False, dependencies=asking, status_code=202)(self._stop)

    async def watch(self) -> None:
        """Until cancelled. Takes notice of processes that have ended."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for each in self._runners:
                each.reap()

    async def end(self) -> None:
        """Ends those that are being trained: within seconds."""
        await asyncio.gather(*(each.end() for each in self._runners))

    def _of(self, run: int) -> WhatIfRunner:
        if not 0 <= run < len(self._runners):
            raise RequestRefused(404, "unknown_run", f"there is no run {run}: 0 to {len(self._runners) - 1} are shown")
        return self._runners[run]

    async def _form(self, run: int = 0) -> dict[str, Any]:
        self._of(run)
        return await asyncio.to_thread(self._settings.form, self._folders[run])

    async def _list(self, run: int = 0, name: str = "") -> list[dict[str, Any]]:
        return await asyncio.to_thread(listed, self._of(run), also=name)

    async def _result(self, name: str, run: int = 0) -> dict[str, Any]:
        runner = self._of(run)
        if name not in runner.names():
            raise RequestRefused(404, "unknown_what_if", f"{name!r} is no what-if of this run, or no longer")
        return await asyncio.to_thread(result_of, self._folders[run], runner.folder_of(name))

    async def _start(self, body: Annotated[AskedWhatIf, Depends(json_body(AskedWhatIf))]) -> dict[str, str]:
        runner, folder = self._of(body.run), self._folders[body.run]
        async with self._starting:
            try:
                told = await asyncio.to_thread(self._settings.check, folder, body.changes)
                name = await runner.start(body.changes, told=told, groups=body.groups, version=body.version)
            except (WrongSettings, ValidationError) as error:
                raise RequestRefused(422, "wrong_settings", str(error), field="changes") from error
            except WhatIfBusy as error:
                raise RequestRefused(409, "busy", str(error)) from error
            except OSError as error:
                raise RequestRefused(409, "not_writable", f"{folder} cannot take the result: {error}") from error
        return {"name": name}

    async def _stop(self, body: Annotated[StoppedWhatIf, Depends(json_body(StoppedWhatIf))]) -> dict[str, str | None]:
        runner = self._of(body.run)
        try:
            runner.stop(body.name)
        except WhatIfNotOwn as error:
            raise RequestRefused(409, "not_own", str(error), field="name") from error
        return {"running": runner.running()}


def _check_type(request: Request) -> None:
    got = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if got != "application/json":
        raise RequestRefused(415, "content_type", f"Content-Type {got[:100]!r}; expected 'application/json'")
