"""`headway serve`: one generator and a learner that serves the Tinker API, for a model in a folder; and what clients
need to know of them.
"""

import logging
import os
import secrets
import socket
import ssl
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from headway.doctor.asking import targets_of
from headway.doctor.before import missing_of
from headway.own_options import own_options, split_options
from headway.run_configs import read_command_lines
from headway.served_folder import note_targets
from headway.starting import prepared, process_command, restart_policy
from headway.supervisor import StopLimits, Supervisor
from services.config.agreements import disagreements
from services.config.devices import visible
from services.config.models import HttpConfig, ProcessConfig
from services.config.options import environment_name_of, nearest
from services.config.sources import ConfigError
from services.model_folder import positions
from services.network import LOOPBACK, is_wildcard

if TYPE_CHECKING:
    from learner.config import LearnerConfig

logger = logging.getLogger(__name__)

SERVE_OPTIONS: Mapping[str, bool] = dict.fromkeys(("--port", "--host", "--name", "--context", "--restarts"), True)
"""The command's own options, each with a value."""
SERVED = ("learner", "generator")
_PORT, _CONTEXT = "7300", 4096
_CA = "--http.tls-ca-file"
_SHARED = ("http.tls_cert_file", "http.tls_ca_file", "tinker.all_weights")
"""Settings of a process on which those of the other one depend."""
_TOKEN_BYTES = 32
_POLL_S, _ANSWER_S = 0.3, 2.0


@dataclass(frozen=True)
class ServePlan:
    """The command line of each process, and the variables that hold the tokens that they show each other."""

    arguments: Mapping[str, tuple[str, ...]]
    environment: Mapping[str, str]


def serve(words: Sequence[str]) -> int:
    """Serves a model until a signal comes; returns the exit code. Raises ConfigError, before it starts anything."""
    # Deferred: what it loads is not wanted for --help.
    from learner.config import LearnerConfig

    if not words or words[0].startswith("-"):
        raise ConfigError(["headway serve needs the folder of a model: headway serve MODEL"])
    own, overrides = serve_options(words[1:])
    plan = serve_plan(
        words[0], own, overrides, free_port=free_port(), on_cpu=not visible(os.environ), environ=os.environ
    )
    configs, problems = read_command_lines(plan.arguments, environ={**os.environ, **plan.environment})
    if problems := [*problems, *disagreements(configs)]:
        raise ConfigError(problems)
    restarts = restart_policy(own)
    given = prepared(configs)
    commands = [
        process_command(name, plan.arguments[name], environment={**plan.environment, **given.get(name, {})})
        for name in SERVED
    ]
    learner = configs["learner"]
    assert isinstance(learner, LearnerConfig)
    with ServingNotice(learner, [configs["generator"]]):
        return Supervisor(commands, limits=StopLimits(restarts=restarts)).run()


def serve_options(words: Sequence[str]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The command's own options, and those of each process. Raises ConfigError."""
    own, others = own_options(words, SERVE_OPTIONS)
    for word in others:
        if word.startswith("--") and "." not in word and (guess := nearest(word, SERVE_OPTIONS)):
            raise ConfigError([f"command line: unknown option {word}; did you mean {guess}?"])
    return own, split_options(others)


def serve_plan(
    model: str,
    own: Mapping[str, Sequence[str]],
    overrides: Mapping[str, Sequence[str]],
    *,
    free_port: int,
    on_cpu: bool,
    environ: Mapping[str, str],
) -> ServePlan:
    """The commands for a model; the generator listens on `free_port`, `environ` has settings, too. Raises ConfigError.

    On CPUs it samples in float32, as the learner trains: vLLM's own choice there would be half of it.
    """
    folder = _model_folder(model)
    host, port = own.get("--host", [LOOPBACK])[-1], _number(own, "--port", _PORT)
    context = _number(own, "--context", str(min(positions(folder) or _CONTEXT, _CONTEXT)))
    heard_at = LOOPBACK if is_wildcard(host) else host
    given = {name: overrides.get(name, ()) for name in SERVED}
    known = {name: (*_of_environment(name, environ), *given[name]) for name in SERVED}
    source = f"{_scheme(known['learner'])}://{_in_url(heard_at)}:{port}"
    sampled_at = f"{_scheme(known['generator'])}://{LOOPBACK}:{free_port}"
    common = ("--model", str(folder), "--run.name", "serve")
    base = ("--tinker.base-model", own["--name"][-1]) if "--name" in own else ()
    learner = (
        *common, "--http.host", host, "--http.port", port, "--tinker.enabled", "true", "--tinker.context-tokens",
        context, "--tinker.generators", sampled_at, *base, *_trusting(known["generator"], known["learner"]),
    )  # fmt: skip
    generator = (
        *common, "--http.port", str(free_port), "--join.learner", "none", "--engine.max-model-len", context,
        *_taken(known["learner"]), "--adapters.source", source, *_trusting(known["learner"], known["generator"]),
        *(("--engine.dtype", "float32") if on_cpu else ()),
    )  # fmt: skip
    strange = [name for name, words in overrides.items() if name not in SERVED and any(map(_is_own_flag, words))]
    if strange:
        raise ConfigError([f"command line: headway serve starts {' and '.join(SERVED)}, and no {strange[0]}"])
    mine, theirs = (secrets.token_urlsafe(_TOKEN_BYTES) for _ in SERVED)
    tokens = {
        ("learner", "http.token"): mine,
        ("generator", "adapters.token"): mine,
        ("generator", "http.token"): theirs,
        ("learner", "weights.generator_token"): theirs,
    }
    return ServePlan(
        arguments={"learner": (*learner, *given["learner"]), "generator": (*generator, *given["generator"])},
        environment={environment_name_of(key, process=process): token for (process, key), token in tokens.items()},
    )


def _of_environment(process: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Options that variables set, as far as the other process depends on them."""
    variables = {key: environment_name_of(key, process=process) for key in _SHARED}
    given = {key: environ[name] for key, name in variables.items() if name in environ}
    return tuple(word for key, value in given.items() for word in (f"--{key.replace('_', '-')}", value))


def _taken(learner: Sequence[str]) -> tuple[str, str]:
    """The generator's setting by which it takes what the learner, with these options, lets clients train."""
    whole = _given(learner, "--tinker.all-weights") == "true"
    return ("--adapters.whole", "true") if whole else ("--adapters.slots", "8")


def _scheme(options: Sequence[str]) -> str:
    """The scheme of a process with these options."""
    return "http" if _given(options, "--http.tls-cert-file") is None else "https"


def _trusting(called: Sequence[str], caller: Sequence[str]) -> tuple[str, ...]:
    """The setting by which a caller believes the process that it calls, if that serves HTTPS and names the CA."""
    ca = _given(called, _CA)
    needed = _scheme(called) == "https" and ca is not None and _given(caller, _CA) is None
    return (_CA, str(ca)) if needed else ()


def _given(options: Sequence[str], name: str) -> str | None:
    """The value of an option, as `NAME VALUE` or `NAME=VALUE`; the last one counts."""
    value = None
    for word, following in zip(options, (*options[1:], ""), strict=False):
        if word == name:
            value = following
        elif word.startswith(f"{name}="):
            value = word.partition("=")[2]
    return value


def _is_own_flag(word: str) -> bool:
    return word.startswith("--") and not word.startswith("--run.")


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as found:
        found.bind((LOOPBACK, 0))
        return int(found.getsockname()[1])


def _model_folder(given: str) -> Path:
    folder = Path(given).expanduser()
    if not folder.is_dir():
        got = "is a file" if folder.exists() else "is not there"
        raise ConfigError(
            [
                f"command line: {given} {got}; expected the folder of a model, with its config.json, tokenizer and "
                "*.safetensors. `headway fetch NAME` downloads one from the hub, and says where it is"
            ]
        )
    if lacking := list(missing_of(folder)):
        raise ConfigError([f"command line: {given} lacks {', '.join(lacking)}; expected the folder of a whole model"])
    return folder


def _number(own: Mapping[str, Sequence[str]], name: str, usual: str) -> str:
    text = own.get(name, [usual])[-1]
    if not text.isdecimal() or not int(text):
        raise ConfigError([f"command line: {name}: got {text!r}: expected a number above 0"])
    return text


class ServingNotice:
    """Tells what a client needs, once the processes are ready: a context manager, with a thread that asks them."""

    def __init__(self, learner: "LearnerConfig", others: Sequence[ProcessConfig]) -> None:
        self._learner, self._others = learner, others
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="serving_notice", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(_ANSWER_S)

    def text(self) -> str:
        """The lines for a client's shell, and where to look."""
        http = self._learner.http
        url = _url(http, socket.gethostname() if is_wildcard(http.host) else http.host)
        name = self._learner.tinker.base_model or self._learner.model.absolute()
        return (
            f"export TINKER_BASE_URL={url}\nexport TINKER_API_KEY={self._key()}\n"
            f"# page: {url}/ (log in with the key); headway status {self._learner.run.folder}\nbase model: {name}\n"
        )

    def _key(self) -> str:
        # Deferred: what it loads is not wanted for --help.
        from learner.tenants.keys import first_key_path

        keys_file = self._learner.tinker.keys_path(self._learner.run.folder)
        path = first_key_path(keys_file)
        return path.read_text(encoding="ascii").strip() if path.exists() else f"tml-...  # one of {keys_file}"

    def _tell(self) -> None:
        configs = (*self._others, self._learner)
        while not all(_is_ready(config) for config in configs):
            if self._ended.wait(_POLL_S):
                return
        self._note()
        sys.stdout.write(self.text())
        sys.stdout.flush()

    def _note(self) -> None:
        """Where the processes answer, for status and doctor, which can be told by `--url` without it, too."""
        configs = (self._learner, *self._others)
        try:
            note_targets(self._learner.run.folder, targets_of(dict(zip(SERVED, configs, strict=False))))
        except OSError as error:
            logger.warning("headway status and doctor do not find this server by its folder: %s", error)


def _url(http: HttpConfig, host: str) -> str:
    scheme = "http" if http.tls_cert_file is None else "https"
    return f"{scheme}://{_in_url(host)}:{http.port}"


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _is_ready(config: ProcessConfig) -> bool:
    http = getattr(config, "http")  # noqa: B009 - each of them has one
    url = _url(http, LOOPBACK if is_wildcard(http.host) else http.host)
    try:
        trust = None if http.tls_ca_file is None else ssl.create_default_context(cafile=http.tls_ca_file)
        urllib.request.urlopen(f"{url}/readyz", timeout=_ANSWER_S, context=trust).close()
    except (OSError, urllib.error.URLError):
        return False
    return True
