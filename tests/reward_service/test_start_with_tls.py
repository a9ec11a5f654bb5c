"""The real process of the reward service with a certificate: whom it answers, and what stops its start."""

import subprocess
from pathlib import Path

import httpx
import pytest

from headway.certificates import Authority
from services.http.tls import TlsFiles, client_tls
from tests.reward_service.real_service import COMMAND, real_service

pytestmark = pytest.mark.e2e

EXACT = {"id": "a", "verifier": "exact_match", "completion": "7", "arguments": {"answer": "7"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA, the certificate of the service and that of a caller."""
    made = tmp_path_factory.mktemp("tls")
    authority = Authority.new()
    authority.write(made)
    authority.issue(made, "reward-service", hosts=[])
    authority.issue(made, "env-service", hosts=[])
    authority.issue(made, "expired", hosts=[], days=0.001)
    return made


def config(folder: Path, *, certificate: str = "reward-service") -> str:
    return f"""
[reward-service]
sandbox = "off"
workers = {{ count = 1 }}

[reward-service.http]
port = 0
tls_cert_file = "{folder / certificate}.pem"
tls_key_file = "{folder / certificate}.key"
tls_client_ca_file = "{folder / "ca.pem"}"
"""


def test_it_scores_for_a_caller_with_a_certificate_and_for_nobody_else(folder: Path, tmp_path: Path) -> None:
    ours = TlsFiles(cert=folder / "env-service.pem", key=folder / "env-service.key", ca=folder / "ca.pem")
    known, nameless = client_tls(ours), client_tls(TlsFiles(ca=folder / "ca.pem"))
    assert known is not None
    assert nameless is not None
    with real_service(tmp_path, config(folder), trust=known.current()) as (_, client):
        assert client.base_url.scheme == "https"
        assert client.post("/v1/score", json={"items": [EXACT]}).json()["results"][0]["reward"] == 1.0
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{client.base_url}/readyz", verify=nameless.current())
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://{client.base_url.netloc.decode()}/readyz")


def test_a_certificate_that_has_expired_stops_the_start_with_the_remedy(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(config(folder, certificate="expired"))
    ended = subprocess.run([*COMMAND, "--config", file], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode != 0
    assert "expired.pem (http.tls_cert_file) has expired on" in ended.stderr
    assert "headway keys FOLDER" in ended.stderr
    assert "Traceback" not in ended.stderr
