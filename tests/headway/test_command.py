"""The command line of the umbrella, and what it finds in a run.toml."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from headway import checking, evaluation_command
from headway import command as umbrella
from headway.doctor import before
from headway.own_options import usage
from headway.starting import process_command
from headway.supervisor import ProcessCommand
from services.process import huge_pages
from services.run_lock import RunLock
from tests.headway.mistakes.small_model import small_model

GOOD = """
[run]
name = "x"
[learner]
model = "MODEL"
[generator]
model = "MODEL"
[reward-service]
sandbox = "off"
[env-service]
model = "MODEL"
"""


@pytest.fixture(autouse=True)
def free_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever runs on this machine meanwhile, and without its GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(checking, "check_port", lambda what, host, port: before.good(what, host))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return small_model(tmp_path / "model")


@pytest.fixture
def good(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(GOOD.replace("MODEL", str(model)))
    return path


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["headway", *words])
    with pytest.raises(SystemExit) as ended:
        umbrella.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def problems(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert call(monkeypatch, *words) == 2
    written = capsys.readouterr()
    assert written.out == ""
    lines = written.err.splitlines()
    assert all(line.startswith("headway: ") for line in lines)
    return [line.removeprefix("headway: ") for line in lines]


def test_help_is_printed_wherever_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["--help"], ["-h"], ["help"]):
        assert call(monkeypatch, *words) == 0
        assert capsys.readouterr().out == usage()
    assert len(usage().splitlines()) <= 120


@pytest.mark.parametrize("words", [["up", "--help"], ["up", "-h"], ["up", "run.toml", "--help"]])
def test_help_for_a_command_tells_of_that_one_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert call(monkeypatch, *words) == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: headway up RUN.toml")
    assert "exit code of up and eval" in said
    assert "--restarts" in said
    assert not any(other in said for other in ("headway init", "headway keys", "exit code of doctor"))


def test_help_for_a_command_has_every_option_of_every_process_if_all_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "up", "--help", "--all") == 0
    said = capsys.readouterr().out
    wanted = ("learner.max-lag", "generator.engine.max-model-len", "reward-service.sandbox", "env-service.capacity")
    assert all(f"\n  --{flag}  " in said for flag in (*wanted, "run.name"))
    assert "[[env-service.environments]]" in said


def test_help_for_serving_has_every_option_of_the_processes_that_it_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "serve", "--help", "--all") == 0
    said = capsys.readouterr().out
    assert "\n  --learner.tinker.max-resident  " in said
    assert "\n  --generator.engine.max-model-len  " in said
    assert "\n  --env-service.capacity  " not in said


def test_the_memory_of_sizes_is_told_without_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "doctor", "--memory", "3B") == 0
    assert "| 3B | " in capsys.readouterr().out


def test_nothing_at_all_is_answered_with_the_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch) == 2
    assert capsys.readouterr().err == usage()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["chek", "run.toml"], "unknown command 'chek'; did you mean check?"),
        (
            ["zzz"],
            "unknown command 'zzz'; expected one of up, check, doctor, eval, status, releases, rollback, promote, "
            "feedback, init, diff, view, report, plan, serve, fetch, export, keys, relay, data; see headway --help",
        ),
        (["up"], "headway up needs the path of a TOML file: headway up RUN.toml"),
        (["check", "--run.name"], "headway check needs the path of a TOML file: headway check RUN.toml"),
        (["check", "/nowhere/run.toml"], "cannot read /nowhere/run.toml: No such file or directory"),
        (["up", "--memory"], "headway up needs the path of a TOML file: headway up RUN.toml"),
        (["doctor"], "headway doctor needs the path of a TOML file: headway doctor RUN.toml"),
        (["doctor", "/nowhere/run.toml"], "cannot read /nowhere/run.toml: No such file or directory"),
        (["eval"], "headway eval needs the path of a TOML file: headway eval RUN.toml"),
        (["eval", "/nowhere/run.toml"], "cannot read /nowhere/run.toml: No such file or directory"),
        (["eval", "run.toml", "--tasks"], "command line: --tasks needs a value"),
        (["up", "run.toml", "--restarts", "x"], "command line: --restarts: got 'x': expected a number, 0 for none"),
        (
            ["doctor", "run.toml", "--url", "generator"],
            "command line: --url: got 'generator': expected PROCESS=http://HOST:PORT, PROCESS one of learner, "
            "generator, reward-service, env-service",
        ),
    ],
)
def test_a_wrong_command_line_is_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    assert problems(monkeypatch, capsys, *words) == [expected]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--lerner.max-lag 3", "--lerner.max-lag: expected --PROCESS.OPTION; did you mean --learner.max-lag?"),
        ("--max-lag 3", "--max-lag: expected --PROCESS.OPTION; did you mean --learner.max-lag?"),
        ("3", "'3' follows no option; expected --PROCESS.OPTION VALUE"),
        ("--learner.max-lagg 3", "unknown flag --learner.max-lagg; did you mean --learner.max-lag?"),
        ("--learner.max-lag -1", "--learner.max-lag: got '-1': expected greater than or equal to 0"),
        ("--run.nam x", "unknown flag --run.nam; did you mean --run.name?"),
        ("--learner.steps", "--learner.steps needs a value"),
    ],
)
def test_a_wrong_option_is_named_as_it_was_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], good: Path, words: str, expected: str
) -> None:
    (problem,) = problems(monkeypatch, capsys, "check", str(good), *words.split())
    assert problem.startswith("command line")
    assert expected in problem


def test_a_good_file_is_called_good(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], good: Path
) -> None:
    assert call(monkeypatch, "check", str(good), "--learner.max-lag=0", "--run.name", "y") == 0
    first, run, template, _, *table = capsys.readouterr().out.splitlines()
    assert first == f"{good}: good for learner, generator, reward-service, env-service"
    assert run == f"run: {good.parent / 'runs/y'}"
    assert template.startswith("chat template: ")
    assert [line.split()[0] for line in table[:5]] == ["learner", "generator", "reward-service", "env-service", "in"]


def test_the_problems_of_all_tables_are_reported_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], good: Path
) -> None:
    text = good.read_text()
    text = text.replace('[run]\nname = "x"', '[run]\nnam = "x"\n[lerner]')
    text = text.replace("[generator]", "[generator]\nidd = 3")
    text = text.replace("[reward-service]", "[reward-service]\nmax_deadline_s = -1\nhttp.port = 7330")
    text = text.replace("[env-service]", '[env-service]\nlearner = "tcp://127.0.0.1:7300"')
    good.write_text(text)
    assert problems(monkeypatch, capsys, "check", str(good)) == [
        "run.toml: unknown table [lerner]; did you mean [learner]?",
        "run.toml: unknown key [run] nam; did you mean run.name?",
        "run.toml: unknown key [generator] idd; did you mean id?",
        "run.toml [reward-service] max_deadline_s: got -1: expected greater than 0",
    ]


def test_processes_that_miss_each_other_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], good: Path, tmp_path: Path
) -> None:
    text = good.read_text().replace("[reward-service]", "[reward-service]\nhttp.port = 7330")
    text = text.replace("[learner]", '[learner]\nhttp.port = 7305\nleases.address = "tcp://127.0.0.1:7302"')
    text = text.replace("[generator]\nmodel", f'[generator]\njoin.backend = "nccl"\nmodel = "{tmp_path}/gone"\nid')
    good.write_text(text)
    backend = "[generator] join.backend is nccl, but [learner] weights.backend is gloo: make them the same"
    assert set(problems(monkeypatch, capsys, "check", str(good))) == {
        "[reward-service] http and [env-service] http both listen on port 7330: give each its own",
        "[generator] join.learner is http://127.0.0.1:7300, but [learner] http listens on 127.0.0.1:7305: "
        "make them agree",
        backend,
        "[env-service] learner is tcp://127.0.0.1:7301, but [learner] leases.address listens on 127.0.0.1:7302: "
        "make them agree",
        "[env-service] reward_urls is http://127.0.0.1:7320, but [reward-service] http listens on 127.0.0.1:7330: "
        "make them agree",
        f"[generator] model: {tmp_path}/gone is not a folder; expected a Hugging Face model directory",
        "[generator] join.backend is nccl, which needs GPUs, and none is visible here (nvidia-smi, "
        "CUDA_VISIBLE_DEVICES): set learner.weights.backend and generator.join.backend to gloo",
    }


def test_an_option_for_a_process_that_the_file_lacks_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[reward-service]\n")
    words = ["--generator.engine.threads", "2", "--run.name", "y"]
    assert problems(monkeypatch, capsys, "check", str(path), *words) == [
        "command line: --generator.engine.threads: run.toml has no table [generator]"
    ]
    assert call(monkeypatch, "check", str(path), "--run.name", "y") == 0


def test_a_file_without_a_process_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[lerner]\nsteps = 3\n")
    (problem,) = problems(monkeypatch, capsys, "up", str(path))
    assert problem.endswith("[env-service]; did you mean [learner] instead of [lerner]?")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[learner\n", "is not TOML"),
        ("steps = 3\n", "steps is outside of a table"),
        ("[learner]\nstps = 3\n", "unknown key [learner] stps; did you mean steps?"),
        ("[learner]\nalgo = 'grop'\nmodel = 'x'\n", "did you mean grpo? Expected one of"),
        ("[learner]\n", "model is required (Hugging Face directory of the initial model): set model in [learner]"),
        ("[reward-service]\nhttp.host = '0.0.0.0'\n", "no token is set"),
        ("[run]\nname = 'a/b'\n[reward-service]\n", "run.toml [run] name: got 'a/b'"),
    ],
)
def test_a_broken_file_is_refused_with_its_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, expected: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    (problem,) = problems(monkeypatch, capsys, "check", str(path))
    assert expected in problem


def test_the_doctor_looks_at_the_machine_if_nothing_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], good: Path
) -> None:
    (good.parent / "model" / "model.safetensors").unlink()
    assert call(monkeypatch, "doctor", str(good), "--before") == 1
    text = capsys.readouterr().out
    assert text.startswith("before a start (as asked for):\n")
    assert "[learner] model" in text
    assert "lacks model.safetensors" in text


def test_a_restarted_learner_resumes_only_what_its_own_run_has_begun(good: Path, tmp_path: Path) -> None:
    marker = tmp_path / "incarnation"
    marker.write_text("1")
    command = process_command("learner", ["--config", str(good), "--steps", "3"], run_folder=tmp_path)
    assert command.again is not None
    assert command.again() == command.arguments
    marker.unlink()
    assert command.again() == command.arguments
    marker.write_text("1")
    os.utime(marker, (1, 1))
    assert command.again() == (*command.arguments, "--resume", "true")


def test_huge_pages_are_for_the_learner_alone_and_gpus_as_given(tmp_path: Path) -> None:
    gpus = {"CUDA_VISIBLE_DEVICES": "1"}
    made = {
        name: process_command(name, (), run_folder=tmp_path, environment=gpus).environment
        for name in ("learner", "generator")
    }
    assert dict(made["generator"]) == gpus
    assert dict(made["learner"]) == {**gpus, **huge_pages(os.environ)}


def test_a_run_that_lives_is_left_alone_and_its_process_is_named(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(umbrella, "Supervisor", start)
    words = ("up", str(good), "--run.directory", str(tmp_path))

    async def while_it_lives() -> list[str]:
        with await RunLock.held(tmp_path / "x"):
            return problems(monkeypatch, capsys, *words)

    (said,) = asyncio.run(while_it_lives())
    assert said.startswith(f"the run in {tmp_path / 'x'} is that of process {os.getpid()} on ")
    monkeypatch.setattr(sys, "argv", ["headway", *words])
    with pytest.raises(AssertionError, match="something was started"):
        umbrella.main()


def test_code_of_ones_own_that_cannot_be_used_is_named_by_a_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], good: Path
) -> None:
    good.write_text(
        good.read_text()
        + '[[env-service.environments]]\nsource = "no_such_module:Maze"\nname = "first"\n'
        + '[[env-service.environments]]\nsource = "nim"\nname = "second"\noptions = { heaps = "many" }\n'
    )

    said = problems(monkeypatch, capsys, "check", str(good))

    assert [line.partition(":")[0] for line in said] == [
        "[env-service] environment first (no_such_module",
        "[env-service] environment second (env_service.builtin.number_games",
    ]
    assert "cannot import 'no_such_module'" in said[0]
    assert "options: heaps" in said[1]


def test_a_conversation_that_is_longer_than_a_generator_takes_is_named_by_a_check_with_both_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], good: Path
) -> None:
    good.write_text(
        good.read_text()
        + '[[env-service.environments]]\nsource = "nim"\nname = "long"\nrules = { trajectory_tokens = 4097 }\n'
        + '[[env-service.environments]]\nsource = "nim"\nname = "short"\nrules = { trajectory_tokens = 512 }\n'
        + "[generator.engine]\nmax_model_len = 512\n"
    )

    said = next(line for line in problems(monkeypatch, capsys, "check", str(good)) if "trajectory_tokens" in line)

    assert "[env-service] environments.long.rules.trajectory_tokens is 4097" in said
    assert "[generator] engine.max_model_len is 512" in said
    assert "short" not in said


class NotedStart:
    """In the place of the supervisor: it notes what it would start, and ends with `code`."""

    commands: list[ProcessCommand] = []  # noqa: RUF012 - nothing hands the supervisor out
    code = 0
    was_stopped = False
    is_hopeless = False

    def __init__(self, commands: list[ProcessCommand], **_: object) -> None:
        NotedStart.commands = commands

    def run(self) -> int:
        return self.code


@pytest.mark.parametrize("command", ["up", "eval"])
def test_the_gpus_are_shared_out_among_the_processes_that_name_none(
    monkeypatch: pytest.MonkeyPatch, good: Path, command: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setattr(umbrella, "Supervisor", NotedStart)
    monkeypatch.setattr(evaluation_command, "to_be_started", list)

    assert call(monkeypatch, command, str(good)) == 0

    gpus = {each.name: dict(each.environment).get("CUDA_VISIBLE_DEVICES") for each in NotedStart.commands}
    assert gpus == {"learner": "4", "generator": "6", "reward-service": None, "env-service": None}
    (learner,) = [each for each in NotedStart.commands if each.is_leader]
    assert (learner.name, learner.again is None) == ("learner", command == "eval")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--generator.join.channel", "canary"), '[generator] join.channel is "canary", and [learner] release.enabled'),
        (("--learner.training.router.replay", "on"), "[learner] training.router.replay is "),
        (("--learner.training.router.aux-loss-coef", "0.1"), "[learner] training.router.aux_loss_coef is set"),
        (("--generator.engine.routed-experts", "on"), "[generator] engine.routed_experts is "),
    ],
)
def test_what_the_learner_would_refuse_later_is_refused_by_the_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], good: Path, words: tuple[str, ...], said: str
) -> None:
    (problem,) = problems(monkeypatch, capsys, "check", str(good), *words)
    assert problem.startswith(said)


def test_a_run_that_can_go_on_is_said_with_the_options_that_it_was_started_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], good: Path, tmp_path: Path
) -> None:
    class Died(NotedStart):
        code = 1

    monkeypatch.setattr(umbrella, "Supervisor", Died)
    (tmp_path / "runs/x").mkdir(parents=True)
    (tmp_path / "runs/x/incarnation").write_text("1")

    assert call(monkeypatch, "up", str(good), "--restarts", "0", "--learner.max-lag", "0") == 1

    again = f"the run can go on: headway up {good} --restarts 0 --learner.max-lag 0 --resume"
    assert capsys.readouterr().err.splitlines()[-1] == f"headway: once what ended it is mended, {again}"


def test_code_of_ones_own_that_ends_the_process_is_named_by_a_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], good: Path
) -> None:
    (good.parent / "leaving_maze.py").write_text("import sys\nsys.exit()\n")
    good.write_text(good.read_text() + '[[env-service.environments]]\nsource = "leaving_maze:Maze"\nname = "first"\n')

    (said,) = problems(monkeypatch, capsys, "check", str(good))

    assert "'leaving_maze' calls sys.exit when imported: SystemExit (" in said
    assert "leaving_maze.py, line 2: sys.exit())" in said


def test_some_of_a_files_processes_are_started_without_what_the_others_need(
    monkeypatch: pytest.MonkeyPatch, good: Path
) -> None:
    """Keys and models of the others are on their own machines."""
    started: list[str] = []
    text = good.read_text().replace("[learner]", '[learner]\nleases.secret_key_file = "/nowhere/learner.key"')
    good.write_text(text.replace("[learner]\nmodel", '[learner]\nmodel = "/nowhere"\n# model', 1))

    class Noted:
        was_stopped = False

        def __init__(self, commands: list[ProcessCommand], **_: object) -> None:
            started.extend(command.name for command in commands)

        def run(self) -> int:
            return 0

    monkeypatch.setattr(umbrella, "Supervisor", Noted)
    assert call(monkeypatch, "up", str(good), "--only", "generator,env-service") == 0
    assert started == ["generator", "env-service"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--only", "generators"), "command line: --only: 'generators': did you mean generator?"),
        (("--only",), "command line: --only needs a value"),
        (
            ("--only", "generator", "--learner.max-lag", "0"),
            "command line: --learner.max-lag: --only leaves [learner] to another machine",
        ),
    ],
)
def test_what_cannot_be_started_alone_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], good: Path, words: tuple[str, ...], said: str
) -> None:
    assert problems(monkeypatch, capsys, "up", str(good), *words) == [said]


FOR_GPUS = """
[run]
name = "x"
[learner]
model = "MODEL"
ranks = 64
weights = { backend = "nccl" }
[generator]
model = "MODEL"
join = { backend = "nccl" }
[reward-service]
sandbox = "required"
[env-service]
model = "MODEL"
"""


@pytest.fixture
def for_gpus(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that this machine is fit for in no way: without GPUs, memory, free ports and bubblewrap."""
    path = tmp_path / "run.toml"
    path.write_text(FOR_GPUS.replace("MODEL", str(model)))
    monkeypatch.setattr(before, "available_memory", lambda: 1024)
    monkeypatch.setattr(checking, "check_port", lambda what, host, port: before.bad(what, "is taken", "end it"))
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("services.isolation.bubblewrap.packaged_bubblewrap", lambda: None)
    return path


def test_a_run_for_another_machine_is_checked_without_what_depends_on_this_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], for_gpus: Path
) -> None:
    of_this_machine = problems(monkeypatch, capsys, "check", str(for_gpus))
    for what in ("nccl, which needs GPUs", "each takes a core", "is taken", "memory: ", "bubblewrap is missing"):
        assert any(what in line for line in of_this_machine), what

    assert call(monkeypatch, "check", str(for_gpus), "--elsewhere") == 0

    written = capsys.readouterr().out
    assert written.startswith(f"{for_gpus}: good for learner, generator, reward-service, env-service\n")
    assert "there is" not in written
    (note,) = [line for line in written.splitlines() if line.startswith("note: ")]
    assert note.startswith("note: left out, since this may not be the machine that it is meant for: devices, memory")


@pytest.mark.parametrize(
    ("given", "mistaken", "said"),
    [
        ('name = "x"', 'nam = "x"', "unknown key [run] nam; did you mean run.name?"),
        ('join = { backend = "nccl" }', 'join = { backend = "gloo" }', "but [learner] weights.backend is nccl"),
        ("[generator]\n", "[generator]\nengine = { max_model_len = 99999 }\n", "[generator] engine.max_model_len is"),
        ("[generator]\n", "[generator]\nengine = { tensor_parallel_size = 7 }\n", "which workers share evenly"),
        ("[generator]\n", "[generator]\nhttp.port = 7300\n", "both listen on port 7300"),
        ("[env-service]\n", '[env-service]\nenvironments = [{source = "no_such:Maze", name = "m"}]\n', "no_such"),
    ],
)
def test_what_no_machine_could_mend_is_found_elsewhere_too(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    for_gpus: Path,
    given: str,
    mistaken: str,
    said: str,
) -> None:
    for_gpus.write_text(for_gpus.read_text().replace(given, mistaken))
    found = problems(monkeypatch, capsys, "check", str(for_gpus), "--elsewhere")
    assert any(said in line for line in found), found


def test_two_processes_that_name_one_gpu_are_told_apart_from_two_machines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], for_gpus: Path
) -> None:
    for_gpus.write_text(for_gpus.read_text().replace("ranks = 64\n", ""))
    words = ("check", str(for_gpus), "--elsewhere", "--learner.devices", "[0]", "--generator.devices", "[0]")
    (said,) = problems(monkeypatch, capsys, *words)
    assert "learner and generator are both on GPU 0" in said

    token = "sixteen-or-more!"
    monkeypatch.setenv("HEADWAY_LEARNER__HTTP__TOKEN", token)
    monkeypatch.setenv("HEADWAY_GENERATOR__JOIN__TOKEN", token)
    apart = ("--learner.http.host", "0.0.0.0")
    joins = ("--generator.join.learner", "http://node-1:7300")
    assert call(monkeypatch, *words, *apart, *joins, "--learner.weights.host", "node-1") == 0
