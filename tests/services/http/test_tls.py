"""HTTPS between the processes: who is believed, who is not, and what each is told."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import SecretStr

from headway.certificates import Authority
from protocol.rewards import ScoreItem
from protocol.status import Readiness
from services.config.models import HttpConfig
from services.diagnosis.asked import Condition, Target
from services.diagnosis.asking import ask
from services.http.app import create_app
from services.http.client import HttpClient, ServiceMistrusted, ServiceUnreachable
from services.http.metrics import Metrics
from services.http.server import Listener, serve_http
from services.http.tls import TlsFileError, TlsFiles, client_tls, server_tls
from services.rewards.client import RewardClient
from services.rewards.settings import ClientSettings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA with the certificates of two processes, and the CA of somebody else."""
    made = tmp_path_factory.mktemp("tls")
    authority = Authority.new()
    authority.write(made)
    authority.issue(made, "learner", hosts=["learner.example"])
    authority.issue(made, "generator", hosts=[])
    authority.issue(made, "expired", hosts=[], days=0.001)
    stranger = made / "stranger"
    stranger.mkdir()
    other = Authority.new()
    other.write(stranger)
    other.issue(stranger, "generator", hosts=[])
    return made


def files_of(folder: Path, name: str) -> TlsFiles:
    return TlsFiles(cert=folder / f"{name}.pem", key=folder / f"{name}.key", ca=folder / "ca.pem")


@asynccontextmanager
async def serving(files: TlsFiles, *, host: str = "127.0.0.1") -> AsyncIterator[str]:
    with Listener(host=host, port=0, tls=files) as listener:
        app = create_app(
            service="learner",
            version="0",
            token=None,
            readiness=lambda: Readiness(ready=True),
            metrics=Metrics("learner"),
        )
        async with asyncio.TaskGroup() as tasks:
            serving_it = tasks.create_task(serve_http(app, listener, finish_s=1))
            try:
                yield listener.url
            finally:
                serving_it.cancel()


async def asked(url: str, files: TlsFiles) -> bool:
    async with HttpClient(tls=client_tls(files)) as client:
        return (await client.get(f"{url}/readyz", Readiness, deadline_s=5)).ready


async def test_a_client_that_knows_the_ca_is_answered_over_https(folder: Path) -> None:
    async with serving(files_of(folder, "learner")) as url:
        assert url.startswith("https://127.0.0.1:")
        assert await asked(url, TlsFiles(ca=folder / "ca.pem"))
        assert await asked(url.replace("127.0.0.1", "localhost"), TlsFiles(ca=folder / "ca.pem"))


async def test_a_server_of_an_unknown_ca_is_not_believed_and_the_file_is_named(folder: Path) -> None:
    async with serving(files_of(folder / "stranger", "generator")) as url:
        with pytest.raises(ServiceMistrusted, match=r"is not signed by a CA in .*ca.pem: set http.tls_ca_file to"):
            await asked(url, TlsFiles(ca=folder / "ca.pem"))
        with pytest.raises(ServiceMistrusted, match=r"is not signed by a CA of this system"):
            await asked(url, TlsFiles())


async def test_a_certificate_for_another_host_is_not_believed(folder: Path) -> None:
    async with serving(files_of(folder, "learner"), host="127.0.0.2") as url:
        with pytest.raises(ServiceMistrusted, match=r"is for other hosts .*make one that names this host"):
            await asked(url, TlsFiles(ca=folder / "ca.pem"))


async def test_with_a_ca_for_clients_only_those_with_its_certificate_are_answered(folder: Path) -> None:
    mutual = replace(files_of(folder, "learner"), client_ca=folder / "ca.pem")
    async with serving(mutual) as url:
        assert await asked(url, files_of(folder, "generator"))
        with pytest.raises(
            ServiceUnreachable, match=r"client certificate, of its http.tls_client_ca_file: none is set"
        ):
            await asked(url, TlsFiles(ca=folder / "ca.pem"))
        wrong = replace(files_of(folder / "stranger", "generator"), ca=folder / "ca.pem")
        with pytest.raises(ServiceUnreachable, match=r"client certificate, of its .*: here it is .*generator\.pem"):
            await asked(url, wrong)


async def test_https_to_a_server_of_plain_http_says_what_to_change(folder: Path) -> None:
    async with serving(TlsFiles()) as url:
        with pytest.raises(ServiceMistrusted, match=r"does not speak TLS: begin its address with http://"):
            await asked(url.replace("http://", "https://"), TlsFiles(ca=folder / "ca.pem"))


async def test_a_certificate_that_is_renewed_on_disk_is_shown_without_a_restart(folder: Path, tmp_path: Path) -> None:
    authority = Authority.read(folder)
    authority.issue(tmp_path, "learner", hosts=[])
    os.symlink(folder / "ca.pem", tmp_path / "ca.pem")
    context = server_tls(files_of(tmp_path, "learner"))
    assert context is not None
    before = context.current()
    context.renew()
    assert context.current() is before
    authority.issue(tmp_path, "learner", hosts=["new.example"])
    context.renew()
    renewed = context.current()
    assert renewed is not before
    (tmp_path / "learner.pem").write_text("half a file")
    context.renew()
    assert context.current() is renewed, "what cannot be used leaves the last one in force"


def test_a_key_that_was_refused_is_tried_again_though_what_it_holds_stays(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority.read(folder)
    authority.issue(tmp_path, "learner", hosts=[])
    os.symlink(folder / "ca.pem", tmp_path / "ca.pem")
    context = server_tls(files_of(tmp_path, "learner"))
    assert context is not None
    before = context.current()
    authority.issue(tmp_path, "learner", hosts=["new.example"])
    (tmp_path / "learner.key").chmod(0o644)
    for _ in range(3):
        context.renew()
    assert context.current() is before
    (tmp_path / "learner.key").chmod(0o600)
    context.renew()
    assert context.current() is not before
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_files_that_cannot_be_used_are_named_with_the_remedy(folder: Path, tmp_path: Path) -> None:
    good = files_of(folder, "learner")
    with pytest.raises(TlsFileError, match=r"expired.pem \(http.tls_cert_file\) has expired on .*headway keys FOLDER"):
        server_tls(files_of(folder, "expired"))
    with pytest.raises(TlsFileError, match=r"cannot read .*missing.pem"):
        server_tls(replace(good, cert=tmp_path / "missing.pem"))
    with pytest.raises(TlsFileError, match=r"are no certificate with its key in PEM"):
        server_tls(replace(good, key=folder / "generator.key"))
    open_key = tmp_path / "open.key"
    open_key.write_bytes((folder / "learner.key").read_bytes())
    open_key.chmod(0o644)
    with pytest.raises(TlsFileError, match=r"open.key holds a secret.*chmod 600"):
        server_tls(replace(good, key=open_key))
    nothing = tmp_path / "nothing.pem"
    nothing.write_text("no certificate")
    with pytest.raises(TlsFileError, match=r"nothing.pem \(http.tls_ca_file\) holds no certificates"):
        client_tls(TlsFiles(ca=nothing))


def test_a_certificate_without_its_key_is_refused_by_the_config(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"http.tls_cert_file and http.tls_key_file belong together"):
        HttpConfig(port=1, tls_cert_file=folder / "learner.pem")
    with pytest.raises(ValueError, match=r"tls_client_ca_file is set, and http.tls_cert_file is not"):
        HttpConfig(port=1, tls_client_ca_file=folder / "ca.pem")


async def test_the_doctor_asks_over_https_and_tells_mistrust_from_death(folder: Path) -> None:
    async with serving(files_of(folder, "learner")) as url:
        known = await ask(Target(kind="learner", url=url, tls=TlsFiles(ca=folder / "ca.pem")))
        assert (known.condition, "404" in known.complaint or "/v1/status" in known.complaint) == (
            Condition.STRANGE,
            True,
        )
        unknown = await ask(Target(kind="learner", url=url, token=SecretStr("t"), tls=TlsFiles()))
        assert unknown.condition is Condition.STRANGE
        assert "is not signed by a CA" in unknown.complaint


async def test_the_reward_client_believes_the_ca_that_it_is_given(folder: Path) -> None:
    item = ScoreItem(id="0", verifier="exact_match", completion="a", prompt="", arguments={"answer": "a"})
    settings = ClientSettings(patience_s=0.3, deadline_s=1.0)
    async with serving(files_of(folder, "learner")) as url:
        async with RewardClient([url], settings=settings, tls=client_tls(TlsFiles(ca=folder / "ca.pem"))) as client:
            assert await client.unready() == ()
        async with RewardClient([url], settings=settings) as client:
            assert await client.unready() == ((url,),)
            (scored,) = await client.score([item])
            assert scored.error is not None
            assert "is not signed by a CA" in scored.error.message
