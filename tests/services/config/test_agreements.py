"""Agreements between two configs, and the complaints where they disagree."""

from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field, SecretStr

from services.config.agreements import EqualTo, Listens, ModelFolder, Reaches, disagreements
from services.config.models import ConfigModel, HttpConfig, ProcessConfig, RunConfig


class IntakeSettings(ConfigModel):
    address: Annotated[str, Listens()] = "tcp://127.0.0.1:7301"


class ServerConfig(ProcessConfig):
    http: HttpConfig = HttpConfig(port=7300)
    intake: IntakeSettings = IntakeSettings()
    model: Annotated[Path | None, ModelFolder(("tokenizer", "model"))] = None


class Peer(ConfigModel):
    urls: Annotated[tuple[str, ...], Reaches("learner")] = ("http://127.0.0.1:7300",)
    intake: Annotated[str | None, Reaches("learner", "intake.address")] = Field("tcp://127.0.0.1:7301")
    token: Annotated[SecretStr | None, EqualTo("learner", "http.token")] = None


class Caller(ProcessConfig):
    http: HttpConfig = HttpConfig(port=7310)
    peer: Peer = Peer()
    model: Annotated[Path | None, ModelFolder(("tokenizer",))] = None


def found(server: ServerConfig, caller: Caller) -> list[str]:
    return disagreements({"learner": server, "generator": caller})


def listening(host: str, port: int = 7300) -> ServerConfig:
    return ServerConfig(http=HttpConfig(host=host, port=port, token=SecretStr("sixteen-or-more!")))


def calling(*urls: str, intake: str | None = "tcp://127.0.0.1:7301") -> Caller:
    return Caller(peer=Peer(urls=urls, intake=intake, token=SecretStr("sixteen-or-more!")))


def test_defaults_that_fit_together_are_no_problem() -> None:
    assert found(ServerConfig(), Caller()) == []


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:7300"),
        ("127.0.0.1", "http://localhost:7300/"),
        ("127.0.0.1", "http://127.0.0.1:7999,http://127.0.0.1:7300"),
        ("0.0.0.0", "http://127.0.0.1:7300"),
        ("::", "http://[::1]:7300"),
        ("0.0.0.0", "https://learner.example"),
        ("10.0.0.5", "http://10.0.0.5:7300"),
        ("10.0.0.5", "http://learner.example:80"),
    ],
)
def test_an_address_that_leads_to_the_listener_is_no_problem(host: str, url: str) -> None:
    assert found(listening(host), calling(*url.split(","))) == []


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:7301"),
        ("127.0.0.1", "http://localhost"),
        ("127.0.0.1", "http://learner.example:7300"),
        ("10.0.0.5", "http://127.0.0.1:7300"),
        ("10.0.0.5", "http://10.0.0.5:7301"),
    ],
)
def test_an_address_that_leads_elsewhere_is_named_with_the_right_one(host: str, url: str) -> None:
    assert found(listening(host), calling(url)) == [
        f"[generator] peer.urls is {url}, but [learner] http listens on {host}:7300: make them agree"
    ]


def test_what_is_no_address_and_what_is_left_out_are_told_apart() -> None:
    (problem,) = found(listening("127.0.0.1"), calling("http://127.0.0.1:7300", intake="localhost"))
    assert problem == "[generator] peer.intake is 'localhost': expected scheme://host:port"
    (problem,) = found(listening("127.0.0.1"), calling("http://127.0.0.1:7300", intake=None))
    assert problem.startswith("[generator] peer.intake is none, but [learner] intake.address listens on 127.0.0.1:7301")


def test_ipc_addresses_must_be_the_same() -> None:
    server = ServerConfig(intake=IntakeSettings(address="ipc:///run/headway"))
    assert found(server, Caller(peer=Peer(intake="ipc:///run/headway"))) == []
    assert len(found(server, Caller(peer=Peer(intake="ipc:///run/other")))) == 1


def test_a_port_that_two_listen_on_is_a_problem_and_port_0_is_not() -> None:
    caller = Caller(http=HttpConfig(port=7301))
    assert found(ServerConfig(), caller) == [
        "[learner] intake.address and [generator] http both listen on port 7301: give each its own"
    ]
    zero = Caller(http=HttpConfig(port=0), peer=Peer(urls=("http://127.0.0.1:7300",)))
    assert found(ServerConfig(), zero) == []


def test_secrets_that_differ_are_named_and_not_shown() -> None:
    server = ServerConfig(http=HttpConfig(port=7300, token=SecretStr("hunter2")))
    (problem,) = found(server, Caller(peer=Peer(token=SecretStr("wrong1"))))
    assert problem.startswith("[generator] peer.token is another secret, but [learner] http.token")
    assert "hunter2" not in problem
    assert "wrong1" not in problem
    assert "peer.token is not set" in found(server, Caller())[0]


def model_folder(path: Path, *, tokenizer: str = "{}", hidden_size: int = 8) -> Path:
    path.mkdir()
    (path / "config.json").write_text(f'{{"hidden_size": {hidden_size}}}')
    (path / "tokenizer.json").write_text(tokenizer)
    return path


def test_model_folders_must_be_there_and_be_complete(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    missing, incomplete = found(ServerConfig(model=tmp_path / "none"), Caller(model=empty))
    assert missing == f"[learner] model: {tmp_path}/none is not a folder; expected a Hugging Face model directory"
    assert incomplete.startswith(f"[generator] model: {empty} cannot be used: ")
    (empty / "config.json").write_text("{")
    assert "cannot be used" in found(ServerConfig(), Caller(model=empty))[0]


def test_models_must_agree_in_what_their_processes_share(tmp_path: Path) -> None:
    one = model_folder(tmp_path / "one")
    larger = model_folder(tmp_path / "larger", hidden_size=16)
    other = model_folder(tmp_path / "other", tokenizer="[]")
    assert found(ServerConfig(model=one), Caller(model=larger)) == []  # the caller's tokenizer is all that matters
    (problem,) = found(ServerConfig(model=one), Caller(model=other))
    assert problem.startswith(f"[learner] model {one} and [generator] model {other} differ in their tokenizer")


def test_what_processes_tell_the_chat_template_is_the_same(tmp_path: Path) -> None:
    class SpeakerConfig(Caller):
        model: Annotated[Path | None, ModelFolder(("chat_template",))] = None

    one = model_folder(tmp_path / "one")
    plain, told = (
        SpeakerConfig(model=one),
        SpeakerConfig(model=one, run=RunConfig(chat_template_kwargs={"enable_thinking": False})),
    )

    assert disagreements({"generator": told, "env-service": told.model_copy(update={"http": HttpConfig(port=1)})}) == []
    (problem,) = disagreements(
        {"generator": told, "env-service": plain.model_copy(update={"http": HttpConfig(port=1)})}
    )
    assert "differ in their chat template" in problem
    assert "the same chat_template and chat_template_kwargs in [run]" in problem


def test_a_process_without_a_table_is_not_missed() -> None:
    assert disagreements({"generator": calling("http://127.0.0.1:1", intake=None)}) == []


def test_an_address_begins_as_its_listener_speaks() -> None:
    tls = {"tls_cert_file": Path("a.pem"), "tls_key_file": Path("a.key")}
    server = ServerConfig(http=HttpConfig(port=7300, **tls), intake=IntakeSettings())
    assert found(server, Caller()) == [
        "[generator] peer.urls is http://127.0.0.1:7300, but [learner] http has a certificate: begin the address with "
        "https://"
    ]
    assert found(server, Caller(peer=Peer(urls=("https://127.0.0.1:7300",)))) == []
