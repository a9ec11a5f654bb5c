"""What `learner --algo NAME --help` says of each algorithm."""

import re

import pytest
from pydantic import TypeAdapter

from learner.algorithms.config import AlgorithmConfig
from learner.config import LearnerConfig
from services.config.models import help_text

SCHEMA = TypeAdapter(AlgorithmConfig).json_schema()
ALGORITHMS = tuple(SCHEMA["discriminator"]["mapping"])


def shown(algo: str) -> str:
    return help_text(LearnerConfig, process="learner", argv=("--algo", algo, "--help"))


def knobs(algo: str) -> set[str]:
    """The algorithm's own fields, by its schema."""
    reference = SCHEMA["discriminator"]["mapping"][algo].rpartition("/")[2]
    return set(SCHEMA["$defs"][reference]["properties"]) - {"type"}


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_help_lists_the_knobs_of_the_algorithm_and_no_others_each_with_its_meaning(algo: str) -> None:
    text = shown(algo)
    listed = re.findall(r"^  --algo\.([a-z-]+)(?:, or --algo)?  .+\n(.*)$", text, re.M)
    assert {name.replace("-", "_") for name, _ in listed} == knobs(algo) | {"type"}
    assert all(re.match(r"      \S", meaning) for _, meaning in listed)
    assert f"Below are the options of --algo {algo};" in text


@pytest.mark.parametrize("algo", sorted(set(ALGORITHMS) - {"custom", "opd", "reinforce", "sft"}))
def test_help_names_the_paper(algo: str) -> None:
    described = shown(algo).partition(f"      {algo}: ")[2].partition("\n  --")[0]
    assert re.search(r"\b\d{4}\.\d{5}\b", described), described


def test_a_knob_has_the_default_of_the_algorithm_that_is_asked_for() -> None:
    assert "--algo.clip-high  number, default 0.2\n" in shown("grpo")
    assert "--algo.clip-high  number, default 0.28\n" in shown("dapo")
    assert "--algo.clip-high  number, default 0.0004\n" in shown("gspo")
    assert "--algo.aggregation  token|sequence_mean|sequence_sum|constant, default constant\n" in shown("dr_grpo")
    assert "--algo.kl-in  loss|reward, default reward\n" in shown("ppo")


def test_a_knob_that_means_something_else_to_two_algorithms_is_explained_as_each_means_it() -> None:
    """`ratio_cap`'s text tells of AIPO for reinforce alone."""
    assert "2 to 10 is AIPO's" in shown("reinforce")
    assert "2 to 10 is AIPO's" not in shown("rloo")


def test_a_knob_of_which_an_algorithm_knows_fewer_values_lists_those_alone() -> None:
    assert "--algo.truncated  keep|mask|penalise, default keep\n" in shown("grpo")
    assert "--algo.truncated  keep|mask, default keep\n" in shown("gdpo")
