from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr, TypeAdapter, ValidationError

from learner.algorithms.knobs import TeacherKnobs
from learner.algorithms.presets.registry import AlgorithmConfig
from learner.config import LearnerConfig
from learner.teachers.config import TeacherConfig, check_use, index_of, teacher_of
from services.config.models import load_config
from services.config.sources import ConfigError

URLS = ("http://127.0.0.1:1",)


def learner(*teachers: dict[str, Any], **settings: Any) -> LearnerConfig:
    return LearnerConfig.model_validate({"model": "m", "algo": {"type": "opd"}, "teachers": teachers, **settings})


def test_a_teacher_is_behind_urls_or_in_a_folder() -> None:
    assert TeacherConfig(name="t", urls=URLS).path is None
    assert TeacherConfig(name="t", path=Path("m")).urls == ()
    with pytest.raises(ValidationError, match="teacher t: set urls or path, or policy = true, got none"):
        TeacherConfig(name="t")
    with pytest.raises(ValidationError, match="teacher t: set urls or path, or policy = true, got urls and path"):
        TeacherConfig(name="t", urls=URLS, path=Path("m"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"path": "m", "privileged": True}, "is in a folder and privileged"),
        ({"policy": True, "privileged": False}, "would teach what it knows"),
        ({"policy": True, "token": "x"}, "weights.generator_token: remove token"),
        ({"policy": True, "urls": URLS}, "got urls and policy"),
        ({"average": 0.99, "urls": URLS}, "teacher t has an average, and is not the policy: set policy = true"),
        ({"policy": True, "average": 1.0}, "less than 1"),
        (
            {"policy": True, "average": 0.99, "wait_s": 1.0},
            "which the learner's ranks are asked for: wait_s has no effect",
        ),
    ],
)
def test_a_teacher_that_is_shown_more_is_asked_of_generators(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        TeacherConfig.model_validate({"name": "t", **given})


def test_a_setting_of_urls_is_refused_for_a_teacher_in_a_folder() -> None:
    with pytest.raises(ValidationError, match="teacher t is in a folder: token, wait_s has no effect"):
        TeacherConfig(name="t", path=Path("m"), wait_s=1.0, token=SecretStr("x"))


@pytest.mark.parametrize("url", ["127.0.0.1:1", "tcp://127.0.0.1:1", "http://"])
def test_an_address_is_that_of_a_generator(url: str) -> None:
    with pytest.raises(ValidationError, match="expected http://host:port"):
        TeacherConfig(name="t", urls=(url,))


def test_an_address_is_there_once() -> None:
    with pytest.raises(ValidationError, match="there twice"):
        TeacherConfig(name="t", urls=URLS * 2)


def test_a_token_may_lie_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("let-me-in\n")
    file.chmod(0o600)
    teacher = TeacherConfig.model_validate({"name": "t", "urls": URLS, "token_file": str(file)})
    assert teacher.token == SecretStr("let-me-in")
    with pytest.raises(ValidationError, match="set one of them"):
        TeacherConfig.model_validate({"name": "t", "urls": URLS, "token_file": str(file), "token": "x"})
    file.chmod(0o644)
    with pytest.raises(ValidationError, match="lets others use it"):
        TeacherConfig.model_validate({"name": "t", "urls": URLS, "token_file": str(file)})


def test_a_group_goes_to_the_teacher_that_names_its_environment_else_to_the_one_that_names_none() -> None:
    sums = TeacherConfig(name="sums", urls=URLS, environments=("addition", "subtraction"))
    rest = TeacherConfig(name="rest", urls=URLS)
    assert teacher_of((rest, sums), "addition") is sums
    assert teacher_of((rest, sums), "chess") is rest
    assert teacher_of((sums,), "chess") is None


def test_the_teacher_of_an_environment_has_its_place_in_the_list() -> None:
    sums = TeacherConfig(name="sums", path=Path("a"), environments=("addition",))
    rest = TeacherConfig(name="rest", path=Path("b"))
    assert (index_of((sums, rest), "addition"), index_of((rest, sums), "addition")) == (0, 1)
    assert (index_of((sums, rest), "chess"), index_of((rest, sums), "chess")) == (1, 0)
    remote = TeacherConfig(name="remote", urls=URLS, environments=("far",))
    assert [index_of((remote, sums, rest), name) for name in ("far", "addition", "chess")] == [-1, 0, 1]
    with pytest.raises(AssertionError, match="environment chess has no teacher"):
        index_of((sums,), "chess")


ADAPTER: TypeAdapter[AlgorithmConfig] = TypeAdapter(AlgorithmConfig)
REMOTE = TeacherConfig(name="remote", urls=URLS)
LOCAL = TeacherConfig(name="local", path=Path("m"), environments=("a",))
OTHER = TeacherConfig(name="other", path=Path("m"), environments=("b",))


def settings(algo: str) -> AlgorithmConfig:
    """The settings of an algorithm, with the weight of a teacher in `NAME by WEIGHT`."""
    name, _, weight = algo.partition(" by ")
    given = {"path": "mine:algorithm"} if name == "custom" else {}
    return ADAPTER.validate_python({"type": name, **given, **({"teacher_weight": float(weight)} if weight else {})})


def check(teachers: tuple[TeacherConfig, ...], algo: AlgorithmConfig) -> None:
    """As the learner's config does it."""
    check_use(
        teachers,
        algo=algo.type,
        asks=algo.uses_teacher,
        weighed=isinstance(algo, TeacherKnobs),
        from_files=algo.learns_from_files,
    )


@pytest.mark.parametrize(
    ("algo", "teachers"),
    [
        ("grpo", ()), ("grpo by 0.5", (REMOTE,)), ("remax by 0.5", (REMOTE, LOCAL)),
        ("opd", (REMOTE,)), ("opd", (LOCAL, OTHER)), ("opd", (REMOTE, LOCAL)), ("distill", ()),
        ("distill", (LOCAL,)), ("custom", ()), ("custom", (REMOTE, LOCAL)),
    ],
)  # fmt: skip
def test_teachers_that_the_algorithm_can_use_are_let_through(algo: str, teachers: tuple[TeacherConfig, ...]) -> None:
    check(teachers, settings(algo))


@pytest.mark.parametrize(
    ("algo", "teachers", "said"),
    [
        ("grpo", (LOCAL,), "algo grpo asks none: remove them, or set algo.teacher_weight"),
        ("grpo by 0.5", (), "algo grpo with teacher_weight needs a teacher, and none is set"),
        ("online_dpo", (LOCAL,), "algo online_dpo asks none: remove them, or use opd or distill"),
        ("sft", (REMOTE,), "algo sft asks none"),
        ("opd", (), "algo opd needs a teacher, and none is set"),
        ("distill", (REMOTE,), "set that one alone"),
        ("distill", (LOCAL, OTHER), "set that one alone"),
    ],
)
def test_teachers_that_the_algorithm_cannot_use_are_refused(
    algo: str, teachers: tuple[TeacherConfig, ...], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        check(teachers, settings(algo))


def test_teachers_that_cannot_be_told_apart_are_refused() -> None:
    one = {"name": "one", "urls": URLS, "environments": ["a", "b"]}
    with pytest.raises(ValidationError, match="the environment b is there twice"):
        learner(one, {"name": "two", "urls": URLS, "environments": ["b"]})
    with pytest.raises(ValidationError, match="the name one is there twice"):
        learner(one, {"name": "one", "urls": URLS, "environments": ["c"]})
    with pytest.raises(ValidationError, match="two and three name no environments"):
        learner(one, {"name": "two", "urls": URLS}, {"name": "three", "urls": URLS})


def test_an_average_of_the_policy_is_asked_of_ranks_that_hold_it_whole_and_there_is_one() -> None:
    average = {"name": "slow", "policy": True, "average": 0.99, "environments": ["a"]}
    warm = learner(
        average, training={"temperature": 0.7}, algo={"type": "opd", "divergence": "jsd", "teacher_tokens": 500}
    )
    assert (warm.teachers[0].is_remote, warm.teachers[0].sees_more) == (False, True)
    assert index_of(warm.teachers, "a") == -1
    with pytest.raises(
        ValidationError, match=r"teachers: slow has an average, and training.zero_stage is 3: .* 2 or less"
    ):
        learner(average, training={"zero_stage": 3})
    with pytest.raises(ValidationError, match="slow and slower have an average each, and the learner holds one"):
        learner(average, {"name": "slower", "policy": True, "average": 0.999})
    with pytest.raises(ValidationError, match="set that one alone"):
        learner(average, algo={"type": "distill"}, data={"path": "d"})


def test_a_teacher_behind_a_url_wants_temperature_1_and_one_in_a_folder_takes_any() -> None:
    warm = {"algo": {"type": "opd"}, "training": {"temperature": 0.7}}
    with pytest.raises(ValidationError, match=r"one is asked of generators.* training.temperature is 0.7: set it to 1"):
        learner({"name": "one", "urls": URLS}, **warm)
    assert learner({"name": "one", "path": "m"}, **warm).teachers[0].path == Path("m")
    assert learner({"name": "one", "urls": URLS}, algo={"type": "opd"}).teachers[0].urls == URLS


def test_teachers_are_tables_of_a_run_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        """
[learner]
model = "m"
algo = "opd"

[[learner.teachers]]
name = "sums"
urls = ["http://127.0.0.1:7311", "http://127.0.0.1:7312"]
environments = ["addition"]

[[learner.teachers]]
name = "rest"
urls = ["http://127.0.0.1:7313"]
"""
    )
    config = load_config(LearnerConfig, process="learner", argv=["--config", str(file)], environ={})
    assert [(one.name, one.urls, one.path, one.environments) for one in config.teachers] == [
        ("sums", ("http://127.0.0.1:7311", "http://127.0.0.1:7312"), None, ("addition",)),
        ("rest", ("http://127.0.0.1:7313",), None, ()),
    ]


def test_a_wrong_teacher_in_a_run_file_is_named_with_its_place_and_without_its_token(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    teacher = '[[learner.teachers]]\nname = "t"\ntoken = "s3cret"\nurls = ["127.0.0.1"]\n'
    table = f'[learner]\nmodel = "m"\nalgo = "opd"\n{teacher}'
    file.write_text(table)
    with pytest.raises(ConfigError, match=r"run.toml \[\[learner.teachers.*expected http://host:port") as error:
        load_config(LearnerConfig, process="learner", argv=["--config", str(file)], environ={})
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize(
    ("algo", "max_tokens", "said"),
    [
        ({"type": "opd", "divergence": "forward_kl", "teacher_tokens": 129}, 64, "at most 128 tokens a place"),
        ({"type": "grpo", "teacher_weight": 0.5, "teacher_tokens": 129}, 64, "at most 128 tokens a place"),
        ({"type": "opd", "divergence": "forward_kl"}, 16385, "so that a text may have 16384; lower one of them"),
        ({"type": "opd"}, 16385, ""),
    ],
)
def test_no_more_likeliest_tokens_are_asked_for_than_a_generator_gives(
    algo: dict[str, Any], max_tokens: int, said: str
) -> None:
    given = {"algo": algo, "rollouts": {"max_tokens": max_tokens}}
    assert learner({"name": "t", "path": "m"}, **given)
    if said:
        with pytest.raises(ValidationError, match=said):
            learner({"name": "t", "urls": URLS}, **given)
    else:
        assert learner({"name": "t", "urls": URLS}, **given).teacher_top == 0
