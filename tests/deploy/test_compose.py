"""The Compose file and its settings, as far as they can be judged without a container engine."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer, models

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy/docker/Dockerfile"
PROCESSES = ("learner", "generator", "reward-service", "env-service")
PORTS = {"learner": 7300, "generator": 7310, "reward-service": 7320, "env-service": 7330}
GPU_OPTIONS = ("--learner.devices", "0", "--generator.devices", "0", "--generator.engine.gpu-memory-fraction", "0.4")


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    read = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    assert isinstance(read, dict)
    return read


def test_every_container_is_unprivileged_and_cannot_write_but_to_its_volumes(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges" in service["security_opt"], name
        assert "privileged" not in service, name
    assert "USER 10001:10001" in DOCKERFILE.read_text(encoding="utf-8")


def test_only_pages_are_published_and_on_loopback_alone(services: dict[str, Any]) -> None:
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    learner = ["127.0.0.1:${HEADWAY_PORT:-7300}:7300"]
    assert published == {
        "learner": learner,
        "prometheus": ["127.0.0.1:${PROMETHEUS_PORT:-9090}:9090"],
        "grafana": ["127.0.0.1:${GRAFANA_PORT:-3000}:3000"],
    }


def test_what_is_scraped_is_what_the_processes_serve() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text(encoding="utf-8"))
    scraped = {job["job_name"]: job["dns_sd_configs"][0] for job in config["scrape_configs"]}
    assert {name: one["port"] for name, one in scraped.items()} == PORTS
    assert all(one["names"] == [name] for name, one in scraped.items())


def test_each_process_has_a_target_of_its_own_that_starts_it(services: dict[str, Any]) -> None:
    stages = DOCKERFILE.read_text(encoding="utf-8").split("\nFROM ")
    for process in PROCESSES:
        assert services[process]["build"]["target"] == process
        (stage,) = (stage for stage in stages if stage.splitlines()[0].endswith(f" AS {process}"))
        assert f'ENTRYPOINT ["{process}"]' in stage


def test_containers_start_in_order_and_are_started_again(services: dict[str, Any]) -> None:
    for process in PROCESSES:
        assert services[process]["restart"] == "on-failure"
        assert services[process]["depends_on"]["keys"] == {"condition": "service_completed_successfully"}
    for process in ("learner", "generator", "env-service"):
        assert services[process]["depends_on"]["model"]["condition"] == "service_completed_successfully"


def _make_keys(folder: Path) -> Path:
    """Runs the script of the service `keys`, on folders for volumes."""
    for process in PROCESSES:
        (folder / "keys" / process).mkdir(parents=True, exist_ok=True)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    script = str(ROOT / "deploy/docker/make-keys.sh")
    subprocess.run(["sh", script], cwd=folder, check=True, timeout=120, env={**os.environ, "PATH": path})
    return folder / "keys"


def _named(settings: object) -> set[str]:
    """The files of keys that a table of the run file names."""
    if isinstance(settings, dict):
        return set().union(*map(_named, settings.values()))
    return {settings} if isinstance(settings, str) and settings.startswith("keys/") else set()


@pytest.mark.parametrize("file", ["run", "smollm2"])
def test_a_process_has_the_keys_that_its_settings_name_and_no_others(tmp_path: Path, file: str) -> None:
    keys = _make_keys(tmp_path)
    config = tomllib.loads((ROOT / f"deploy/docker/{file}.toml").read_text(encoding="utf-8"))
    for process in PROCESSES:
        its_own = {f"keys/{path.name}" for path in (keys / process).iterdir()} - {"keys/.complete"}
        assert its_own == _named(config[process]), process
    before = (keys / "learner/learner.key").read_text()
    _make_keys(tmp_path)
    assert (keys / "learner/learner.key").read_text() == before, "made once"


def test_only_the_learner_sees_the_run_and_each_process_its_own_keys(services: dict[str, Any]) -> None:
    for name, service in services.items():
        mounted = {source: target for source, target, *_ in (one.split(":") for one in service.get("volumes", ()))}
        assert ("runs" in mounted) == (name in ("learner", "model")), name
        if name in PROCESSES:
            assert {source for source in mounted if source.startswith("keys")} == {f"keys-{name}"}, name
            assert mounted[f"keys-{name}"] == "/headway/keys"
        elif name == "keys":
            assert {f"keys-{each}": f"/headway/keys/{each}" for each in PROCESSES}.items() <= mounted.items()


@pytest.mark.parametrize(("file", "options"), [("run", ()), ("smollm2", ()), ("run", GPU_OPTIONS), ("tinker", ())])
def test_the_settings_of_the_containers_fit_together_with_the_keys_that_are_made(
    tmp_path: Path, file: str, options: tuple[str, ...]
) -> None:
    """As the processes see them: keys beside the file, and a model."""
    keys = _make_keys(tmp_path)
    for process in PROCESSES:
        shutil.copytree(keys / process, keys, dirs_exist_ok=True)
    text = (ROOT / f"deploy/docker/{file}.toml").read_text(encoding="utf-8")
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    _make_model(tmp_path / tomllib.loads(text)["learner"]["model"])

    command = [str(Path(sys.executable).with_name("headway")), "check", "run.toml", "--elsewhere", *options]
    seen = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"} if options else None
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, env=seen)

    assert (checked.returncode, checked.stderr) == (0, ""), checked.stdout


@pytest.mark.parametrize(("file", "example"), [("run", "addition"), ("smollm2", "smollm2")])
def test_what_the_containers_train_is_the_example(file: str, example: str) -> None:
    """Only addresses, keys and the resume are the containers' own."""
    ours = tomllib.loads((ROOT / f"deploy/docker/{file}.toml").read_text(encoding="utf-8"))
    demo = tomllib.loads((ROOT / f"examples/{example}/run.toml").read_text(encoding="utf-8"))

    assert ours["run"] == demo["run"]
    added = {"http", "leases", "weights", "join", "resume", "learner", "secret_key_file", "learner_key_file"}
    added |= {"reward_urls", "generator_token_file", "reward_token_file"}
    for process in PROCESSES:
        assert {key: ours[process][key] for key in demo[process] if key != "leases"} == {
            key: value for key, value in demo[process].items() if key != "leases"
        }
        assert ours[process].get("leases", {}).items() >= demo[process].get("leases", {}).items()
        assert ours[process].keys() - demo[process].keys() <= added


def test_a_health_check_asks_the_port_that_its_process_listens_on() -> None:
    text = DOCKERFILE.read_text(encoding="utf-8")
    config = tomllib.loads((ROOT / "deploy/docker/run.toml").read_text(encoding="utf-8"))
    stages = text.split("\nFROM ")
    for process, port in PORTS.items():
        (stage,) = (stage for stage in stages if stage.splitlines()[0].endswith(f" AS {process}"))
        assert "port" not in config[process]["http"]
        assert f"ENV HEADWAY_HEALTH_PORT={port}\n" in stage


def test_what_the_small_images_install_is_what_the_project_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    printed = subprocess.run(
        [sys.executable, "deploy/docker/wanted.py", "env"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert printed.stdout.split() == [*project["dependencies"], *project["optional-dependencies"]["env"]]


CLIENT = """\
#!/bin/sh
case "$*" in
  version*) echo linux/amd64;;
  *own) echo '[{"Os": "linux", "Architecture": "amd64"}]';;
  *another) echo '[{"Os": "linux", "Architecture": "arm64"}]';;
  *) echo "Error: No such image: $3" >&2; exit 1;;
esac
"""


@pytest.mark.parametrize(
    ("images", "code", "said"),
    [
        (["own"], 0, "1 images are for linux/amd64, as this engine is"),
        (["own", "another"], 1, "another is for linux/arm64, and this engine runs linux/amd64: "),
        (["missing"], 1, "missing is not here (Error: No such image: missing): make images, or docker compose build"),
    ],
)
def test_an_image_that_cannot_run_here_is_named_with_what_to_do(
    tmp_path: Path, images: list[str], code: int, said: str
) -> None:
    """By what a client answers; tests/deploy/test_compose_run.py asks a real one."""
    client = tmp_path / "client"
    client.write_text(CLIENT)
    client.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "deploy/docker/platforms.py", *images],
        cwd=ROOT, capture_output=True, text=True, timeout=60, env={**os.environ, "DOCKER": str(client)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout.startswith(said)


def test_a_missing_engine_is_said_and_is_no_complaint_about_an_image() -> None:
    done = subprocess.run(
        [sys.executable, "deploy/docker/platforms.py", "x"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, env={**os.environ, "DOCKER": "/nowhere/docker"},
    )  # fmt: skip
    assert done.returncode == 3
    assert done.stderr.startswith("no container engine answers: ")


def _make_model(model: Path) -> None:
    """As much of a model as is read before a start."""
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 256, "vocab_size": 16}))
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "1": 1, "<eos>": 2}, unk_token="<unk>"))
    tokenizer.save(str(model / "tokenizer.json"))
    words = {"chat_template": "{{ messages[0].content }}", "eos_token": "<eos>"}
    (model / "tokenizer_config.json").write_text(json.dumps(words))
    (model / "model.safetensors").write_bytes(b"\0" * 16)
