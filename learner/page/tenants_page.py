"""The page of a server of training loops at `/`: its tenants, their runs, who waits for whom, and the runs' curves.

    GET /                           the page; /page/static/... is what it loads
    GET /page/data/tenants          verdict, tenants, runs, generators, as they are now
    GET /page/data/tenant_curves    the curves of runs by their shown names: ?run=NAME&run=NAME

Whoever shows the learner's http.token sees all; whoever shows a tenant's key, as `X-API-Key` or at the login, sees what
is that tenant's, and no name of another. The cookie of `POST /page/login` is made of the key's hash in the keys file,
so that it ends with the key.
"""

import hmac
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import SecretStr

from learner.page.files import is_pass, let_in, page_cookie, page_file, page_itself, pass_of
from learner.page.routes import Login
from learner.tenants.run_records import RunRecord
from learner.tenants.service import TenantService
from learner.tenants.standing import TenantsStanding
from protocol.status import PeerStatus
from services.diagnosis.asked import AskedProcess
from services.diagnosis.tenants import judge_tenants
from services.diagnosis.verdict import RunVerdict
from services.http.bodies import json_body
from services.http.refusals import RequestRefused
from services.rotating_secrets import is_shown

MOST_RUNS = 200
"""Rows of the list of runs; those with the most to do come first."""
MOST_CURVES = 8
_FRESH = {"Cache-Control": "no-store"}
_PAGE = "the page of a server of training loops"
_FIRST = ("loss", "forward loss", "grad_norm", "rows")
_COLORS = {"loss": "blue", "forward loss": "orange", "grad_norm": "violet"}
_HEADINGS = {"loss": "Loss, a row", "forward loss": "Loss of forward alone, a row", "rows": "Rows of a step"}


@dataclass(frozen=True)
class ServedProcesses:
    """Generators as the learner has heard of them, and the verdict on the server, if there is one yet."""

    peers: tuple[PeerStatus, ...] = ()
    procs: Sequence[AskedProcess] = ()
    verdict: RunVerdict | None = None


class TenantsPage:
    """Adds its routes to an application, which must leave PAGE_PATHS open."""

    def __init__(
        self, service: TenantService, *, name: str, token: SecretStr, processes: Callable[[], ServedProcesses]
    ) -> None:
        self._service, self._name, self._processes = service, name, processes
        self._token = token

    def add_routes(self, app: FastAPI) -> None:
        """All of them."""
        get, check = partial(app.get, include_in_schema=False), self._viewer

        async def tenants(viewer: Annotated[str | None, Depends(check)]) -> Response:
            return JSONResponse(self.shown(viewer), headers=_FRESH)

        async def curves(
            viewer: Annotated[str | None, Depends(check)],
            run: Annotated[list[str], Query(default_factory=list, max_length=MOST_CURVES)],
        ) -> Response:
            return JSONResponse(self.curves(run, viewer), headers=_FRESH)

        get("/")(lambda: page_itself("tenants.html"))
        get("/page/static/{path:path}")(page_file)
        get("/page/data/tenants")(tenants)
        get("/page/data/tenant_curves")(curves)
        app.post("/page/login", include_in_schema=False)(self._login)

    # Who may read

    def _viewer(self, request: Request) -> str | None:
        """The tenant that reads; None for whoever has the learner's token. Raises RequestRefused."""
        shown = request.headers.get("authorization", "")
        if is_shown(shown, self._token, prefix="Bearer "):
            return None
        tenant = self._service.keys.tenant(request.headers.get("x-api-key", ""))
        if tenant is not None:
            return tenant.name
        name, _, proof = request.cookies.get(page_cookie(request), "").partition(":")
        if not name and is_pass(proof, self._token, page=_PAGE):
            return None
        known = next((each for each in self._service.keys.tenants if each.name == name), None)
        if known is not None and hmac.compare_digest(proof.encode(), pass_of(known.sha256, page=_PAGE).encode()):
            return known.name
        raise RequestRefused(401, "unauthorized", "the page wants a tenant's key, or the learner's http.token")

    def _login(self, request: Request, body: Annotated[Login, Depends(json_body(Login))]) -> Response:
        given = body.token.get_secret_value()
        if is_shown(given, self._token):
            return let_in(request, f":{pass_of(given, page=_PAGE)}")
        tenant = self._service.keys.tenant(given)
        if tenant is None:
            raise RequestRefused(401, "unauthorized", "this is neither a key of a tenant nor the learner's http.token")
        return let_in(request, f"{tenant.name}:{pass_of(tenant.sha256, page=_PAGE)}")

    # What is read

    def shown(self, viewer: str | None) -> dict[str, Any]:
        """All but the curves, for JSON."""
        processes = self._processes()
        standing = TenantsStanding(self._service, processes.peers, viewer=viewer)
        status = standing.status()
        judged = judge_tenants(status)
        told: dict[str, Any] = {
            "name": self._name,
            "viewer": viewer,
            "verdict": {"state": judged.state, "sentence": judged.sentence, "remedy": judged.remedy},
            **status.model_dump(mode="json", exclude={"runs"}),
            "runs": [each.model_dump(mode="json") for each in standing.runs(most=MOST_RUNS)],
            "with_curves": [each.name for each in self._records(viewer)],
        }
        if viewer is not None:
            return told
        if processes.verdict is not None:
            told["verdict"] = asdict(processes.verdict)
        return told | {"peers": [_peer(each, processes.procs) for each in processes.peers]}

    def curves(self, names: Sequence[str], viewer: str | None) -> dict[str, Any]:
        """The figures of the runs of these names, and each one's columns. Raises RequestRefused."""
        by_name = {each.name: each for each in self._records(viewer)}
        missing = [name for name in names if name not in by_name]
        if missing:
            raise RequestRefused(404, "unknown_run", f"there are no curves of {missing[0]}: it did nothing of late")
        runs = [by_name[name] for name in names]
        return {
            "figures": figures_of(each.curve.names for each in runs),
            "runs": [{"name": each.name, "columns": _columns(each)} for each in runs],
        }

    def _records(self, viewer: str | None) -> list[RunRecord]:
        """The records with curves, of the runs that did something last first."""
        found = reversed(self._service.records.runs.values())
        return [each for each in found if viewer in (None, each.owner) and each.steps]


def figures_of(names: Iterable[Sequence[str]]) -> list[dict[str, Any]]:
    """A figure for each number that a run has, its loss first."""
    found = dict.fromkeys(name for several in names for name in several)
    ordered = [name for name in _FIRST if name in found] + sorted(found.keys() - set(_FIRST))
    return [_figure(name) for name in ordered]


def _figure(name: str) -> dict[str, Any]:
    curve = {
        "name": name, "title": name, "color": _COLORS.get(name, "green"), "largest": False, "by_name": False,
        "alone": False,
    }  # fmt: skip
    return {
        "id": f"number-{name.encode().hex()}",  # a client's loss may call it anything, and ids hold no spaces
        "heading": _HEADINGS.get(name, name), "log": True, "zero": False, "stacked": False, "whole": name == "loss",
        "held_out": False, "drawn": True, "curves": [curve],
    }  # fmt: skip


def _columns(record: RunRecord) -> Mapping[str, Any]:
    columns = record.curve.columns()
    times = [time for time in columns["unix_s"] if time is not None]
    return {**columns, "time_s": [time - times[0] for time in times], "lags": []}


def _peer(peer: PeerStatus, procs: Sequence[AskedProcess]) -> dict[str, Any]:
    """A generator as its card shows it: by its own word, where it answers."""
    shown = {**peer.model_dump(mode="json", include={"name", "url", "last_heard_s", "state"}), "version": None}
    proc = next((each for each in procs if each.target.url.rstrip("/") == (peer.url or "").rstrip("/")), None)
    if proc is None:
        return shown
    if proc.status is None:
        return {**shown, "state": f"{proc.condition}: {proc.complaint}"}
    load = proc.status.load
    rates = {} if load is None else {"tokens_per_s": load.per_s, "idle_share": 1 - load.busy_share}
    return {**shown, **rates, "state": "answers", "last_heard_s": 0.0}
