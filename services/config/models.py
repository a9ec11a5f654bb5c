"""Configuration of a process: defaults < run.toml < environment < command line.

    [run]                          HEADWAY_RUN__NAME                      --run.name
    [learner] max_lag = 4          HEADWAY_LEARNER__MAX_LAG               --max-lag 4
    [learner.algo] clip_low = 0.2  HEADWAY_LEARNER__ALGO__CLIP_LOW        --algo.clip-low 0.2

A group of one of several types is picked by `type`: `--algo grpo` is short for `--algo.type grpo`, also in the file
(`algo = "grpo"`) and the environment. Where a later source picks another type than an earlier one, the earlier one's
settings of that group are left out, with a warning. A key of a type that is not picked is an error.

A secret can also be given as a file that holds it, as containers mount them: under the same name with `_file` after it,
such as `token_file` or HEADWAY_LEARNER__HTTP__TOKEN_FILE.
"""

import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self, TypedDict, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from services.config import help_text as helping
from services.config.devices import use_devices
from services.config.numbers import truths_for_numbers
from services.config.options import Choice, OptionSchema, idle_reason, schema_of
from services.config.run_paths import WrittenPath, import_code_beside
from services.config.sources import (
    PROCESSES,
    ConfigError,
    SourceContent,
    SourcedSetting,
    explained,
    from_command_line,
    from_environment,
    from_file,
    of_place,
    with_paths,
    with_secrets_read,
)
from services.http.tls import TlsFiles
from services.model_folder import template_digest, template_in
from services.network import is_host, is_loopback
from services.rotating_secrets import SHORTEST_TOKEN, accepted

logger = logging.getLogger(__name__)


class ConfigModel(BaseModel):
    """The base of every config model and group: frozen, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False)


class TraceSettings(TypedDict):
    """Destination of traces, the share of leases that is traced, and the run's name."""

    url: str | None
    share: float
    run: str


class RunConfig(ConfigModel):
    """The run: what all its processes share."""

    name: str = Field(
        "default",
        description="name of the run; if left out, that of the folder that holds run.toml",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
    )
    directory: Annotated[Path, WrittenPath()] = Field(
        Path("runs"),
        description="folder that holds a folder for each run; with a run.toml a relative path counts from the "
        "folder of that file",
    )
    seed: int | None = Field(
        None,
        ge=0,
        lt=1 << 32,
        description="seed of all processes whose own seed is not set; none: each has its own default",
    )
    trace_url: str | None = Field(
        None,
        pattern=r"^https?://",
        description="address of an OpenTelemetry collector (OTLP over HTTP) that traces of leases are sent to; none "
        "sends none",
    )
    trace_share: float = Field(0.01, ge=0, le=1, description="share of the training leases that are traced")

    chat_template: Path | None = Field(
        None,
        description="Jinja file of the policy's chat template, for all processes and the exported model; the model's "
        "own if none. Opponents and reward models that are other models have a chat_template of their own",
    )

    chat_template_kwargs: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="variables that the policy's chat template gets in all conversations and examples, such as { "
        "enable_thinking = false }; those of an environment override them",
    )

    @property
    def template_fingerprint(self) -> dict[str, str]:
        """Fingerprint of the text of `chat_template`; nothing without one.

        Raises FileNotFoundError, ValueError.
        """
        return {} if self.chat_template is None else {"template_fingerprint": template_digest(self.chat_template)}

    @property
    def template_text(self) -> str:
        """The content of `chat_template`; empty without one. Raises FileNotFoundError, ValueError."""
        return "" if self.chat_template is None else template_in(self.chat_template)

    @property
    def traces(self) -> "TraceSettings":
        """Of this run, as a process's exporter takes them."""
        return {"url": self.trace_url, "share": self.trace_share, "run": self.name}

    @property
    def folder(self) -> Path:
        """Folder of this run's files, as an absolute path: messages name it, whatever the current folder is."""
        return (self.directory / self.name).absolute()


class LogConfig(ConfigModel):
    """Settings of the log."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severity that is logged")
    format: Literal["text", "json"] = Field("text", description="each record as a readable line, or as a JSON object")


class HttpConfig(ConfigModel):
    """The address that a process serves HTTP on, the token that its callers show, and its side of TLS."""

    host: str = Field("127.0.0.1", description="address to listen on; any but a loopback address needs a token")
    port: int = Field(ge=0, le=65535, description="port to listen on; 0 lets the system choose one")
    token: SecretStr | None = Field(None, description="bearer token that callers must show")
    max_body_bytes: int = Field(64 << 20, ge=1024, description="largest request body that is taken, in bytes")
    tls_cert_file: Path | None = Field(
        None,
        description="PEM file of this process's certificate, made by `headway keys`: it serves HTTPS with it, and "
        "shows it to the processes that it calls; none: plain HTTP",
    )
    tls_key_file: Path | None = Field(
        None, description="PEM file of the certificate's private key, which only its owner may read"
    )
    tls_ca_file: Path | None = Field(
        None,
        description="PEM file of the CA that signs the certificates of the processes that this one calls; the system's "
        "if none",
    )
    tls_client_ca_file: Path | None = Field(
        None,
        description="PEM file of a CA: callers must show a certificate that it signed; none: no certificate is "
        "asked for",
    )

    @property
    def tls(self) -> TlsFiles:
        """The files of TLS."""
        return TlsFiles(
            cert=self.tls_cert_file, key=self.tls_key_file, ca=self.tls_ca_file, client_ca=self.tls_client_ca_file
        )

    @field_validator("host")
    @classmethod
    def _can_be_looked_up(cls, host: str) -> str:
        if not is_host(host):
            raise ValueError(f"{host!r} is no host: expected a name or an address, such as 127.0.0.1 or 0.0.0.0")
        return host

    @model_validator(mode="after")
    def _certificate_with_its_key(self) -> Self:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError(
                "http.tls_cert_file and http.tls_key_file belong together: set both, or neither; "
                "`headway keys FOLDER --host HOST ...` makes them"
            )
        if self.tls_client_ca_file is not None and self.tls_cert_file is None:
            raise ValueError("http.tls_client_ca_file is set, and http.tls_cert_file is not: plain HTTP asks for none")
        return self

    @model_validator(mode="after")
    def _token_on_reachable_address(self) -> Self:
        if not is_loopback(self.host) and (self.token is None or not self.token.get_secret_value()):
            raise ValueError(
                f"host {self.host} can be reached from other machines and no token is set: "
                "set http.token or http.token_file, or listen on 127.0.0.1"
            )
        if self.token is not None and not is_loopback(self.host):
            length = min(map(len, accepted(self.token)))
            if length < SHORTEST_TOKEN:
                raise ValueError(
                    f"host {self.host} can be reached from other machines and the token has {length} characters; "
                    f"expected at least {SHORTEST_TOKEN}, as a short one can be guessed: `headway keys FOLDER` makes "
                    "long ones, or listen on 127.0.0.1"
                )
        return self


class ProcessConfig(ConfigModel):
    """Settings that the config of every process has."""

    run: RunConfig = Field(RunConfig(), description="the run, shared by all processes")
    log: LogConfig = LogConfig()
    devices: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (), description="GPUs of this process, by number among those that it sees; `headway up` shares them out if none"
    )

    usual_groups: ClassVar[tuple[str, ...]] = ("http",)
    """Groups of keys that `--help` lists one by one, the most wanted first."""

    @classmethod
    def without_effect(cls, settings: Mapping[str, object]) -> Mapping[str, str]:
        """Keys, and groups of keys, that do nothing beside these settings, by dotted key; each with the reason.

        Whoever sets one is told so: a setting that does nothing was meant to do something.
        """
        return {}

    @property
    def gpus_wanted(self) -> int:
        """Number of GPUs that it uses where there are some."""
        return 0

    @property
    def alone_in(self) -> frozenset[str]:
        """Keys that need not agree with those of other processes, as these settings are."""
        return frozenset()

    @property
    def unheard(self) -> frozenset[str]:
        """Keys of addresses that a process with these settings never listens at."""
        return frozenset()

    @property
    def collective(self) -> str:
        """Of its weight broadcasts; empty if it takes no part in them."""
        return ""


C = TypeVar("C", bound=ProcessConfig)


def load_config(model: type[C], *, process: str, argv: Sequence[str], environ: Mapping[str, str]) -> C:
    """The config of a process, from `--config FILE`, the environment and the other arguments.

    Raises ConfigError with every problem found. `argv` does not hold the program's name.
    """
    assert process in PROCESSES, process
    schema = schema_of(model)
    path, arguments = _split_off_file(argv)
    sources: list[SourceContent] = []
    if path is not None:
        beside = path.parent.absolute()
        sources = [of_place(path), with_paths(from_file(path, schema, process=process), schema, beside)]
    sources.append(with_paths(from_environment(environ, schema, process=process), schema, None))
    sources.append(with_paths(from_command_line(arguments, schema, process=process), schema, None))
    sources = [with_secrets_read(source, schema) for source in sources]
    problems = [problem for source in sources for problem in source.problems]
    settings, strays = _merged(_instance_defaults(model, ""), sources, schema)
    problems += [*strays, *truths_for_numbers(settings, schema), *_idle(model, settings, process)]
    _follow_seed(settings, schema)
    try:
        config = model.model_validate(_nested(settings))
    except ValidationError as error:
        raise ConfigError(problems + explained(error, settings, schema, process, known=bool(problems))) from error
    if problems:
        raise ConfigError(problems)
    return config


def load_config_and_code(model: type[C], *, process: str, argv: Sequence[str], environ: Mapping[str, str]) -> C:
    """`load_config` for who runs what the config names: code beside the config's file can be imported from then on."""
    path, _ = _split_off_file(argv)
    if path is not None:
        import_code_beside(path)
    return load_config(model, process=process, argv=argv, environ=environ)


def _idle(model: type[ProcessConfig], settings: Mapping[str, SourcedSetting], process: str) -> list[str]:
    """A complaint about each setting that does nothing."""
    idle = model.without_effect({key: setting.value for key, setting in settings.items()})
    reasons = {
        setting.origin: idle_reason(key, idle) for key, setting in settings.items() if setting.origin != "default"
    }
    return [f"{origin} is set but has no effect: {reason}" for origin, reason in reasons.items() if reason]


def _follow_seed(settings: dict[str, SourcedSetting], schema: OptionSchema) -> None:
    """Every seed that is not set is that of the run, if it has one."""
    run = settings.get("run.seed")
    if run is None or run.value is None:
        return
    for key in schema.options:
        if re.fullmatch(r"(?:.*[._])?seed", key) and (key not in settings or settings[key].origin == "default"):
            settings[key] = SourcedSetting(key, run.value, run.origin)


def load_or_exit(model: type[C], *, process: str, description: str = "") -> C:
    """`load_config` for a command: prints help and exits with 0, or prints the problems and exits with 2."""
    arguments = sys.argv[1:]
    if "--help" in arguments or "-h" in arguments:
        sys.stdout.write(help_text(model, process=process, description=description, argv=arguments))
        raise SystemExit(0)
    try:
        config = load_config_and_code(model, process=process, argv=arguments, environ=os.environ)
        use_devices(config.devices, process=process)
        _check_template(config.run)
    except ConfigError as error:
        sys.stderr.write("".join(f"{process}: {problem}\n" for problem in error.problems))
        raise SystemExit(2) from None
    return config


def _check_template(run: RunConfig) -> None:
    """Here, so that each process says it alike. Raises ConfigError."""
    try:
        assert run.template_text is not None
    except (OSError, ValueError) as error:
        raise ConfigError([f"[run] chat_template: {error}"]) from error


def help_text(model: type[ProcessConfig], *, process: str, description: str = "", argv: Sequence[str] = ()) -> str:
    """The options that count where `argv` picks its types, with kind, default and meaning, the usual ones first.

    With `--all` every option, at length; with keys or groups in `argv`, these at length.
    """
    picked = helping.asked_of(schema_of(model), argv).picked
    idle = model.without_effect({f"{key}.type": name for key, name in picked.items()})
    return helping.page(model, process=process, description=description, argv=argv, usual=model.usual_groups, idle=idle)


def _split_off_file(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    rest = list(argv)
    path: Path | None = None
    for index, argument in enumerate(argv):
        if argument == "--config":
            if index + 1 == len(argv):
                raise ConfigError(["command line: --config needs the path of a TOML file"])
            path, rest = Path(argv[index + 1]), [*argv[:index], *argv[index + 2 :]]
        elif argument.startswith("--config="):
            path, rest = Path(argument.removeprefix("--config=")), [*argv[:index], *argv[index + 1 :]]
    return path, rest


def _instance_defaults(model: type[BaseModel], prefix: str) -> dict[str, SourcedSetting]:
    """Values that the default instances of groups set: a group that is given in part keeps them for the rest."""
    found: dict[str, SourcedSetting] = {}
    for name, info in model.model_fields.items():
        value = info.get_default(call_default_factory=True, validated_data={})
        if isinstance(value, BaseModel):
            found.update(_fields_set(value, f"{prefix}{name}."))
            if info.discriminator is not None:
                key = f"{prefix}{name}.{info.discriminator}"
                found[key] = SourcedSetting(key, getattr(value, str(info.discriminator)), "default")
    return found


def _fields_set(instance: BaseModel, prefix: str) -> dict[str, SourcedSetting]:
    found = _instance_defaults(type(instance), prefix)
    for name in instance.model_fields_set:
        value = getattr(instance, name)
        if isinstance(value, BaseModel):
            found.update(_fields_set(value, f"{prefix}{name}."))
        else:
            found[f"{prefix}{name}"] = SourcedSetting(f"{prefix}{name}", value, "default")
    return found


def _merged(
    defaults: Mapping[str, SourcedSetting], sources: Sequence[SourceContent], schema: OptionSchema
) -> tuple[dict[str, SourcedSetting], list[str]]:
    """Later sources over earlier ones, and the keys that do not belong to the type that is picked."""
    merged = dict(defaults)
    problems: list[str] = []
    for source in sources:
        settings = {setting.key: setting for setting in source.settings}
        for choice in schema.choices.values():
            problems += _drop_other_type(merged, settings.get(choice.type_key), choice, schema)
        merged.update(settings)
    for choice in schema.choices.values():
        problems += _strays(merged, choice, schema)
    return merged, problems


def _drop_other_type(
    merged: dict[str, SourcedSetting], picked: SourcedSetting | None, choice: Choice, schema: OptionSchema
) -> list[str]:
    """Drops the settings of another type, where a later source picks a new one, after checking them."""
    before = merged.get(choice.type_key)
    if picked is None or before is None or picked.value == before.value:
        return []
    dropped = [key for key in merged if key.startswith(f"{choice.key}.")]
    explicit = before.origin != "default"
    problems = _strays(merged, choice, schema) if explicit else []
    for key in dropped:
        if explicit or merged[key].origin == "default":
            del merged[key]
    if explicit and len(dropped) > 1:
        logger.warning(
            "%s picks %s: the settings of %s for %s are left out",
            picked.origin, picked.value, before.origin.split(" ")[0], before.value,
        )  # fmt: skip
    return problems


def _strays(merged: Mapping[str, SourcedSetting], choice: Choice, schema: OptionSchema) -> list[str]:
    picked = merged.get(choice.type_key)
    if picked is None or picked.value not in choice.variants:
        return []
    problems = []
    for setting in merged.values():
        owners = schema.options[setting.key].variants if setting.key.startswith(f"{choice.key}.") else {}
        if owners and picked.value not in owners:
            owner = " or ".join(owners)
            problems.append(f"{setting.origin}: an option of {choice.key} {owner}, but {choice.key} is {picked.value}")
    return problems


def _nested(settings: Mapping[str, SourcedSetting]) -> dict[str, object]:
    root: dict[str, object] = {}
    for setting in settings.values():
        *groups, name = setting.key.split(".")
        table = root
        for group in groups:
            inner = table.setdefault(group, {})
            assert isinstance(inner, dict)
            table = inner
        table[name] = setting.value
    return root
