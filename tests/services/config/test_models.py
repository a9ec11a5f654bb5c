"""Precedence, nearest keys, and groups of one of several types."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal, Self

import pytest
from pydantic import Field, SecretStr, ValidationError, model_validator

from services.config.models import ConfigModel, HttpConfig, ProcessConfig, help_text, load_config, load_or_exit
from services.config.options import nearest, schema_of
from services.config.sources import ConfigError


class Grpo(ConfigModel):
    type: Literal["grpo"] = "grpo"
    clip_low: float = Field(0.2, ge=0, le=1, description="lower clip of the importance ratio")
    epochs: int = Field(1, ge=1, description="passes over a batch")


class Sft(ConfigModel):
    type: Literal["sft"] = "sft"
    epochs: int = Field(3, ge=1, description="passes over the data")
    pack: bool = Field(True, description="pack sequences")


class Config(ProcessConfig):
    model: Path = Field(description="folder of the model")
    max_lag: int = Field(4, ge=0, description="largest lag, in versions")
    names: tuple[str, ...] = Field((), description="some names")
    limit_s: float | None = Field(None, gt=0, description="limit in seconds")
    trace: bool = Field(False, description="trace everything")
    stage: Literal[0, 1, 2] = Field(0, description="a number of few")
    http: HttpConfig = HttpConfig(port=8100)
    algo: Annotated[Grpo | Sft, Field(discriminator="type", description="what is optimized")] = Grpo()

    @model_validator(mode="after")
    def _names_for_sft(self) -> Self:
        if self.names == ("alone",) and self.algo.type == "sft":
            raise ValueError("algo sft takes no name that is alone")
        return self


def load(*argv: str, toml: str | None = None, tmp_path: Path | None = None, **environ: str) -> Config:
    if toml is not None and tmp_path is not None:
        path = tmp_path / "run.toml"
        path.write_text(toml)
        argv = ("--config", str(path), *argv)
    return load_config(Config, process="learner", argv=argv, environ=environ)


def problem(*argv: str, toml: str | None = None, tmp_path: Path | None = None, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load("--model", "m", *argv, toml=toml, tmp_path=tmp_path, **environ)
    return str(caught.value)


def test_a_number_of_few_can_be_written_as_text() -> None:
    assert load("--model", "m", "--stage", "2").stage == 2
    assert load("--model", "m", HEADWAY_LEARNER__STAGE="1").stage == 1
    assert "--stage: got '3': expected 0, 1 or 2" in problem("--stage", "3")


def test_later_sources_win_over_earlier_ones(tmp_path: Path) -> None:
    toml = '[run]\nname = "one"\n[learner]\nmodel = "m"\nmax_lag = 1\n'
    assert load("--model", "m").max_lag == 4
    assert load(toml=toml, tmp_path=tmp_path).max_lag == 1
    assert load(toml=toml, tmp_path=tmp_path, HEADWAY_LEARNER__MAX_LAG="2").max_lag == 2
    assert load("--max-lag", "3", toml=toml, tmp_path=tmp_path, HEADWAY_LEARNER__MAX_LAG="2").max_lag == 3
    assert load(toml=toml, tmp_path=tmp_path).run.folder == tmp_path / "runs" / "one"
    assert load(toml=toml, tmp_path=tmp_path, HEADWAY_RUN__NAME="two").run.name == "two"
    assert load("--run.name=three", toml=toml, tmp_path=tmp_path, HEADWAY_RUN__NAME="two").run.name == "three"


def test_a_group_given_in_part_keeps_the_rest_of_its_default() -> None:
    config = load("--model", "m", HEADWAY_LEARNER__HTTP__TOKEN="secret")
    assert config.http == HttpConfig(port=8100, token=SecretStr("secret"))


def test_other_processes_tables_are_left_to_them(tmp_path: Path) -> None:
    assert load("--model", "m", toml="[generator]\nanything = 1\n", tmp_path=tmp_path).max_lag == 4


def test_lists_are_repeated_flags_or_json(tmp_path: Path) -> None:
    assert load("--model", "m", "--names", "a", "--names", "b").names == ("a", "b")
    assert load("--model", "m", "--names", '["a", "b"]').names == ("a", "b")
    assert load("--model", "m", HEADWAY_LEARNER__NAMES="a").names == ("a",)
    toml = '[learner]\nmodel = "m"\nnames = ["c"]\n'
    assert load("--names", "a", toml=toml, tmp_path=tmp_path).names == ("a",)


def test_flags_of_yes_and_no_and_none_and_negative_numbers() -> None:
    assert load("--model", "m", "--trace").trace
    assert load("--model", "m", "--trace", "true").trace
    assert not load("--model", "m", "--no-trace").trace
    assert load("--model", "m", "--limit-s", "none").limit_s is None
    assert "got '-2'" in problem("--limit-s", "-2")


def test_an_algorithm_named_alone_picks_the_type_and_keeps_its_fields() -> None:
    config = load("--model", "m", "--algo", "grpo", "--algo.clip-low", "0.3")
    assert config.algo == Grpo(clip_low=0.3)
    assert load("--model", "m", "--algo.type", "sft").algo == Sft()
    assert load("--model", "m", HEADWAY_LEARNER__ALGO="sft").algo == Sft()


def test_a_field_of_another_algorithm_is_an_error(tmp_path: Path) -> None:
    text = problem("--algo", "sft", "--algo.clip-low", "0.3")
    assert "command line --algo.clip-low" in text
    assert "algo grpo, but algo is sft" in text
    assert "algo sft, but algo is grpo" in problem("--algo.pack", "false")
    toml = '[learner.algo]\ntype = "sft"\nclip_low = 0.1\n'
    assert "run.toml [learner] algo.clip_low" in problem(toml=toml, tmp_path=tmp_path)
    assert "run.toml [learner] algo.clip_low" in problem("--algo", "grpo", toml=toml, tmp_path=tmp_path)


def test_another_algorithm_on_the_command_line_replaces_the_files_table(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    toml = '[learner]\nmodel = "m"\n[learner.algo]\ntype = "grpo"\nclip_low = 0.1\nepochs = 7\n'
    assert load("--algo", "grpo", toml=toml, tmp_path=tmp_path).algo == Grpo(clip_low=0.1, epochs=7)
    assert not caplog.records
    assert load("--algo", "sft", toml=toml, tmp_path=tmp_path).algo == Sft(epochs=3)
    assert "left out" in caplog.text


def test_a_file_table_without_a_type_goes_with_the_type_picked_later(tmp_path: Path) -> None:
    toml = '[learner]\nmodel = "m"\n[learner.algo]\nepochs = 7\n'
    assert load("--algo", "sft", toml=toml, tmp_path=tmp_path).algo == Sft(epochs=7)
    assert load(toml=toml, tmp_path=tmp_path).algo == Grpo(epochs=7)


def test_an_unknown_key_names_its_place_and_the_nearest_known_one(tmp_path: Path) -> None:
    assert problem("--max-leg", "3") == "command line: unknown flag --max-leg; did you mean --max-lag?"
    assert "did you mean --algo.clip-low?" in problem("--clip-low", "3")
    assert "did you mean HEADWAY_LEARNER__MAX_LAG?" in problem(HEADWAY_LEARNER__MAXLAG="3")
    text = problem(toml="[learner]\nmaxlag = 3\n[learner.algo]\nclip_lo = 1\n[lerner]\na = 1\n", tmp_path=tmp_path)
    assert "run.toml: unknown key [learner] maxlag; did you mean max_lag?" in text
    assert "run.toml: unknown key [learner] algo.clip_lo; did you mean algo.clip_low?" in text
    assert "run.toml: unknown table [lerner]; did you mean [learner]?" in text
    assert "see --help" in problem("--zzzzqqq", "3")


def test_what_only_looks_like_a_key_is_not_proposed_and_what_others_call_otherwise_is_named(tmp_path: Path) -> None:
    assert nearest("wandb", ["sandbox", "steps"]) is None
    assert nearest("stps", ["sandbox", "steps"]) == "steps"
    toml = '[learner]\nmodel = "m"\nwandb = true\nmax_async_level = 3\n'
    text = problem(toml=toml, tmp_path=tmp_path)
    assert "unknown key [learner] wandb; `learner --help` lists all keys" in text
    assert "unknown key [learner] max_async_level; that is max_lag here" in text


def test_an_option_may_have_the_process_before_it_as_for_all_processes_at_once(tmp_path: Path) -> None:
    assert load("--model", "m", "--learner.max-lag", "3", tmp_path=tmp_path).max_lag == 3
    assert "did you mean --max-lag?" in problem("--learner.max-leg", "3")


def test_a_value_out_of_range_says_got_and_expected(tmp_path: Path) -> None:
    assert problem("--algo.clip-low", "7") == (
        "command line --algo.clip-low: got '7': expected less than or equal to 1"
    )
    assert "run.toml [learner] max_lag: got 'x': expected a whole number" in problem(
        toml='[learner]\nmax_lag = "x"\n', tmp_path=tmp_path
    )
    assert "got 'ppo'" in problem("--algo", "ppo")
    assert "expected one of grpo, sft" in problem("--algo", "ppo")


def test_settings_that_do_not_fit_each_other_are_said_with_their_table() -> None:
    assert problem("--algo", "sft", "--names", "alone") == "[learner] algo sft takes no name that is alone"


def test_a_missing_key_says_the_three_places_to_set_it() -> None:
    with pytest.raises(
        ConfigError, match=r"model is required \(folder of the model\).*HEADWAY_LEARNER__MODEL.*--model"
    ):
        load()


def test_a_reachable_address_needs_a_token() -> None:
    assert "no token is set" in problem("--http.host", "0.0.0.0")
    token = "sixteen-or-more!"
    assert load("--model", "m", "--http.host", "0.0.0.0", HEADWAY_LEARNER__HTTP__TOKEN=token).http.host == "0.0.0.0"


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "learner", "::"])
def test_a_short_token_is_refused_where_other_machines_reach_it(host: str) -> None:
    said = problem("--http.host", host, HEADWAY_LEARNER__HTTP__TOKEN="fifteen-letters")
    assert "the token has 15 characters; expected at least 16" in said
    assert "headway keys" in said
    assert "fifteen-letters" not in said
    assert load("--model", "m", HEADWAY_LEARNER__HTTP__TOKEN="t").http.host == "127.0.0.1"


def test_a_secret_is_never_shown() -> None:
    assert "hush" not in problem("--http.port", "99999999", HEADWAY_LEARNER__HTTP__TOKEN='["hush"]')
    assert "hush" not in repr(load("--model", "m", HEADWAY_LEARNER__HTTP__TOKEN="hush"))


@pytest.mark.parametrize("words", [("--http.token", "hush"), ("--http.token=hush",), ("--learner.http.token", "hush")])
def test_a_secret_on_the_command_line_which_others_see_is_refused(words: tuple[str, ...]) -> None:
    said = problem(*words)
    assert "hush" not in said
    assert "--http.token-file with a file that only you can read, or the variable HEADWAY_LEARNER__HTTP__TOKEN" in said


def test_a_config_is_frozen() -> None:
    with pytest.raises(ValidationError):
        setattr(load("--model", "m"), "max_lag", 3)  # noqa: B010


def test_a_file_that_cannot_be_read_is_a_config_error(tmp_path: Path) -> None:
    assert "No such file" in problem("--config", str(tmp_path / "none.toml"))
    assert "is not TOML" in problem(toml="[learner\n", tmp_path=tmp_path)
    assert "outside of a table" in problem(toml="max_lag = 3\n", tmp_path=tmp_path)


def test_an_argument_that_is_no_flag_and_a_flag_without_value_are_errors() -> None:
    assert "'stray' is not a flag" in problem("--max-lag", "3", "stray")
    assert "--max-lag needs a value" in problem("--max-lag")
    assert "--config needs" in problem("--config")


@pytest.mark.parametrize("key", ["top_p", "min_p", "stop"])
def test_what_others_have_and_is_left_out_here_is_answered_with_the_reason(key: str, tmp_path: Path) -> None:
    (line,) = problem(toml=f'[learner]\nmodel = "m"\n{key} = "x"\n', tmp_path=tmp_path).splitlines()
    name = key.rpartition(".")[2]
    assert f"unknown key [learner] {key}; {name} is " in line
    (line,) = problem(f"--{key.replace('_', '-')}", "x").splitlines()
    assert f"; {name} is " in line


def test_the_short_form_of_a_choice_may_stand_beside_its_table(tmp_path: Path) -> None:
    toml = "[learner]\nmodel = 'm'\nalgo = 'sft'  # short\nmax_lag = 3\n[learner.algo]\nepochs = 7\n"
    assert load(toml=toml, tmp_path=tmp_path).algo == Sft(epochs=7)
    assert "is not TOML" in problem(toml=toml + "epochs = 8\n", tmp_path=tmp_path)
    said = problem(toml=toml + "type = 'grpo'\n", tmp_path=tmp_path)
    assert "[learner] algo is 'sft', and [learner.algo] type 'grpo': leave one out" in said


class Seeded(Config):
    seed: int = Field(0, ge=0, description="a seed")
    head_seed: int = Field(0, ge=0, description="another")


def test_seeds_that_are_not_set_are_those_of_the_run() -> None:
    argv = ["--model", "m", "--run.seed", "7", "--head-seed", "1"]
    config = load_config(Seeded, process="learner", argv=argv, environ={})
    assert (config.seed, config.head_seed) == (7, 1)
    config = load_config(Seeded, process="learner", argv=["--model", "m"], environ={})
    assert (config.seed, config.run.seed) == (0, None)


def test_help_shows_every_option_with_default_and_meaning() -> None:
    texts = [help_text(Config, process="learner", argv=("--algo", name, "--help", "--all")) for name in ("grpo", "sft")]
    schema = schema_of(Config)
    assert all(option.description and option.description in "".join(texts) for option in schema.options.values())
    assert "--max-lag  integer, default 4" in texts[0]
    assert "--algo.type, or --algo  grpo|sft, default grpo" in texts[0]
    assert "--model  path, required" in texts[0]
    assert "--http.port  integer, default 8100" in texts[0]


def test_help_shows_the_options_of_the_algorithm_that_is_asked_for_and_no_others() -> None:
    assert help_text(Config, process="learner") == help_text(Config, process="learner", argv=("--algo=grpo",))
    grpo, sft = (help_text(Config, process="learner", argv=(f"--algo={name}", "--all")) for name in ("grpo", "sft"))
    assert "options of --algo grpo" in grpo
    assert "options of --algo sft" in sft
    assert "--algo.epochs  integer, default 1\n" in grpo
    assert "--algo.epochs  integer, default 3\n" in sft
    assert "--algo.clip-low" in grpo
    assert "--algo.clip-low" not in sft


def test_the_command_exits_with_2_and_a_clean_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["learner", "--max-leg", "3"])
    with pytest.raises(SystemExit) as caught:
        load_or_exit(Config, process="learner")
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("learner: command line: unknown flag --max-leg")


def test_a_chat_template_that_cannot_be_read_ends_every_command_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text("[run]\nchat_template = 'mine.jinja'\n[learner]\nmodel = 'm'\n")
    monkeypatch.setattr(sys, "argv", ["learner", "--config", str(tmp_path / "run.toml")])
    with pytest.raises(SystemExit) as caught:
        load_or_exit(Config, process="learner")
    assert caught.value.code == 2
    said = f"learner: [run] chat_template: {tmp_path / 'mine.jinja'} is not a file: expected the Jinja text"
    assert capsys.readouterr().err.startswith(said), "it counts from the file's folder"


def test_a_chat_template_in_the_table_of_a_process_is_told_its_place(tmp_path: Path) -> None:
    said = problem(toml='[learner]\nmodel = "m"\nchat_template = "x"\n', tmp_path=tmp_path)
    assert "unknown key [learner] chat_template; that is run.chat_template here" in said


def test_importing_the_shell_loads_no_torch() -> None:
    code = "import services.config, services.process, sys; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
