"""`headway serve`: what it starts for a model, what it refuses by name, and what it tells clients."""

import os
import re
import socket
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from headway import command as umbrella
from headway import serve_command, starting
from headway.own_options import config_model
from headway.serve_command import SERVED, ServePlan, ServingNotice, free_port, serve_options, serve_plan
from headway.served_folder import note_targets, noted_targets
from headway.supervisor import ProcessCommand
from learner.config import LearnerConfig
from learner.tenants.keys import TenantKeys, make_keys_file
from services.config.agreements import disagreements
from services.config.models import load_config
from services.config.sources import ConfigError
from services.diagnosis.asked import Target
from services.http.tls import TlsFiles
from services.process import huge_pages
from tests.headway.mistakes.small_model import small_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    small_model(tmp_path / "model")
    return tmp_path / "model"


def plan(model: Path | str, *words: str, on_cpu: bool = True, environ: Mapping[str, str] | None = None) -> ServePlan:
    own, overrides = serve_options(words)
    return serve_plan(str(model), own, overrides, free_port=7311, on_cpu=on_cpu, environ=environ or {})


def configs(made: ServePlan) -> dict[str, Any]:
    return {
        name: load_config(config_model(name), process=name, argv=made.arguments[name], environ=made.environment)
        for name in SERVED
    }


def test_the_generator_takes_what_the_learner_lets_clients_train(model: Path) -> None:
    found = configs(plan(model, "--learner.tinker.all-weights", "true"))
    assert (found["generator"].adapters.whole, found["generator"].adapters.slots) == (True, 0)
    assert configs(plan(model))["generator"].adapters.slots == 8


def test_both_processes_fit_together(model: Path) -> None:
    found = configs(plan(model, "--port", "7411", "--name", "tiny/model", "--context", "32"))
    assert disagreements(found) == []
    learner, generator = found["learner"], found["generator"]
    assert learner.tinker.enabled
    assert (learner.tinker.base_model, learner.tinker.context_tokens, generator.context_tokens) == (
        "tiny/model",
        32,
        32,
    )
    assert learner.tinker.generators == ("http://127.0.0.1:7311",)
    assert (generator.http.port, generator.join.learner) == (7311, None)
    assert generator.adapters.source == "http://127.0.0.1:7411"
    assert generator.adapters.token == learner.http.token != generator.http.token == learner.weights.generator_token
    assert generator.engine.dtype == "float32"
    assert learner.run.folder == Path("runs/serve").absolute()


def test_with_a_certificate_the_generator_fetches_over_https_and_believes_the_same_ca(model: Path) -> None:
    words = ("--learner.http.tls-cert-file=a.pem", "--learner.http.tls-key-file", "a.key")
    told = plan(model, *words, "--learner.http.tls-ca-file", "ca.pem").arguments
    assert following(told["generator"], "--adapters.source") == "https://127.0.0.1:7300"
    assert following(told["generator"], "--http.tls-ca-file") == "ca.pem"
    assert following(told["learner"], "--tinker.generators") == "http://127.0.0.1:7311"
    own = ("--learner.http.tls-ca-file", "ca.pem", "--generator.http.tls-ca-file", "mine.pem")
    assert plan(model, *words, *own).arguments["generator"].count("--http.tls-ca-file") == 1
    public = plan(model, *words).arguments["generator"]
    assert "--http.tls-ca-file" not in public


def test_a_generator_with_a_certificate_is_asked_over_https(model: Path) -> None:
    words = ("--generator.http.tls-cert-file", "b.pem", "--generator.http.tls-ca-file", "ca.pem")
    told = plan(model, *words).arguments
    assert following(told["learner"], "--tinker.generators") == "https://127.0.0.1:7311"
    assert following(told["learner"], "--http.tls-ca-file") == "ca.pem"
    assert following(told["generator"], "--adapters.source") == "http://127.0.0.1:7300"


def test_what_variables_say_of_one_process_the_other_one_knows(model: Path) -> None:
    environ = {
        "HEADWAY_LEARNER__HTTP__TLS_CERT_FILE": "a.pem", "HEADWAY_LEARNER__HTTP__TLS_CA_FILE": "ca.pem",
        "HEADWAY_LEARNER__TINKER__ALL_WEIGHTS": "true",
    }  # fmt: skip
    told = plan(model, environ=environ).arguments
    assert following(told["generator"], "--adapters.source") == "https://127.0.0.1:7300"
    assert following(told["generator"], "--http.tls-ca-file") == "ca.pem"
    assert following(told["generator"], "--adapters.whole") == "true"
    own = plan(model, "--learner.http.tls-ca-file", "mine.pem", environ=environ).arguments
    assert following(own["generator"], "--http.tls-ca-file") == "mine.pem"


def following(words: Sequence[str], name: str) -> str:
    return words[list(words).index(name) + 1]


def test_an_address_with_colons_is_in_brackets_where_it_is_part_of_a_url(model: Path) -> None:
    found = configs(plan(model, "--host", "::1", "--port", "7411"))
    assert found["learner"].http.host == "::1"
    assert found["generator"].adapters.source == "http://[::1]:7411"


def test_settings_of_ones_own_come_last(model: Path) -> None:
    found = configs(
        plan(model, "--run.name", "mine", "--generator.engine.kv-cache-gb", "2", "--learner.tinker.max-resident", "3")
    )
    assert [each.run.name for each in found.values()] == ["mine", "mine"]
    assert found["generator"].engine.kv_cache_gb == 2
    assert found["learner"].tinker.max_resident == 3


def test_a_gpus_generator_keeps_the_models_own_type(model: Path) -> None:
    assert configs(plan(model, on_cpu=False))["generator"].engine.dtype == "auto"


def test_a_server_that_others_can_reach_has_tokens_that_nobody_guesses(model: Path) -> None:
    made = plan(model, "--host", "0.0.0.0")
    assert disagreements(configs(made)) == []
    assert len(set(made.environment.values())) == 2
    assert min(map(len, made.environment.values())) > 40
    assert made.environment.keys().isdisjoint(plan(model).environment.values())
    assert not any(
        token in word for token in made.environment.values() for words in made.arguments.values() for word in words
    )


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--port", "x"), r"--port: got 'x': expected a number above 0"),
        (("--context", "0"), r"--context: got '0'"),
        (("--prot", "7"), r"unknown option --prot; did you mean --port\?"),
        (("--env-service.workers", "2"), r"headway serve starts learner and generator, and no env-service"),
        (("--learner.steps", "2"), None),
    ],
)
def test_what_cannot_be_is_refused_by_name(model: Path, words: tuple[str, ...], complaint: str | None) -> None:
    if complaint is None:
        with pytest.raises(ConfigError, match=r"--steps is set but has no effect: tinker.enabled is true"):
            configs(plan(model, *words))
        return
    with pytest.raises(ConfigError, match=complaint):
        plan(model, *words)


def test_a_model_has_to_be_a_whole_folder(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere is not there; expected the folder of a model.*headway fetch"):
        plan("nowhere")
    with pytest.raises(ConfigError, match=r"config\.json is a file; expected the folder"):
        plan(model / "config.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty lacks config\.json, tokenizer\.json"):
        plan(tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"headway serve needs the folder of a model: headway serve MODEL"):
        umbrella._run(["serve", "--port", "7"])


class NotedServing:
    commands: list[ProcessCommand] = []  # noqa: RUF012 - nothing hands the supervisor out

    def __init__(self, commands: list[ProcessCommand], **_: object) -> None:
        NotedServing.commands = commands

    def run(self) -> int:
        return 0


def test_the_command_starts_the_learner_and_the_generator_and_stops_the_generator_last(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(serve_command, "Supervisor", NotedServing)
    monkeypatch.setattr(starting, "examined_apart", lambda configs: None)
    assert umbrella._run(["serve", str(model), "--port", str(free_port())]) == 0
    assert [(each.name, each.stop_stage, each.is_leader) for each in NotedServing.commands] == [
        ("learner", 0, False),
        ("generator", 1, False),
    ]
    assert [Path(each.arguments[0]).name for each in NotedServing.commands] == ["learner", "generator"]
    assert all("HEADWAY_LEARNER__HTTP__TOKEN" in dict(each.environment) for each in NotedServing.commands)
    learner, generator = (dict(each.environment) for each in NotedServing.commands)
    assert huge_pages(os.environ).items() <= learner.items()
    assert "GLIBC_TUNABLES" not in generator


class Ready(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/readyz" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def test_a_client_is_told_address_key_and_name_once_all_are_ready(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    servers = [HTTPServer(("127.0.0.1", 0), Ready) for _ in range(2)]
    ports = [server.server_port for server in servers]
    found = configs(plan(model, "--port", str(ports[0]), "--generator.http.port", str(ports[1])))
    learner = found["learner"]
    assert isinstance(learner, LearnerConfig)
    make_keys_file(learner.tinker.keys_path(learner.run.folder))
    threads = [threading.Thread(target=server.serve_forever, daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    with ServingNotice(learner, [found["generator"]]) as notice:
        notice._thread.join(20)
    for server in servers:
        server.shutdown()
        server.server_close()
    said = capsys.readouterr().out
    key = re.search(r"^export TINKER_API_KEY=(tml-\S+)$", said, re.MULTILINE)
    assert key is not None
    assert said.startswith(f"export TINKER_BASE_URL=http://127.0.0.1:{ports[0]}\n")
    assert said.endswith(f"base model: {model}\n")
    assert f"# page: http://127.0.0.1:{ports[0]}/ (log in with the key); headway status {learner.run.folder}\n" in said
    noted = noted_targets(learner.run.folder)
    assert [(each.kind, each.url) for each in noted] == [
        ("learner", f"http://127.0.0.1:{ports[0]}"), ("generator", f"http://127.0.0.1:{ports[1]}"),
    ]  # fmt: skip
    assert [each.token for each in noted] == [learner.http.token, found["generator"].http.token]
    assert TenantKeys.read(learner.tinker.keys_path(learner.run.folder)).tenant(key[1]) is not None


def test_nothing_is_told_while_one_is_not_ready(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        found = configs(plan(model, "--port", str(held.getsockname()[1])))
        with ServingNotice(found["learner"], [found["generator"]]):
            pass
    assert capsys.readouterr().out == ""


def test_keys_of_ones_own_are_named_by_their_file(model: Path, tmp_path: Path) -> None:
    found = configs(plan(model, "--learner.tinker.keys-file", str(tmp_path / "mine.json")))
    assert (
        f"export TINKER_API_KEY=tml-...  # one of {tmp_path / 'mine.json'}"
        in ServingNotice(found["learner"], []).text()
    )


def test_status_and_doctor_find_a_server_by_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tls = TlsFiles(ca=tmp_path / "ca.pem")
    targets = (
        Target("learner", f"http://127.0.0.1:{free_port()}", SecretStr("of the learner's")),
        Target("generator", "https://h:7310", SecretStr("of the generator's"), tls),
    )
    note_targets(tmp_path, targets)

    assert (tmp_path / "serve.json").stat().st_mode & 0o777 == 0o600
    assert noted_targets(tmp_path) == targets
    note_targets(tmp_path, targets[:1])
    for command in ("status", "doctor"):
        assert umbrella._run([command, str(tmp_path)]) == 1
        assert "dead" in capsys.readouterr().out


def test_a_folder_that_no_server_was_started_in_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a folder without serve\.json; expected a RUN\.toml, or the folder of a"):
        umbrella._run(["status", str(tmp_path)])
    note_targets(tmp_path, ())
    with pytest.raises(ConfigError, match=r"--before looks at a RUN\.toml"):
        umbrella._run(["doctor", str(tmp_path), "--before"])
    with pytest.raises(ConfigError, match=r"is a folder; options are for a RUN\.toml"):
        umbrella._run(["status", str(tmp_path), "--learner.max-lag", "1"])
