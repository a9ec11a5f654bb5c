"""Assignment of GPUs to processes, found without any."""

from pathlib import Path

import pytest

from services.config.devices import (
    Need,
    is_worth_threads,
    shared_out,
    use_devices,
    visible,
)
from services.config.sources import ConfigError

LEARNER = Need("learner", 2, collective="nccl")
GENERATOR = Need("generator", 1, collective="nccl")


@pytest.mark.parametrize(
    ("given", "seen"),
    [("2,3", ["2", "3"]), ("", []), ("-1", []), ("0,-1,1", ["0"]), ("GPU-a, GPU-b", ["GPU-a", "GPU-b"])],
)
def test_what_is_visible_is_read_as_cuda_reads_it(given: str, seen: list[str]) -> None:
    assert visible({"CUDA_VISIBLE_DEVICES": given}) == seen


def test_without_the_variable_all_of_the_drivers_gpus_are_visible(tmp_path: Path) -> None:
    assert visible({}, driver=tmp_path / "none") == []
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    assert visible({}, driver=tmp_path) == ["0", "1"]


def test_each_process_gets_gpus_of_its_own_among_those_that_are_visible() -> None:
    given = shared_out([LEARNER, GENERATOR, Need("reward-service", 0)], seen=["4", "5", "6", "7"])
    assert given == {"learner": ["4", "5"], "generator": ["6"]}


def test_what_a_process_names_is_its_own_and_the_others_get_the_rest() -> None:
    named = Need("generator", 1, devices=(0,), collective="nccl")
    assert shared_out([LEARNER, named], seen=["0", "1", "2"]) == {"generator": ["0"], "learner": ["1", "2"]}


def test_too_few_are_an_error_that_counts_them() -> None:
    with pytest.raises(ConfigError) as error:
        shared_out([LEARNER, GENERATOR], seen=["0", "1"])
    assert "3 GPUs are wanted (learner 2, generator 1), and 2 are there" in error.value.problems[0]
    with pytest.raises(ConfigError, match="this process sees 2 GPUs"):
        shared_out([Need("learner", 1, devices=(2,))], seen=["0", "1"])


def test_one_gpu_is_shared_over_gloo_and_refused_over_nccl() -> None:
    learner, generator = Need("learner", 1, collective="gloo"), Need("generator", 1, collective="gloo")
    assert shared_out([learner, generator], seen=["0"]) == {"learner": ["0"], "generator": ["0"]}
    both = [Need(name, 1, devices=(0,), collective="nccl") for name in ("learner", "generator")]
    with pytest.raises(ConfigError, match="both on GPU 0, and NCCL refuses"):
        shared_out(both, seen=["0", "1"])


def test_without_gpus_nothing_is_shared_out_and_a_named_one_is_an_error() -> None:
    assert shared_out([LEARNER, GENERATOR], seen=[]) == {}
    with pytest.raises(ConfigError, match="sees 0 GPUs"):
        shared_out([Need("learner", 1, devices=(0,))], seen=[])


def test_a_process_by_itself_sees_only_the_devices_that_its_config_names() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "4,5,6"}
    use_devices((), process="learner", environ=environ)
    assert environ["CUDA_VISIBLE_DEVICES"] == "4,5,6"
    use_devices((2, 0), process="learner", environ=environ)
    assert environ["CUDA_VISIBLE_DEVICES"] == "6,4"
    use_devices((2, 0), process="learner", environ=environ)
    assert environ["CUDA_VISIBLE_DEVICES"] == "6,4", "another rank has them from the first"


def _model(folder: Path, width: int) -> Path:
    (folder / "config.json").write_text(f'{{"hidden_size": {width}}}')
    return folder


@pytest.mark.parametrize(("width", "worth_it"), [(128, False), (576, True)])
def test_threads_are_for_wide_models(tmp_path: Path, width: int, worth_it: bool) -> None:
    assert is_worth_threads(_model(tmp_path, width)) is worth_it
    assert not is_worth_threads(tmp_path / "elsewhere")
