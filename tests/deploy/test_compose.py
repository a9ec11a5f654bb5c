"""The Compose file and its settings, as far as they can be judged without a container engine."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy/docker/Dockerfile"
PROCESSES = ("learner", "generator", "reward-service", "env-service")


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


def test_only_the_learners_pages_are_published_and_on_loopback_alone(services: dict[str, Any]) -> None:
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert published == {"learner": ["127.0.0.1:7300:7300"]}


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
        assert services[process]["depends_on"]["model"] == {"condition": "service_completed_successfully"}


def test_the_settings_of_the_containers_fit_together_with_the_keys_that_are_made(
    tmp_path: Path, services: dict[str, Any]
) -> None:
    """As the processes see them: keys beside the file, and a model."""
    headway = str(Path(sys.executable).with_name("headway"))
    made = services["keys"]["entrypoint"][-1].partition("|| ")[2].replace("headway", headway, 1)
    subprocess.run(["sh", "-c", made], cwd=tmp_path, check=True, timeout=60)
    config = tmp_path / "run.toml"
    config.write_text((ROOT / "deploy/docker/run.toml").read_text(encoding="utf-8"), encoding="utf-8")
    _make_model(tmp_path)

    checked = subprocess.run([headway, "check", "run.toml"], cwd=tmp_path, capture_output=True, text=True, timeout=120)

    assert (checked.returncode, checked.stderr) == (0, ""), checked.stdout


def test_what_the_containers_train_is_the_demo(services: dict[str, Any]) -> None:
    """Only addresses, keys and the resume are the containers' own."""
    ours = tomllib.loads((ROOT / "deploy/docker/run.toml").read_text(encoding="utf-8"))
    demo = tomllib.loads((ROOT / "examples/addition/run.toml").read_text(encoding="utf-8"))

    assert {name: ours[name] for name in demo if name == "run"} == {"run": demo["run"]}
    for process in PROCESSES:
        assert {key: ours[process].get(key) for key in demo[process]} == demo[process]


def test_a_health_check_asks_the_port_that_its_process_listens_on() -> None:
    text = DOCKERFILE.read_text(encoding="utf-8")
    config = tomllib.loads((ROOT / "deploy/docker/run.toml").read_text(encoding="utf-8"))
    usual = {"learner": 7300, "generator": 7310, "reward-service": 7320, "env-service": 7330}
    for process, port in usual.items():
        assert "port" not in config[process]["http"]
        assert f"ENV HEADWAY_HEALTH_PORT={port}\n" in text.partition(f" AS {process}\n")[2].partition("ENTRYPOINT")[0]


def test_what_the_small_images_install_is_what_the_project_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    printed = subprocess.run(
        [sys.executable, "deploy/docker/wanted.py", "env"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert printed.stdout.split() == [*project["dependencies"], *project["optional-dependencies"]["env"]]


def _make_model(folder: Path) -> None:
    """As much of a model as is read before a start."""
    model = folder / "models/addition"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 64, "vocab_size": 16}))
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"\0" * 16)
