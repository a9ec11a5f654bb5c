"""`headway view RUN ...`: serves the page of runs from their files, without a learner."""

import logging
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from pydantic import ValidationError

from learner.page.files import PAGE_PATHS
from learner.page.routes import RunPage, ShownRun
from learner.page.what_if_routes import WhatIfSettings
from learner.what_if_form import checked, form_of
from protocol.status import Readiness
from services.config.models import HttpConfig
from services.config.options import option_faults
from services.config.sources import ConfigError
from services.http.app import create_app
from services.http.metrics import Metrics
from services.http.server import Listener, serve_http
from services.logs import configure_logging
from services.network import is_loopback
from services.process import Stop, run_loops, run_process

logger = logging.getLogger(__name__)


def _named(folders: Sequence[Path]) -> list[tuple[str, Path]]:
    """Each by its folder's name, with that of the folder around it where runs are namesakes."""
    whole = [each.resolve() for each in folders]
    twice = {name for name, count in Counter(each.name for each in whole).items() if count > 1}
    return [(f"{each.parent.name}/{each.name}" if each.name in twice else each.name, each) for each in whole]


def serve_runs(folders: Sequence[Path], *, host: str, port: str, token_file: str | None) -> int:
    """Serves until a signal; returns the exit code. Raises ConfigError for an address that cannot be served at."""
    try:
        token = None if token_file is None else Path(token_file).read_text(encoding="utf-8").strip()
        if not token and not is_loopback(host):
            remedy = "give --token-file FILE, or leave --host out"
            raise ConfigError([f"view: other machines can reach host {host}, and there is no token: {remedy}"])
        http = HttpConfig.model_validate({"host": host, "port": port, "token": token or None})
        listener = Listener(host=http.host, port=http.port)
    except ValidationError as error:
        raise ConfigError([f"view: {each}" for each in option_faults(error)]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"view: --token-file {token_file}: expected a line of text, got other bytes"]) from error
    except OSError as error:
        raise ConfigError([f"view: {error}"]) from error
    configure_logging("headway", level="info", format="text")

    async def serve(stop: Stop) -> None:
        runs = [ShownRun(name, each) for name, each in _named(folders)]
        page = RunPage(runs, token=http.token, what_ifs=WhatIfSettings(form_of, checked))
        app = create_app(
            service="view",
            version=version("headway"),
            token=http.token,
            readiness=lambda: Readiness(ready=True),
            metrics=Metrics("view"),
            open_paths=PAGE_PATHS,
        )
        page.add_routes(app)
        logger.info("the page is at %s/", listener.url)
        await run_loops(http=serve_http(app, listener), page=page.run())

    with listener:
        return run_process("headway", serve)
