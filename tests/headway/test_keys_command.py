"""`headway keys`: what it makes, what it refuses, and that the settings it prints work."""

import stat
import sys
import tomllib
from pathlib import Path

import pytest

from env_service.config import EnvServiceConfig
from headway import checking, command
from headway.doctor import before
from learner.config import LearnerConfig
from protocol.messages import Goodbye
from services.config.models import load_config
from services.http.tls import TlsFiles, client_tls, server_tls
from services.zmq.keys import ClientKeys, ServerKeys
from services.zmq.sockets import DealerSocket, RouterSocket
from tests.headway.mistakes.small_model import small_model

Printed = pytest.CaptureFixture[str]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return small_model(tmp_path / "model")


@pytest.fixture(autouse=True)
def free_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever runs on this machine meanwhile."""
    monkeypatch.setattr(checking, "check_port", lambda what, host, port: before.good(what, host))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["headway", *words])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def make(monkeypatch: pytest.MonkeyPatch, capsys: Printed, folder: Path, *words: str) -> str:
    assert call(monkeypatch, "keys", str(folder), *words) == 0
    return capsys.readouterr().out


def models(model: Path) -> list[str]:
    """The one setting of each process that `headway keys` cannot know."""
    return [word for process in ("learner", "generator", "env-service") for word in (f"--{process}.model", str(model))]


def modes(folder: Path) -> dict[str, int]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in files}


def test_secret_files_are_for_their_owner_and_public_ones_for_all(
    monkeypatch: pytest.MonkeyPatch, capsys: Printed, folder: Path
) -> None:
    make(monkeypatch, capsys, folder, "--env-service", "env-0", "env-1")
    assert modes(folder) == {
        "learner.key": 0o600,
        "learner.pub": 0o644,
        "env-0.key": 0o600,
        "env-1.key": 0o600,
        "authorized/env-0.pub": 0o644,
        "authorized/env-1.pub": 0o644,
        "learner.token": 0o600,
        "generator.token": 0o600,
        "reward-service.token": 0o600,
        "env-service.token": 0o600,
    }
    contents = {path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert len(contents) == 10, "all differ"


async def test_the_printed_settings_are_good_and_learner_and_env_service_talk_with_them(
    monkeypatch: pytest.MonkeyPatch, capsys: Printed, folder: Path, model: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run.toml"
    run.write_text(make(monkeypatch, capsys, folder))
    everywhere = ["--learner.leases.address", "tcp://0.0.0.0:7301", "--learner.http.host", "0.0.0.0"]
    everywhere += ["--generator.http.host", "0.0.0.0", "--reward-service.http.host", "0.0.0.0"]
    everywhere += ["--env-service.http.host", "0.0.0.0"]
    assert call(monkeypatch, "check", str(run), *models(model), *everywhere) == 0, capsys.readouterr().err
    argv = ["--config", str(run), "--model", str(model)]
    learner = load_config(LearnerConfig, process="learner", argv=argv, environ={})
    env = load_config(EnvServiceConfig, process="env-service", argv=argv, environ={})
    leases = learner.leases
    server = ServerKeys.read(secret_key_file=leases.secret_key_file, authorized_keys=leases.authorized_keys)
    client = ClientKeys.read(secret_key_file=env.secret_key_file, server_key_file=env.learner_key_file)
    assert server is not None
    assert client is not None
    hello = Goodbye(reason="hello")
    async with (
        RouterSocket.bind("tcp://0.0.0.0:*", keys=server) as router,
        DealerSocket.connect(router.address.replace("0.0.0.0", "127.0.0.1"), identity="env", keys=client) as dealer,
    ):
        await dealer.send(hello)
        assert await router.receive() == ("env", hello)


def test_nothing_is_overwritten_unless_forced(monkeypatch: pytest.MonkeyPatch, capsys: Printed, folder: Path) -> None:
    make(monkeypatch, capsys, folder)
    before = (folder / "learner.key").read_text()
    assert call(monkeypatch, "keys", str(folder)) == 2
    assert "learner.key, " in capsys.readouterr().err
    assert (folder / "learner.key").read_text() == before
    make(monkeypatch, capsys, folder, "--force")
    assert (folder / "learner.key").read_text() != before
    assert modes(folder)["learner.key"] == 0o600


def test_another_env_service_is_added_beside_what_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: Printed, folder: Path
) -> None:
    make(monkeypatch, capsys, folder, "--env-service", "a")
    before = {path: path.read_text() for path in folder.rglob("*") if path.is_file()}
    printed = make(monkeypatch, capsys, folder, "--env-service", "b")
    assert all(path.read_text() == text for path, text in before.items())
    assert (folder / "authorized" / "b.pub").exists()
    assert f'b: secret_key_file = "{folder}/b.key"' in printed
    assert call(monkeypatch, "keys", str(folder), "--env-service", "b") == 2
    assert "b.key" in capsys.readouterr().err


def test_a_folder_with_an_odd_name_is_written_as_toml_has_it(
    monkeypatch: pytest.MonkeyPatch, capsys: Printed, tmp_path: Path
) -> None:
    odd = tmp_path / 'ké"y\\s'
    tables = tomllib.loads(make(monkeypatch, capsys, odd))
    assert tables["learner"]["leases"]["secret_key_file"] == str(odd / "learner.key")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "headway keys needs the path of a folder"),
        (["--force"], "headway keys needs the path of a folder"),
        (["F", "--env-service"], "expected --env-service NAME"),
        (["F", "--env-services", "a"], "--env-services: expected --env-service NAME"),
        (["F", "--env-service", "learner"], "none of them learner"),
        (["F", "--env-service", "../a"], "../a: expected different names"),
        (["F", "--env-service", "a", "a"], "expected different names"),
        (["/dev/null/keys"], "cannot write to /dev/null/keys"),
    ],
)
def test_other_arguments_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: Printed, tmp_path: Path, words: list[str], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "keys", *words) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "F").exists()


def broken(folder: Path, run: Path, what: str) -> None:
    """Spoil one thing that `headway check` has to notice."""
    text = run.read_text()
    if what == "another learner":
        (folder / "learner.pub").write_text((folder / "authorized" / "env-service.pub").read_text())
    elif what == "not authorized":
        (folder / "authorized" / "env-service.pub").write_text((folder / "learner.pub").read_text())
    elif what == "open to others":
        (folder / "env-service.key").chmod(0o644)
    elif what == "no key":
        (folder / "learner.key").write_text("short\n")
    elif what == "no file":
        (folder / "learner.pub").unlink()
    elif what == "one side":
        run.write_text(
            "".join(line for line in text.splitlines(True) if "env-service.key" not in line and "pub" not in line)
        )
    elif what == "half":
        run.write_text("".join(line for line in text.splitlines(True) if "authorized_keys" not in line))
    elif what == "open token":
        (folder / "generator.token").chmod(0o640)


@pytest.mark.parametrize(
    ("what", "complaint"),
    [
        ("another learner", "but that of the secret key in [learner] leases.secret_key_file is"),
        ("not authorized", "which is not in [learner] leases.authorized_keys"),
        ("open to others", "its mode 0644 lets others use it: chmod 600"),
        ("no key", "learner.key is no CURVE key: expected 40 characters of Z85"),
        ("no file", "learner.pub: No such file or directory"),
        ("one side", "leases.secret_key_file is set, but [env-service] learner_key_file is not"),
        ("half", "leases.secret_key_file is set and leases.authorized_keys is not: set both, or neither"),
        ("open token", "generator.token holds a secret, and its mode 0640 lets others use it"),
    ],
)
def test_check_names_keys_that_do_not_fit(
    monkeypatch: pytest.MonkeyPatch,
    capsys: Printed,
    folder: Path,
    model: Path,
    tmp_path: Path,
    what: str,
    complaint: str,
) -> None:
    run = tmp_path / "run.toml"
    run.write_text(make(monkeypatch, capsys, folder))
    broken(folder, run, what)
    assert call(monkeypatch, "check", str(run), *models(model)) == 2
    assert complaint in capsys.readouterr().err


def test_certificates_for_https_are_made_and_renewed_by_the_same_ca(
    monkeypatch: pytest.MonkeyPatch, capsys: Printed, folder: Path
) -> None:
    printed = make(monkeypatch, capsys, folder, "--host", "gpu-7.example", "10.0.0.7")
    settings = tomllib.loads(printed)
    for process in ("learner", "generator", "reward-service", "env-service"):
        http = settings[process]["http"]
        files = TlsFiles(
            cert=Path(http["tls_cert_file"]),
            key=Path(http["tls_key_file"]),
            ca=Path(http["tls_ca_file"]),
            client_ca=Path(http["tls_client_ca_file"]),
        )
        assert server_tls(files) is not None
        assert client_tls(files) is not None
    assert {mode for name, mode in modes(folder).items() if name.startswith("tls/") and name.endswith(".key")} == {
        0o600
    }
    authority, before = (folder / "tls" / "ca.pem").read_bytes(), (folder / "tls" / "learner.pem").read_bytes()
    again = make(monkeypatch, capsys, folder, "--host", "gpu-8.example")
    assert "New certificates are in" in again
    assert (folder / "tls" / "ca.pem").read_bytes() == authority
    assert (folder / "tls" / "learner.pem").read_bytes() != before


def test_after_a_leak_force_leaves_nothing_that_was_known(
    monkeypatch: pytest.MonkeyPatch, capsys: Printed, folder: Path
) -> None:
    make(monkeypatch, capsys, folder, "--env-service", "a", "b", "--host", "gpu-7.example")
    before = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    without = make(monkeypatch, capsys, folder, "--env-service", "a", "--force")
    assert "Removed: the keys of b." in without
    assert f"{folder / 'tls'} is as it was, its CA, too" in without
    assert [path.name for path in (folder / "authorized").iterdir()] == ["a.pub"]
    assert not (folder / "b.key").exists()

    printed = make(monkeypatch, capsys, folder, "--env-service", "a", "--host", "gpu-7.example", "--force")
    assert "The CA is new, too" in printed
    assert "Removed" not in printed
    tomllib.loads(printed)
    now = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert [str(path) for path, content in now.items() if before.get(path) == content] == []
    assert before.keys() - now.keys() == {Path("b.key"), Path("authorized/b.pub")}


def test_hosts_that_are_none_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: Printed, folder: Path) -> None:
    for words in (["--host"], ["--host", "http://a:1"], ["--hosts", "a"]):
        assert call(monkeypatch, "keys", str(folder), *words) == 2
    assert "--host" in capsys.readouterr().err
    assert not folder.exists()
