"""The files that the pages are made of, and the cookie by which a browser shows that it may read one."""

import base64
import hashlib
import hmac
import re
from pathlib import Path

from fastapi import Request, Response
from pydantic import SecretStr

from services.http.app import OPEN_PATHS
from services.http.refusals import RequestRefused
from services.rotating_secrets import accepted

PAGE_PATHS = OPEN_PATHS | {"/", "/page/"}
"""Paths that an application with a page leaves open: its routes ask for the token themselves."""
PAGE_COOKIE = "headway_page"
HEADERS = {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}

_STATIC = Path(__file__).with_name("static")
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_MONTH_S = 30 * 24 * 3600
_STYLE = re.compile(r"<style>(.*?)</style>", re.DOTALL)


def page_itself(name: str) -> Response:
    """The HTML file of this name, under a policy that lets only files of this program run."""
    text = (_STATIC / name).read_text(encoding="utf-8")
    return Response(text, media_type="text/html", headers={**HEADERS, "Content-Security-Policy": _policy(text)})


def page_file(path: str) -> Response:
    """A file that a page loads. Raises RequestRefused."""
    found = _found(path)
    if found is None:
        raise RequestRefused(404, "unknown_route", f"the page has no file {path!r}")
    return Response(found.read_bytes(), media_type=_TYPES[found.suffix], headers=HEADERS)


def _found(path: str) -> Path | None:
    try:
        found = (_STATIC / path).resolve()
        is_ours = found.is_relative_to(_STATIC) and found.is_file() and found.suffix in _TYPES
    except (OSError, ValueError):  # a name that no file can have: too long, or with a zero in it
        return None
    return found if is_ours else None


def page_cookie(request: Request) -> str:
    """The cookie of the page at this address: a browser sends those of a host to all of its ports, and several learners
    are at 127.0.0.1 by tunnels.
    """
    _, _, port = request.headers.get("host", "").rpartition(":")
    return f"{PAGE_COOKIE}_{port}" if port.isascii() and port.isdecimal() else PAGE_COOKIE


def let_in(request: Request, shown: str) -> Response:
    """The answer to a login: a cookie for the page's own routes alone, which no script can read."""
    answer = Response(status_code=204)
    answer.set_cookie(
        page_cookie(request), shown, max_age=_MONTH_S, path="/page", httponly=True, samesite="strict",
        secure=request.url.scheme == "https",
    )  # fmt: skip
    return answer


def pass_of(secret: str, *, page: str) -> str:
    """The content of a page's cookie: made of a secret, so that it outlives this process, and is not the secret."""
    return hmac.new(secret.encode(), page.encode(), hashlib.sha256).hexdigest()


def is_pass(shown: str, token: SecretStr, *, page: str) -> bool:
    """True for a cookie that was made of an accepted token."""
    passes = [pass_of(each, page=page).encode() for each in accepted(token)]
    return sum(hmac.compare_digest(shown.encode(), each) for each in passes) > 0


def _policy(text: str) -> str:
    """Under it only files of this program run; the styles in the page itself are allowed by their hash."""
    styles = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in _STYLE.findall(text)]
    allowed = " ".join(["'self'", *(f"'sha256-{digest}'" for digest in styles)])
    return (
        f"default-src 'none'; script-src 'self'; style-src {allowed}; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
