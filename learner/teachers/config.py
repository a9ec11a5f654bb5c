"""The settings of teachers. Loads no torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from protocol.generation import MAX_SCORED_TOKENS, MAX_TOP_LOGPROBS
from services.config.models import ConfigModel
from services.network import is_http_address
from services.rotating_secrets import RotatingSecret

_OF_URLS = ("token", "wait_s", "request_timeout_s", "requests_at_once", "request_tokens", "max_model_len")


class TeacherConfig(ConfigModel):
    """An entry of `learner.teachers`: behind the addresses of generators that serve it, in a folder, or the policy."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] = Field(description="for messages")
    urls: tuple[str, ...] = Field(
        (), description="addresses of generators that serve this teacher, each the same weights; some may be absent"
    )
    path: Path | None = Field(None, description="Hugging Face directory, for a teacher that the learner loads itself")
    policy: bool = Field(
        False,
        description="the teacher is the policy that is trained, as the run's generators serve it at the moment, shown "
        "privileged text",
    )
    average: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="with policy = true: the teacher is a moving average of the policy's versions, which the learner "
        "holds and asks itself; this is the average's own part in the next one, after each step, such as 0.99. "
        "None: it is the policy as generators serve it",
    )
    privileged: bool = Field(
        False,
        description="the teacher is shown the prompt with the `teacher_hint` of its environment in it, which the "
        "policy does not see; the policy as its own teacher always is",
    )
    environments: tuple[str, ...] = Field(
        (), description="whose trajectories it teaches; empty for every environment that no other teacher names"
    )
    token: SecretStr | None = Field(None, description="bearer token of the generators; or token_file, that holds it")
    same_tokenizer: bool = Field(
        True, description="refuse a teacher whose tokenizer is not the learner's: its logprobs would be of other text"
    )
    wait_s: float = Field(
        600.0,
        gt=0,
        description="the run ends once a step has waited so many seconds without any answer of this teacher",
    )
    request_timeout_s: float = Field(120.0, gt=0, description="longest time of one request, in seconds")
    requests_at_once: int = Field(
        4,
        ge=1,
        le=256,
        description="requests under way at each of its addresses; of the policy, at all of its generators together",
    )
    request_tokens: int = Field(
        65536, ge=2, le=MAX_SCORED_TOKENS, description="most tokens in one request; a longer trajectory has its own"
    )
    max_model_len: int | None = Field(
        None,
        ge=2,
        description="engine.max_model_len of its generators: a group with a longer text fails as data; of the policy "
        "the learner knows it, of others only once a text has been refused, whose group is then in its step untrained",
    )

    @model_validator(mode="before")
    @classmethod
    def _token_from_its_file(cls, given: object) -> object:
        if not isinstance(given, dict) or "token_file" not in given:
            return given
        if given.get("token") is not None:
            raise ValueError("token and token_file are both set; set one of them")
        rest = {key: value for key, value in given.items() if key != "token_file"}
        return {**rest, "token": RotatingSecret(Path(str(given["token_file"])))}

    @field_validator("urls")
    @classmethod
    def _addresses(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if not is_http_address(url):
                raise ValueError(f"{url!r} is no address: expected http://host:port of a generator")
        if len(set(urls)) < len(urls):
            raise ValueError("an address is there twice: leave one out")
        return urls

    @model_validator(mode="after")
    def _in_one_place(self) -> Self:
        given = [name for name in ("urls", "path", "policy") if getattr(self, name)]
        if len(given) != 1:
            got = " and ".join(given) or "none of them"
            raise ValueError(f"teacher {self.name}: set urls or path, or policy = true, got {got}")
        if self.path is not None and self.privileged:
            raise ValueError(
                f"teacher {self.name} is in a folder and privileged: the ranks show it what the policy sees; serve it "
                "by a generator (urls), or leave privileged out"
            )
        if self.policy and self.token is not None:
            raise ValueError(
                f"teacher {self.name} is the policy, whose generators have weights.generator_token: remove token"
            )
        if self.policy and "privileged" in self.model_fields_set and not self.privileged:
            raise ValueError(
                f"teacher {self.name} is the policy and privileged is false: it would teach what it knows; remove "
                "privileged"
            )
        if self.average is not None and not self.policy:
            raise ValueError(
                f"teacher {self.name} has an average, and is not the policy: set policy = true, or remove average"
            )
        useless = [] if self.is_remote else sorted(self.model_fields_set.intersection(_OF_URLS))
        if useless:
            where = "in a folder" if self.path is not None else "an average, which the learner's ranks are asked for"
            raise ValueError(f"teacher {self.name} is {where}: {', '.join(useless)} has no effect; remove it")
        return self

    @property
    def is_remote(self) -> bool:
        """True if generators are asked."""
        return self.path is None and self.average is None

    @property
    def sees_more(self) -> bool:
        """True if it is shown privileged text."""
        return self.privileged or self.policy


def teacher_of(teachers: Sequence[TeacherConfig], environment: str) -> TeacherConfig | None:
    """The teacher that names `environment`, else the one that names none."""
    named = [teacher for teacher in teachers if environment in teacher.environments]
    others = [teacher for teacher in teachers if not teacher.environments]
    return next(iter([*named, *others]), None)


def index_of(teachers: Sequence[TeacherConfig], environment: str) -> int:
    """The index of the teacher, among the `teachers` in folders alone, that teaches `environment`: -1 if its teacher is
    behind a URL.

    It must have one.
    """
    teacher = teacher_of(teachers, environment)
    assert teacher is not None, f"environment {environment} has no teacher"
    return -1 if teacher.path is None else [one for one in teachers if one.path is not None].index(teacher)


def check_teachers(teachers: Sequence[TeacherConfig], *, temperature: float) -> None:
    """Raises ValueError for teachers that cannot be told apart, or that do not fit `training.temperature`.

    Generators give logprobs at temperature 1. Against a policy's at another temperature they would not agree even if
    both were the same model.
    """
    for what, values in (
        ("name", [teacher.name for teacher in teachers]),
        ("environment", [environment for teacher in teachers for environment in teacher.environments]),
    ):
        twice = sorted({value for value in values if values.count(value) > 1})
        if twice:
            raise ValueError(f"teachers: the {what} {twice[0]} is there twice; each {what} has one teacher")
    averages = [teacher.name for teacher in teachers if teacher.average is not None]
    if len(averages) > 1:
        raise ValueError(
            f"teachers: {' and '.join(averages)} have an average each, and the learner holds one: set average for one "
            "of them, with the environments of all"
        )
    others = [teacher.name for teacher in teachers if not teacher.environments]
    if len(others) > 1:
        raise ValueError(
            f"teachers: {' and '.join(others)} name no environments, so that each would teach all: name them for all "
            "but one"
        )
    remote = [teacher.name for teacher in teachers if teacher.is_remote]
    if remote and temperature != 1.0:
        raise ValueError(
            f"teachers: {remote[0]} is asked of generators, which give logprobs at temperature 1, but "
            f"training.temperature is {temperature:g}: set it to 1, or load the teacher from a folder (path)"
        )


def check_size(teachers: Sequence[TeacherConfig], *, top: int, completion_tokens: int) -> None:
    """Raises ValueError for more of the likeliest tokens than generators give in an answer.

    `top` are wanted in each place, of a completion that has `completion_tokens` at most.
    """
    remote = next((teacher.name for teacher in teachers if teacher.is_remote), None)
    if remote is None or not top:
        return
    if top > MAX_TOP_LOGPROBS:
        raise ValueError(
            f"algo.teacher_tokens is {top}, and teacher {remote} is asked of generators, which give at most "
            f"{MAX_TOP_LOGPROBS} tokens a place: lower it, or load the teacher from a folder (path)"
        )
    if completion_tokens * top > MAX_SCORED_TOKENS:
        raise ValueError(
            f"rollouts.max_tokens is {completion_tokens} and algo.teacher_tokens {top}: generators give at most "
            f"{MAX_SCORED_TOKENS} tokens in an answer to teacher {remote}, so that a text may have "
            f"{MAX_SCORED_TOKENS // top}; lower one of them, or load the teacher from a folder (path)"
        )


def check_use(
    teachers: Sequence[TeacherConfig], *, algo: str, asks: bool, weighed: bool = False, from_files: bool = False
) -> None:
    """Raises ValueError for teachers that the algorithm cannot use, or that it lacks.

    `asks`: it wants a teacher, as it is set; `weighed`: that is so if it has a `teacher_weight`; `from_files`: it
    learns from files.
    """
    kinds = sorted({"urls" if teacher.path is None else "path" for teacher in teachers})
    if teachers and not (asks or algo == "custom"):
        remedy = "set algo.teacher_weight" if weighed else "use opd or distill"
        raise ValueError(f"teachers are set, and algo {algo} asks none: remove them, or {remedy}")
    if asks and not from_files and not teachers:
        whose = f"algo {algo} with teacher_weight" if weighed else f"algo {algo}"
        raise ValueError(f"{whose} needs a teacher, and none is set: see learner.teachers")
    if from_files and (kinds not in ([], ["path"]) or len(teachers) > 1):
        raise ValueError(
            f"algo {algo} takes its teacher's logprobs from the data, or asks one teacher with a path: set that "
            "one alone"
        )
