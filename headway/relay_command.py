"""The command `headway relay`: a copy of the learner's weights near the generators that pull them.

headway relay --from http://learner:7300 --folder FOLDER --host 0.0.0.0 --token-file relay.token ...
headway relay --from-relay http://relay-a:7330 --folder FOLDER ...
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from pydantic import SecretStr, ValidationError

from headway.relay import relay
from protocol.weight_tree import TREE_ROUTE
from services.config.models import HttpConfig
from services.config.options import option_faults
from services.config.sources import ConfigError
from services.http.client import HttpClient
from services.http.tls import client_tls
from services.logs import configure_logging
from services.network import is_http_address
from services.process import run_process
from services.rotating_secrets import RotatingSecret
from services.secret_files import SecretFileError

_DEFAULT_PORT = 7330
_DEFAULT_GB = 64.0


def run_relay(words: Sequence[str]) -> int:
    """Serves until SIGTERM or SIGINT. Raises ConfigError for arguments that cannot be used."""
    given = _parsed(words)
    try:
        http = HttpConfig(
            host=given.host,
            port=given.port,
            token=_secret(given.token_file),
            tls_cert_file=given.tls_cert_file,
            tls_key_file=given.tls_key_file,
            tls_ca_file=given.tls_ca_file,
            tls_client_ca_file=given.tls_client_ca_file,
        )
        source = f"{given.learner.rstrip('/')}{TREE_ROUTE}" if given.learner else given.relay
        client = HttpClient(token=_secret(given.source_token_file), tls=client_tls(http.tls))
    except SecretFileError as error:
        raise ConfigError([f"relay: {error}"]) from error
    except ValidationError as error:
        raise ConfigError([f"headway relay: {one}" for one in option_faults(error)]) from error
    configure_logging("relay", level="info", format="text")
    return run_process(
        "relay",
        lambda stop: relay(
            source=source, folder=given.folder, http=http, client=client, most_bytes=int(given.gb * 1e9), stop=stop
        ),
    )


def _secret(path: Path | None) -> SecretStr | None:
    return None if path is None else RotatingSecret(path)


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headway relay", add_help=False, allow_abbrev=False)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--from", dest="learner")
    source.add_argument("--from-relay", dest="relay")
    parser.add_argument("--source-token-file", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gb", type=float, default=_DEFAULT_GB)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=_DEFAULT_PORT)
    parser.add_argument("--token-file", type=Path)
    for name in ("cert", "key", "ca", "client-ca"):
        parser.add_argument(f"--tls-{name}-file", type=Path)
    parser.error = _refuse  # type: ignore[method-assign]
    given = parser.parse_args(list(words))
    for url in (given.learner, given.relay):
        if url is not None and not is_http_address(url):
            raise ConfigError([f"headway relay: {url!r} is no address: expected http://host:port or https://host:port"])
    if not 0 < given.gb < math.inf:
        raise ConfigError([f"headway relay: --gb {given.gb:g} leaves no room: expected a number above 0"])
    return given


def _refuse(message: str) -> NoReturn:
    raise ConfigError([f"headway relay: {message}; see headway relay --help"])
