"""Findings on a machine before a start."""

import errno
import json
import os
import resource
import socket
import struct
from pathlib import Path
from typing import Annotated

import pytest

from headway.doctor import before
from headway.doctor.before import (
    Level,
    _check_reachable,
    check_disk,
    check_key,
    check_memory,
    check_model,
    check_open_files,
    check_port,
    check_releases,
    check_shared_memory,
    examine,
)
from headway.memory_table import memory_table
from learner.config import LearnerConfig
from services.config.agreements import FieldPlace, Listens, ModelFolder, Reaches, disagreements, listened_on, places_of
from services.config.models import HttpConfig, ProcessConfig, RunConfig
from services.model_folder import model_bytes


class LearnerLike(ProcessConfig):
    """A config with the marks that the checks go by."""

    http: HttpConfig
    address: Annotated[str, Listens()]
    model: Annotated[Path, ModelFolder(("model",))]
    peer: Annotated[str, Reaches("generator")]
    key_file: Path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    (folder / "model.safetensors").write_bytes(b"x" * 1000)
    return folder


def test_cores_are_those_that_the_container_gives(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    """Two ranks have room on 2.5 cores, three have not, however many the machine has."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("services.cores.enclosing_groups", lambda controller, process: [Path()])
    monkeypatch.setattr("services.cores._quota", lambda group: 2.5)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    for ranks, problems in ((2, 0), (3, 1)):
        config = LearnerConfig.model_validate(
            {"run": {"name": "r"}, "model": str(model), "steps": 1, "ranks": ranks, "weights": {"backend": "gloo"}}
        )
        found = list(before.device_problems({"learner": config}))
        assert len(found) == problems, found
    assert "which there are 2.5 here, by the affinity and the container's quota: lower it to 2 at most" in found[0]


def test_a_port_that_is_taken_is_an_error_that_names_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        taken = check_port("[learner] http", "127.0.0.1", port)
    free = check_port("[learner] http", "127.0.0.1", port)
    assert (taken.level, free.level) == (Level.ERROR, Level.OK)
    assert "Address already in use; process" in taken.found
    assert taken.remedy.startswith("end process ")


def test_an_address_of_another_machine_is_doubtful() -> None:
    assert check_port("[learner] http", "192.0.2.1", 7300).level is Level.WARNING


def test_a_disk_is_judged_where_the_folder_will_be(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "new"
    assert check_disk("disk", folder, need_bytes=1).level is Level.OK
    assert check_disk("disk", folder, need_bytes=1 << 60).level is Level.ERROR
    assert not folder.exists()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Replaces the kernel's refusal: root may write anywhere, so that permissions do not bring it in every test."""

    def refused(**_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    found = check_disk("disk of the run", tmp_path / "runs", need_bytes=1)
    assert found.level is Level.ERROR
    assert f"cannot write to {tmp_path}: {os.strerror(code)}" in found.found


def test_shared_memory_that_is_not_there_is_doubtful(tmp_path: Path) -> None:
    assert check_shared_memory(tmp_path / "gone").level is Level.WARNING
    assert check_shared_memory(tmp_path).level is Level.OK


def test_memory_is_the_sum_of_what_all_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(before, "available_memory", lambda: 4 << 30)
    assert check_memory({"learner": 2 << 30, "generator": 1 << 30}).level is Level.OK
    tight = check_memory({"learner": 3 << 30, "generator": 2 << 30})
    assert tight.level is Level.WARNING
    assert tight.found == "4.0 GiB available, need about 5.0 GiB: learner 3.0 GiB, generator 2.0 GiB"


def test_memory_is_tabled_by_the_rule_that_examines_a_start(tmp_path: Path) -> None:
    header, _, row = memory_table(["1.5B"]).splitlines()
    cells = dict(zip(header.strip("| ").split(" | "), row.strip("| ").split(" | "), strict=True))
    model = tmp_path / "model.safetensors"
    with model.open("wb") as file:
        file.truncate(3 * 10**9)
    counted = 1 + 10 * model_bytes(tmp_path) / 2**30
    assert float(cells["learner"]) == pytest.approx(counted, abs=0.1)


@pytest.mark.parametrize("size", ["7", "B", "xB", "-1B", "0M", "nanB", ""])
def test_a_size_that_is_none_is_refused(size: str) -> None:
    with pytest.raises(ValueError, match=r"--memory: got '.*': expected numbers of parameters such as 135M"):
        memory_table([size])


def test_the_limit_of_open_files_is_told() -> None:
    assert str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]) in check_open_files().found


def test_releases_are_compared_with_the_lock_file(tmp_path: Path) -> None:
    lock = tmp_path / "cpu.lock"
    lock.write_text("pydantic==0.0.1 \\\n    --hash=x\nnothing==1\n")
    found = {finding.what: finding for finding in check_releases(("pydantic", "aiohttp", "not-there"), lock)}
    assert found["pydantic"].level is Level.WARNING
    assert found["pydantic"].found.endswith("the lock file has 0.0.1")
    assert found["aiohttp"].level is Level.OK
    assert "not-there" not in found


@pytest.mark.parametrize(
    ("name", "text", "missing"),
    [
        ("config.json", None, "config.json"),
        ("tokenizer.json", None, "tokenizer.json"),
        ("model.safetensors", None, "model.safetensors"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}',
            "1.safetensors",
        ),
        ("model.safetensors.index.json", "not JSON", "a readable model.safetensors.index.json"),
    ],
)
def test_an_incomplete_model_folder_is_an_error(model: Path, name: str, text: str | None, missing: str) -> None:
    assert check_model("[learner] model", model).level is Level.OK
    if text is None:
        (model / name).unlink()
    else:
        (model / name).write_text(text)
    finding = check_model("[learner] model", model)
    assert finding.level is Level.ERROR
    assert f"lacks {missing}" in finding.found


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_keys_must_be_there_and_secret(tmp_path: Path, mode: int) -> None:
    key = tmp_path / "learner.key"
    assert check_key("keys", key).level is Level.ERROR
    key.write_text("x")
    key.chmod(mode)
    assert check_key("keys", key).level is Level.OK, "a public one"
    found = check_key("keys", key, is_secret=True)
    assert (found.level, found.remedy) == (Level.ERROR, f"chmod 600 {key}")
    assert f"its mode {mode:04o} lets others use it" in found.found
    key.chmod(0o600)
    assert check_key("keys", key, is_secret=True).level is Level.OK
    assert check_key("keys", tmp_path).level is Level.OK


async def test_a_secret_that_its_process_refuses_is_an_error_before_the_start(tmp_path: Path, model: Path) -> None:
    keys = {name: tmp_path / name for name in ("learner.key", "tls.key", "tls.pem")}
    for path in keys.values():
        path.write_text("x")
        path.chmod(0o640)
    (tmp_path / "authorized").mkdir()
    learner = LearnerConfig.model_validate(
        {
            "model": model,
            "run": {"directory": tmp_path},
            "http": {"port": 0, "tls_key_file": keys["tls.key"], "tls_cert_file": keys["tls.pem"]},
            "leases": {"secret_key_file": keys["learner.key"], "authorized_keys": tmp_path / "authorized"},
        }
    )
    found = {finding.what: finding.level for finding in await examine({"learner": learner})}
    assert found["[learner] leases.secret_key_file"] is Level.ERROR
    assert found["[learner] http.tls_key_file"] is Level.ERROR


def test_disk_and_memory_are_for_what_is_trained(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    shapes = {
        "model.embed_tokens.weight": [50, 10],
        "model.layers.0.self_attn.q_proj.weight": [10, 10],
        "model.layers.0.mlp.down_proj.weight": [10, 30],
        "model.layers.0.mlp.experts.down_proj": [4, 10, 30],
        "model.norm.weight": [10],
        "lm_head.weight": [50, 10],
    }
    head = json.dumps({"__metadata__": {}} | {name: {"dtype": "F32", "shape": each} for name, each in shapes.items()})
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head.encode() + bytes(4 * 2610))

    def needs(**settings: object) -> tuple[int, int]:
        configs = {"learner": LearnerConfig.model_validate({"model": model, **settings})}
        places = places_of(configs)
        memory = before._memory_needs(configs, places)["learner"] - before.BARE_BYTES["learner"]
        return before._disk_need(configs, places) - (256 << 20), memory

    # 500 + 100 + 300 + 1200 + 10 + 500 parameters; two newest checkpoints, the best, and one that is being written.
    size = (model / "model.safetensors").stat().st_size
    assert needs() == (12 * 2610 * 4, 10 * size)
    assert needs(evaluation={"tasks": 0}) == (12 * 2610 * 3, 10 * size)
    # Rank 2: 2 * (10 + 10), 2 * (10 + 30), and that for each of 4 experts.
    lora = {"lora": {"rank": 2}}
    assert needs(training=lora) == (12 * 440 * 4, 8 * 2610 + 16 * 440)
    assert needs(training={"lora": {"rank": 2, "targets": ["q_proj"]}}) == (12 * 40 * 4, 8 * 2610 + 16 * 40)
    assert needs(evaluation={"only": True})[0] == 0


def at(process: str, key: str, value: object, *marks: object) -> FieldPlace:
    return FieldPlace(process, key, value, marks)


def test_a_port_of_its_own_is_looked_at_where_its_group_says() -> None:
    def listened(host: str, port: int) -> list[tuple[str, str, int]]:
        places = [at("learner", "weights.host", host), at("learner", "weights.port", port, Listens())]
        return list(listened_on(places))

    assert listened("auto", 7302) == [("[learner] weights.port", "0.0.0.0", 7302)]
    assert listened("10.0.0.1", 7302) == [("[learner] weights.port", "10.0.0.1", 7302)]
    assert listened("auto", 0) == []


@pytest.mark.parametrize(
    ("settings", "listening"),
    [
        pytest.param({}, {"http", "leases.address", "weights.port"}, id="online"),
        pytest.param({"algo": {"type": "sft"}, "data": {"path": "d"}}, {"http"}, id="from a file"),
        pytest.param(
            {"tinker": {"enabled": True}, "http": {"port": 7300, "token": "0" * 16}}, {"http"}, id="for clients"
        ),
    ],
)
def test_a_learner_that_trains_no_run_online_listens_for_no_peers_of_one(
    settings: dict[str, object], listening: set[str]
) -> None:
    # A run beside it may have these ports.
    learner = LearnerConfig.model_validate({"model": "m", "weights": {"port": 7309}, **settings})
    found = listened_on(places_of({"learner": learner}))
    assert {what.removeprefix("[learner] ") for what, _, _ in found} == listening


def test_the_learners_own_port_for_weights_is_among_them() -> None:
    learner = LearnerConfig.model_validate({"model": "m", "weights": {"port": 7301}})
    assert ("[learner] weights.port", "0.0.0.0", 7301) in list(listened_on(places_of({"learner": learner})))
    assert any(
        problem == "[learner] leases.address and [learner] weights.port both listen on port 7301: give each its own"
        for problem in disagreements({"learner": learner})
    )


async def test_a_generator_asks_whether_it_gets_through_to_the_port_for_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A refusal came through a firewall; silence did not."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        places = [
            at("learner", "weights.port", port),
            at("generator", "join.learner", "http://127.0.0.1:7300"),
        ]
        assert await _check_reachable(places) == [], "it is this machine's own"
        monkeypatch.setattr(before, "is_here", lambda host: False)
        (heard,) = await _check_reachable(places)
    (refused,) = await _check_reachable(places)

    assert (heard.level, heard.what) == (Level.OK, "[learner] weights.port")
    assert (refused.level, refused.found) == (
        Level.OK,
        f"tcp://127.0.0.1:{port} lets us through; nobody listens there yet",
    )


async def test_everything_that_a_config_names_is_looked_at(tmp_path: Path, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = LearnerLike(
            run=RunConfig(directory=tmp_path),
            http=HttpConfig(port=listener.getsockname()[1]),
            address="tcp://127.0.0.1:1",
            model=model,
            peer="http://no-such-host.invalid:7310",
            key_file=tmp_path / "gone",
        )
        found = {finding.what: finding.level for finding in await examine({"learner": config})}
    assert found["[learner] http"] is Level.ERROR
    assert found["[learner] peer"] is Level.ERROR
    assert found["[learner] key_file"] is Level.ERROR
    assert found["[learner] model"] is Level.OK
    assert {"settings", "disk of the run", "memory", "open files", "shared memory", "Python"} <= found.keys()
