"""The service of the Tinker API under random kills: a client's whole history is that of an undisturbed one."""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from signal import SIGINT
from typing import Any

from tests.chaos.outcomes import ScenarioOutcome
from tests.e2e.processes import Launched, Launcher, kill_marked, until
from tests.e2e.tinker_serving import NAME, answer_of, client, is_ready, kill, pids, started
from tests.learner.tenants.tiny import make_tiny_model
from tests.protocol.tinker.sdk import PYTHON

TINKER = "tinker-clients"
VICTIMS = ("learner", "learner", "generator")
STEPS_PER_KILL = 20
"""Of a client, so that it works while all of them come."""
KILLS = 20
"""Two undisturbed clients do as many steps as one that is killed so often."""
END_S = 3600.0
UP_S = 240.0


def tinker_run(*, folder: Path, kills: int, seed: int, say: Callable[[str], None]) -> ScenarioOutcome:
    """A client of the Tinker API trains, saves, loads and samples while learner and generator are killed at random."""
    began = time.monotonic()
    outcome = ScenarioOutcome(scenario=TINKER, seed=seed)
    if not PYTHON.exists():
        outcome.complaints.append("there is no Tinker SDK to be a client: make tinker-sdk")
        return outcome
    make_tiny_model(folder / NAME)
    with _serving(folder) as (launcher, serve, told):
        words = (told["TINKER_BASE_URL"], NAME, str(STEPS_PER_KILL * (kills or KILLS)))
        with client("history.py", told, *words) as running:
            quiet = answer_of(running, timeout_s=END_S)
        say(f"a client has done {words[2]} steps undisturbed")
        with client("history.py", told, *words) as running, ThreadPoolExecutor(1) as reader:
            answer = reader.submit(answer_of, running, timeout_s=END_S)  # what it says is read meanwhile
            back_s, random = list[float](), Random(seed)
            for number in range(kills):
                if answer.done():
                    outcome.complaints.append(f"the client had ended before kill {number + 1}: give it more steps")
                    break
                back_s.append(_strike(launcher, serve, told, random, say=say))
            killed = answer.result()
        outcome.complaints += differences(quiet, killed)
        outcome.notes += [
            f"{len(back_s)} kills of learner and generator, back after {max(back_s, default=0.0):.0f} s at most",
            f"{len(killed['losses'])} losses, {len(other_losses(quiet, killed))} of them other bits",
            f"{len(killed['counts'])} steps, {killed['sampled']} samples, {len(killed['paths'])} checkpoints",
        ]
    for text in outcome.complaints:
        say(f"BROKEN {text}")
    outcome.seconds = time.monotonic() - began
    return outcome


def differences(quiet: Mapping[str, Any], killed: Mapping[str, Any]) -> list[str]:
    """The ways in which a client's history is not that of the undisturbed one."""
    found = [
        f"{name}: {killed[name]}, undisturbed {quiet[name]}"
        for name in ("counts", "sampled", "paths", "greedy")
        if killed[name] != quiet[name]
    ]
    if len(killed["losses"]) != len(quiet["losses"]):
        return [*found, f"{len(killed['losses'])} losses, undisturbed {len(quiet['losses'])}"]
    wrong = other_losses(quiet, killed)
    if wrong:
        first = wrong[0]
        found.append(
            f"{len(wrong)} losses differ, the first is {first}: {killed['losses'][first]}, undisturbed "
            f"{quiet['losses'][first]}"
        )
    return found


def other_losses(quiet: Mapping[str, Any], killed: Mapping[str, Any]) -> list[int]:
    """The numbers of the losses that are not equal bit by bit: passes of one model never share one, however many wait
    after a start.
    """
    pairs = zip(quiet["losses"], killed["losses"], strict=False)
    return [number for number, (one, other) in enumerate(pairs) if one != other]


@contextmanager
def _serving(folder: Path) -> Iterator[tuple[Launcher, Launched, dict[str, str]]]:
    launcher = Launcher(folder)
    try:
        serve, told = started(launcher, folder, "--restarts", "1000")
        yield launcher, serve, told
        serve.send(SIGINT)
        serve.wait()
    finally:
        kill_marked(launcher.mark)


def _strike(
    launcher: Launcher,
    serve: Launched,
    told: Mapping[str, str],
    random: Random,
    *,
    say: Callable[[str], None],
) -> float:
    """Waits for a while in which the client gets on, kills one of the two, and waits until both are there again; the
    seconds from the kill until then.
    """
    time.sleep(random.uniform(0.3, 5.0))
    victim = random.choice(VICTIMS)
    deaths = serve.text().count("SIGKILL")
    struck = time.monotonic()
    kill(launcher, victim)
    until(lambda: serve.text().count("SIGKILL") > deaths, what="its death to be seen", during=(serve,))
    until(lambda: pids(launcher, victim), what=f"the {victim}'s next life", timeout_s=UP_S, during=(serve,))
    until(lambda: is_ready(dict(told)), what="the learner to serve", timeout_s=UP_S, during=(serve,))
    back_s = time.monotonic() - struck
    say(f"the {victim} was killed, and the learner serves {back_s:.1f} s later")
    return back_s
