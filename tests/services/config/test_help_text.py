"""`--help` of each process, and of each algorithm."""

import re
import textwrap
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from env_service.config import EnvServiceConfig
from generator.config import GeneratorConfig
from learner.algorithms.presets.registry import AlgorithmConfig
from learner.config import LearnerConfig
from reward_service.config import RewardServiceConfig
from services.config.models import ProcessConfig, help_text, load_config
from services.config.options import models_in, schema_of
from services.config.sources import ConfigError

SCHEMA = TypeAdapter(AlgorithmConfig).json_schema()
MODELS: dict[str, type[ProcessConfig]] = {
    "learner": LearnerConfig,
    "generator": GeneratorConfig,
    "reward-service": RewardServiceConfig,
    "env-service": EnvServiceConfig,
}
ALGORITHMS = tuple(SCHEMA["discriminator"]["mapping"])


def shown(algo: str) -> str:
    return help_text(LearnerConfig, process="learner", argv=("--algo", algo, "--help", "--all"))


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


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_help_for_an_algorithm_fits_on_a_few_screens_and_has_its_knobs_and_the_usual_keys(algo: str) -> None:
    said = help_text(LearnerConfig, process="learner", argv=("--algo", algo, "--help"))
    assert len(said.splitlines()) <= 120
    assert max(map(len, said.splitlines())) <= 120
    wanted = {"model", "steps", *(f"algo.{knob}".replace("_", "-") for knob in knobs(algo))}
    assert wanted <= set(re.findall(r"^  --([a-z.0-9-]+)", said, re.M))


@pytest.mark.parametrize("process", MODELS)
def test_help_fits_on_a_few_screens_and_names_every_group(process: str) -> None:
    said = help_text(MODELS[process], process=process, argv=("--help",))
    assert len(said.splitlines()) <= 120
    groups = {key.rpartition(".")[0] for key in schema_of(MODELS[process]).options} - {""}
    idle = {"data"} if process == "learner" else set()
    assert all(re.search(rf"^  (--)?{group.replace('_', '[-_]')}[. ]", said, re.M) for group in groups - idle)


@pytest.mark.parametrize("process", MODELS)
def test_help_has_every_key_at_length_if_all_are_asked_for(process: str) -> None:
    said = help_text(MODELS[process], process=process, argv=("--help", "--all"))
    for key, option in schema_of(MODELS[process]).options.items():
        assert f"\n  --{key.replace('_', '-')}" in said
        assert all(text in said for text in option.texts.values() or [option.description])
        if option.is_list:
            for _, model in models_in(option.annotation):
                assert f"[[{process}.{key}]]" in said
                assert all(
                    f"\n          {name}" in said for name in model.model_fields if name not in ("type", "source")
                )


def test_help_for_a_group_and_for_a_key_tells_of_these_alone() -> None:
    said = help_text(LearnerConfig, process="learner", argv=("--help", "training.optimizer", "max-lag"))
    listed = re.findall(r"^  --([a-z.0-9-]+)", said, re.M)
    assert "max-lag" in listed
    assert "training.optimizer.learning-rate" in listed
    assert all(name == "max-lag" or name.startswith("training.optimizer.") for name in listed)


def complaint(tmp_path: Path, toml: str, *argv: str, **environ: str) -> str:
    """About a learner's table."""
    path = tmp_path / "run.toml"
    path.write_text(textwrap.dedent(toml))
    with pytest.raises(ConfigError) as caught:
        load_config(LearnerConfig, process="learner", argv=["--config", str(path), *argv], environ=environ)
    return str(caught.value)


@pytest.mark.parametrize("algo", ["sft", "rm", "dpo", "distill"])
@pytest.mark.parametrize(
    "setting",
    [
        "max_lag = 2",
        "rollouts.group_size = 4",
        "leases.timeout_s = 3",
        "evaluation.tasks = 5",
        "http.port = 1",
        'verdict.webhook = "https://chat.example/hook"',
        "samples.enabled = false",
        "samples.budget_mb = 64",
        "checkpoint.journal = false",
        "checkpoint.whole_journal = true",
    ],
)
def test_a_setting_of_sampling_is_refused_where_nothing_is_sampled(algo: str, setting: str, tmp_path: Path) -> None:
    said = complaint(tmp_path, f'[learner]\nmodel = "m"\nalgo = "{algo}"\ndata.path = "d.jsonl"\n{setting}\n')
    key = setting.partition(" ")[0]
    assert said.startswith(
        f"run.toml [learner] {key} is set but has no effect: algo {algo} learns from the file data.path"
    )
    assert f"`learner --algo {algo} --help`" in said


def test_a_setting_without_effect_is_named_as_it_was_given(tmp_path: Path) -> None:
    toml = '[learner]\nmodel = "m"\nalgo = "rm"\ndata.path = "d.jsonl"\n'
    said = complaint(tmp_path, toml, "--training.temperature", "0.7", HEADWAY_LEARNER__MAX_LAG="1")
    assert "command line --training.temperature is set but has no effect: algo rm has scores" in said
    assert "environment HEADWAY_LEARNER__MAX_LAG is set but has no effect" in said
    online = '[learner]\nmodel = "m"\ndata.path = "d.jsonl"\n'
    assert "data.path is set but has no effect: algo grpo samples its data" in complaint(tmp_path, online)


@pytest.mark.parametrize("process", MODELS)
def test_what_is_spelled_otherwise_is_not_proposed_wherever_it_is_written(process: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'[{process}]\nmodel = "m"\nwandb = "x"\nlog.wandb = "x"\n')
    name = f"HEADWAY_{process.upper().replace('-', '_')}__WANDB"
    with pytest.raises(ConfigError) as caught:
        load_config(MODELS[process], process=process, argv=["--config", str(path), "--wandb", "x"], environ={name: "x"})
    said = [line for line in str(caught.value).splitlines() if "wandb" in line.lower()]
    assert len(said) == 4
    proposed = [line.partition("did you mean ")[2].lower() for line in said if "did you mean" in line]
    assert all("trackers" in name and process == "learner" for name in proposed), "sandbox, say"
