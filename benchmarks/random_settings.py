"""Random settings of all four processes, through `headway check` and a real run of three steps.

    python -m benchmarks.random_settings [--seeds 1-40] [--most 16] [--check-only] [--result FILE]

Of each seed some settings are drawn: an algorithm, other variants, and numbers about their defaults. One that the check
complains of is left out, until it is content; a crash of the check ends the command. Those that it is content with
are run, on the addition demo with few tasks. A run that does not come to its end had settings that the check should
have refused, or a fault.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin

from benchmarks.machine import described_machine
from headway.examination import examined
from headway.own_options import config_model, split_options
from headway.run_configs import read_each
from services.config.agreements import disagreements
from services.config.options import Choice, Option, flag_of, schema_of
from services.config.sources import PROCESSES, ConfigError
from services.process import parent_death_signal

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "examples/addition/run.toml"
RESULT = Path(__file__).with_name("results") / "random_settings.md"
SHORT = (
    "--learner.steps", "3", "--learner.groups-per-step", "8", "--learner.training.optimizer.total-updates", "100",
    "--learner.evaluation.tasks", "8", "--learner.evaluation.final-tasks", "8",
)  # fmt: skip
"""Put after what is drawn."""
_LIMIT_S = 600.0
_TAIL_CHARS = 2000

# What names a place, a file, a device or a former run, and so has no random value.
_PLACES = (
    "address", "backend", "devices", "directory", "file", "folder", "host", "instance", "keys", "model", "path",
    "port", "ranks", "relay", "resume", "run", "secret", "socket", "source", "token", "tls", "url",
)  # fmt: skip
# Algorithms that learn from files, a teacher or trees, none of which the demo has.
_OTHER_INPUTS = frozenset({"sft", "rm", "dpo", "distill", "custom", "opd", "treerl"})
_OFTEN, _SELDOM = 0.6, 0.15

Setting = tuple[str, str]
"""Flag and value."""


@dataclass(frozen=True)
class SettingsTrial:
    """The settings of a seed that the check let through, how many were drawn, and the end of their run: its exit code,
    None if it was not run, or did not end.
    """

    seed: int
    settings: tuple[Setting, ...]
    drawn: int
    code: int | None = None
    seconds: float = 0.0
    said: str = field(default="", repr=False)

    @property
    def words(self) -> list[str]:
        """As on a command line."""
        return [word for setting in self.settings for word in setting]


def draw(seed: int, *, most: int) -> list[Setting]:
    """Some variants of groups, and up to `most` settings; the same for the same seed."""
    source = random.Random(seed)
    schemas = {process: schema_of(config_model(process)) for process in PROCESSES}
    picked: dict[Setting, str | None] = {}
    drawn: dict[str, str] = {}
    for process, schema in schemas.items():
        for key, choice in schema.choices.items():
            picked[process, key] = variant = _variant(choice, source)
            if variant != choice.default and variant is not None:
                drawn[_flag(process, choice.type_key)] = variant
    known = [
        (process, option)
        for process, schema in schemas.items()
        for option in schema.options.values()
        if not _is_place(option.key) and _exists(option, schema.choice_of(option.key), picked, process)
    ]
    for process, option in source.sample(known, source.randint(1, most)):
        if values := sorted(_values(option)):
            drawn[_flag(process, option.key)] = source.choice(values)
    return list(drawn.items())


def _variant(choice: Choice, source: random.Random) -> str | None:
    if _is_place(choice.key) or source.random() > (_OFTEN if choice.key == "algo" else _SELDOM):
        return choice.default
    return source.choice([each for each in choice.variants if each not in _OTHER_INPUTS])


def _exists(option: Option, choice: Choice | None, picked: Mapping[Setting, str | None], process: str) -> bool:
    """True if the setting is one of the variant that was picked, and does not pick it."""
    if choice is None:
        return True
    return option.key != choice.type_key and (not option.variants or picked[process, choice.key] in option.variants)


def _is_place(key: str) -> bool:
    return any(part in _PLACES for name in key.split(".") for part in name.split("_"))


def _flag(process: str, key: str) -> str:
    return flag_of(key).replace("--", f"--{process}.", 1)


def _values(option: Option) -> set[str]:
    """Texts of every kind that the setting takes; of numbers some about its default, and some that are often wrong."""
    found: set[str] = set()
    default = option.default if isinstance(option.default, int | float) else 2
    for kind in _kinds(option.annotation):
        if get_origin(kind) is Literal:
            found.update(map(str, get_args(kind)))
        elif kind is bool:
            found.update(("true", "false"))
        elif kind is int:
            found.update(map(str, (0, 1, 2, 3, 5, 17, max(1, int(default) // 2), 2 * int(default) + 1)))
        elif kind is float:
            found.update(map(repr, (0.0, 0.1, 0.9, 1.0, 0.5 * default, 2.0 * default + 0.1)))
    return found


def _kinds(annotation: object) -> Iterator[object]:
    """The types of a union, without what is noted on them."""
    if get_origin(annotation) is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif get_origin(annotation) in (None, Literal):
        yield annotation
    else:
        for part in get_args(annotation):
            yield from _kinds(part)


def allowed(settings: Sequence[Setting], *, folder: Path, source: random.Random) -> list[Setting]:
    """The settings without those that the check complains of. Raises what the check raises when it crashes."""
    left = list(settings)
    while problems := complaints(left, folder=folder):
        said = " ".join(problems).replace("_", "-")
        blamed = [setting for setting in left if _is_named(setting[0], said)] or left
        if not blamed:
            raise SystemExit(f"the check complains of the demo itself: {said}")
        left.remove(source.choice(blamed))
    return left


def _is_named(flag: str, said: str) -> bool:
    key = flag.partition(".")[2]
    return flag in said or key in said or key.rpartition(".")[2] in said


def complaints(settings: Sequence[Setting], *, folder: Path) -> list[str]:
    """The problems that `headway check --elsewhere` finds."""
    words = [*(word for setting in settings for word in setting), *SHORT, "--run.directory", str(folder)]
    with redirect_stderr(StringIO()):  # which settings of the file do not count
        try:
            configs, problems = read_each(CONFIG, split_options(words))
            problems += disagreements(configs)
            return [*problems, *examined(configs, elsewhere=True).faults]
        except ConfigError as error:
            return list(error.problems)


def run(trial: SettingsTrial, *, folder: Path) -> SettingsTrial:
    """The trial with the end of its run."""
    command = [str(Path(sys.executable).with_name("headway")), "up", str(CONFIG), *trial.words, *SHORT]
    command += ["--run.name", f"seed-{trial.seed}", "--run.directory", str(folder)]
    began = time.monotonic()
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, preexec_fn=parent_death_signal,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        code: int | None
        try:
            said, code = process.communicate(timeout=_LIMIT_S)[0], process.returncode
        except subprocess.TimeoutExpired:
            process.terminate()
            said, code = process.communicate()[0], None
    return SettingsTrial(trial.seed, trial.settings, trial.drawn, code, time.monotonic() - began, said)


def table(trials: Sequence[SettingsTrial]) -> str:
    """The result in Markdown."""
    ended = [trial for trial in trials if trial.code == 0]
    lines = [
        "# Random settings",
        "",
        "`python -m benchmarks.random_settings`: settings of all four processes, drawn at random, without those that",
        "`headway check` complains of; then a run of three steps of the addition demo.",
        "",
        f"Measured on {described_machine()}.",
        "",
        "| what | how many |",
        "|---|---|",
        f"| seeds | {len(trials)} |",
        f"| settings drawn | {sum(trial.drawn for trial in trials)} |",
        f"| settings that the check let through | {sum(len(trial.settings) for trial in trials)} |",
        f"| runs that came to their end | {len(ended)} |",
        "",
        "| seed | settings | end |",
        "|---|---|---|",
        *(f"| {trial.seed} | `{' '.join(trial.words)}` | {_end(trial)} |" for trial in trials),
    ]
    return "\n".join(lines) + "\n"


def _end(trial: SettingsTrial) -> str:
    return "well" if trial.code == 0 else "**not within its time**" if trial.code is None else f"**{trial.code}**"


def trials_of(seeds: Iterable[int], *, most: int, folder: Path) -> Iterator[SettingsTrial]:
    """A trial of each seed, not run yet."""
    for seed in seeds:
        drawn = draw(seed, most=most)
        left = allowed(drawn, folder=folder, source=random.Random(seed))
        yield SettingsTrial(seed, tuple(left), len(drawn))


def main() -> None:
    """Exits with 1 if a run did not come to its end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1-40", help="first and last; %(default)s")
    parser.add_argument("--most", type=int, default=16, help="settings drawn for a seed; %(default)s")
    parser.add_argument("--check-only", action="store_true", help="no runs")
    parser.add_argument("--result", type=Path, default=RESULT)
    arguments = parser.parse_args()
    first, _, last = arguments.seeds.partition("-")
    done: list[SettingsTrial] = []
    with tempfile.TemporaryDirectory() as folder:
        seeds = range(int(first), int(last or first) + 1)
        for made in trials_of(seeds, most=arguments.most, folder=Path(folder)):
            print(
                f"seed {made.seed}: {len(made.settings)} of {made.drawn} settings: {' '.join(made.words)}", flush=True
            )
            if arguments.check_only:
                continue
            done.append(run(made, folder=Path(folder)))
            print(f"    {_end(done[-1])}, {done[-1].seconds:.0f} s", flush=True)
            if done[-1].code != 0:
                print(done[-1].said[-_TAIL_CHARS:], flush=True)
            arguments.result.write_text(table(done), encoding="utf-8")
    sys.exit(0 if all(trial.code == 0 for trial in done) else 1)


if __name__ == "__main__":
    main()
