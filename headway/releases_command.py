"""`headway releases`, `rollback`, `promote`, `feedback`: what users get, the way back, a word by hand, what users said.

They ask the run's learner. While none lives, they read and change the run's folder themselves, under its lock: what is
released then is served from the learner's next start on.
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.columns import in_columns
from headway.doctor.asking import targets_of
from headway.own_options import own_options, split_options
from headway.run_configs import load_separately
from protocol.releases import Promote, ReleaseStatus, RollBack
from services.config.models import ProcessConfig
from services.config.sources import ConfigError
from services.diagnosis.asked import Target
from services.http.client import HttpClient, ServiceError, ServiceRefused, ServiceTimeout, ServiceUnreachable
from services.http.tls import client_tls
from services.run_lock import FolderTaken, RunLock

_LEARNER = "learner"
_WAIT_S = 60.0
_SLACK_S = 30.0


def show_releases(path: Path, words: Sequence[str]) -> int:
    """Prints what is released, what was, and what became of each candidate. Raises ConfigError."""
    from learner.releases.history import read_rows, state_of  # deferred: the learner's packages load for seconds
    from learner.releases.kept_weights import FOLDER

    own, rest = own_options(words, {"--trajectories": True})
    version, rest = _version_in(rest, command="releases")
    config, _ = _learner_of(path, rest)
    folder = config.run.folder / FOLDER
    rows = read_rows(folder)
    if not rows:
        raise ConfigError([f"{folder} holds no releases; a run with learner.release.enabled = true writes them"])
    if version is not None:
        return _tell_origin(config, version, rows, own.get("--trajectories", [None])[-1])
    state = state_of(rows)
    lines = [("version", "event", "when", "why")]
    for row in rows:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["time"]))
        lines.append((row["version"], row["event"].replace("_", " "), when, _why(row)))
    kept = f"to go back to: {', '.join(each for each in state.former if (folder / each).is_dir()) or 'none'}"
    held = f"\npromotions are held until `headway promote`: {state.held}" if state.held else ""
    trial = f"\non trial with users: {state.trial}" if state.trial else ""
    sys.stdout.write(f"released: {state.released or 'nothing'}; {kept}{trial}{held}\n\n")
    sys.stdout.writelines(f"{line}\n" for line in in_columns(lines))
    return 0


def _why(row: Mapping[str, Any]) -> str:
    return str(row.get("text") or f"by generator {row.get('generator')}, checksum {row.get('fingerprint')}")


def _tell_origin(config: Any, name: str, rows: Sequence[Mapping[str, Any]], output: str | None) -> int:
    """Prints what a version came of; with a file, writes its trajectories there. Raises ConfigError."""
    from learner.journal.segments import JournalUnknown
    from learner.release_origin import origin_of
    from learner.releases.kept_weights import FOLDER, KeptWeights, ReleaseDamaged
    from protocol.model import PolicyVersion

    run = config.run.folder
    known = dict.fromkeys(row["version"] for row in rows if row["version"])
    found = [each for each in known if name in (each, each.partition(".")[2])]
    if len(found) != 1:
        raise ConfigError([f"{run / FOLDER} knows {len(found) or 'no'} versions called {name}: {', '.join(known)}"])
    version = found[0]
    try:
        origin = origin_of(run, PolicyVersion.parse(version))
    except JournalUnknown as error:
        raise ConfigError([str(error)]) from error
    lines = [f"version {version}"]
    lines += [f"  {row['event'].replace('_', ' ')}: {_why(row)}" for row in rows if row["version"] == version]
    try:
        record = KeptWeights(run).record(version)
        lines += [f"  digest {record.digest}", *(f"  {key}: {value}" for key, value in record.made.items())]
    except ReleaseDamaged:
        lines.append("  its weights are not kept")
    lines += _origin_lines(origin)
    if output is not None:
        lines += _write_trajectories(origin, Path(output))
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return 0


def _write_trajectories(origin: Any, path: Path) -> list[str]:
    """Raises ConfigError."""
    written = set[int]()
    try:
        with path.open("w", encoding="utf-8") as file:
            for row in origin.trajectories():
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                written.add(row["step"])
    except OSError as error:
        raise ConfigError([f"cannot write {path}: {error.strerror}; name another file by --trajectories"]) from error
    lines = [f"  its trajectories in the journal are in {path}"]
    if gone := [step.version + 1 for step in origin.logged if step.version + 1 not in written]:
        lines.append(f"  without those of steps {gone[0]} to {gone[-1]}: the learner has removed them meanwhile")
    return lines


def _origin_lines(origin: Any) -> list[str]:
    steps = list(origin.steps.values())
    if not steps:
        return ["  trained for no step: the initial model"]
    first, last = steps[0]["step"], steps[-1]["step"]
    rewards = ", ".join(f"{each['reward_mean']:.3f}" for each in (steps[0], steps[len(steps) // 2], steps[-1]))
    lines = [
        f"  steps {first} to {last}: {sum(each['groups'] for each in steps):,} groups, "
        f"{sum(each['trajectories'] for each in steps):,} trajectories, "
        f"{sum(each['sampled_tokens'] for each in steps):,} tokens; mean reward at first, halfway and last: {rewards}",
        f"  leases of the last step: {', '.join(map(str, steps[-1]['lease_ids'][:8]))} ...; largest lag "
        f"{max(each['lag_max'] for each in steps)}; which leases each step had is in metrics.jsonl",
    ]
    if origin.missing:
        lines.append(f"  of {len(origin.missing)} steps nothing is known, such as {origin.missing[0]}")
    if origin.logged:
        lines.append(
            f"  the journal has the trajectories of steps {origin.logged[0].version + 1} to "
            f"{origin.logged[-1].version + 1}, by the same leases; checkpoint.whole_journal keeps those of all"
        )
    else:
        lines.append("  the journal has none of its trajectories any more; checkpoint.whole_journal keeps those of all")
    if origin.damage:
        lines.append(f"  the journal cannot be read further than that: {origin.damage}")
    if origin.disagree:
        lines.append(
            f"  steps {', '.join(map(str, origin.disagree[:8]))} are others in the journal: they were lost since"
        )
    return lines


def roll_back(path: Path, words: Sequence[str]) -> int:
    """Releases a former version again; 0 once every generator of it has proven it. Raises ConfigError."""
    own, rest = own_options(words, {"--reason": True})
    version, rest = _version_in(rest, command="rollback")
    if version is None:
        raise ConfigError(["command line: headway rollback needs a version: headway rollback RUN.toml 1.40"])
    config, target = _learner_of(path, rest)
    body = RollBack(version=version, reason=own.get("--reason", [""])[-1], wait_s=_WAIT_S, run=_name_of(config))
    status = _asked(target, "rollback", body)
    if status is None:
        return _in_folder(config, lambda releases: releases.roll_back(version, reason=body.reason, wait_s=0))
    return _told(status, f"rolled back to version {status.released}")


def promote(path: Path, words: Sequence[str]) -> int:
    """Lets promotions go on after a rollback, or releases the candidate on trial. Raises ConfigError."""
    version, rest = _version_in(words, command="promote")
    config, target = _learner_of(path, rest)
    status = _asked(target, "promote", Promote(version=version, wait_s=_WAIT_S, run=_name_of(config)))
    if status is None:
        return _in_folder(config, lambda releases: releases.promote(version, wait_s=0))
    return _told(status, "promotions go on" if version is None else f"version {status.released} is released")


def take_feedback(path: Path, words: Sequence[str]) -> int:
    """Writes answers that users rated to a file, each into one file of all that are written so. Raises ConfigError."""
    from learner.releases.feedback import FeedbackDamaged  # deferred: the learner's packages load for seconds
    from learner.releases.kept_weights import FOLDER
    from learner.releases.taking import FormerUnfinished, NothingRated, take

    if not words or words[0].startswith("--"):
        raise ConfigError(["command line: headway feedback needs a file: headway feedback RUN.toml rated.jsonl"])
    output, *rest = words
    config, _ = _learner_of(path, rest)
    folder = config.run.folder / FOLDER
    if not folder.is_dir():
        raise ConfigError([f"{folder} is missing: a run with learner.release.enabled = true has it"])
    try:
        count, finished = take(folder, Path(output))
    except NothingRated as error:
        sys.stdout.write(f"{error}\n")
        return 1
    except FormerUnfinished as error:
        raise ConfigError([str(error.strerror)]) from error
    except (FileExistsError, FeedbackDamaged) as error:
        raise ConfigError([str(error)]) from error
    except OSError as error:
        remedy = "nothing was taken: name a file in a folder that is there"
        raise ConfigError([f"cannot write {output}: {error.strerror or error}; {remedy}"]) from error
    sys.stdout.writelines(f"{each}: finished; its writing had been cut off\n" for each in finished)
    sys.stdout.write(
        f"{output}: {count} rated answers, for `learner --algo dpo --algo.loss kto --data.path {output}`\n"
    )
    return 0


def _version_in(words: Sequence[str], *, command: str) -> tuple[str | None, list[str]]:
    """The version that is named first, if there is one, and the other words. Raises ConfigError."""
    if not words or words[0].startswith("--"):
        return None, list(words)
    version, *rest = words
    parts = version.split(".")
    if len(parts) > 2 or not all(part.isdecimal() and len(part) < 10 for part in parts):
        raise ConfigError([f"command line: headway {command}: got {version!r}, expected a version such as 1.40 or 40"])
    return version, rest


def _learner_of(path: Path, words: Sequence[str]) -> tuple[Any, Target]:
    configs: Mapping[str, ProcessConfig] = load_separately(path, split_options(words))
    if _LEARNER not in configs:
        raise ConfigError([f"{path}: no table [learner]; releases are those of a learner's run"])
    target = next(each for each in targets_of(configs) if each.kind == _LEARNER)
    return configs[_LEARNER], target


def _name_of(config: Any) -> str:
    """The name that a run got at its start, so that no other run is changed; empty if its folder is not here."""
    path = config.run.folder / "run_name"
    return str(path.read_text(encoding="utf-8").strip()) if path.exists() else ""


def _asked(target: Target, what: str, body: RollBack | Promote) -> ReleaseStatus | None:
    """The learner's answer; None if there is no learner. Raises ConfigError for a refusal."""

    async def ask() -> ReleaseStatus:
        async with HttpClient(token=target.token, tls=client_tls(target.tls)) as client:
            url = f"{target.url}/v1/releases/{what}"
            return await client.post(url, body, ReleaseStatus, deadline_s=body.wait_s + _SLACK_S)

    try:
        return asyncio.run(ask())
    except ServiceUnreachable:
        return None
    except ServiceRefused as error:
        raise ConfigError([_explained(error, target)]) from error
    except ServiceTimeout as error:
        raise ConfigError(
            [
                f"the learner at {target.url} has not answered within {body.wait_s + _SLACK_S:g} s: {what} waits while "
                "it writes or checks a release, and still happens after that. `headway releases RUN.toml` shows when; "
                "asked for again it is refused if it is done already"
            ]
        ) from error
    except ServiceError as error:
        raise ConfigError([f"the learner at {target.url} did not answer: {error}"]) from error


def _explained(error: ServiceRefused, target: Target) -> str:
    if error.kind == "unknown_route":
        return f"the learner at {target.url} releases nothing: set learner.release.enabled = true and resume its run"
    return error.message


def _told(status: ReleaseStatus, done: str) -> int:
    """Prints who has proven what; 1 if a generator of the released version has not yet."""
    lines = [f"{done}; its files agree with their hashes, digest {status.digest}"]
    late = False
    for one in status.generators:
        if one.serving_version == status.released:
            first = "the same as when it was proven first" if one.same_as_first else "the first of its kind"
            lines.append(f"generator {one.generator_id} serves it, checksum {one.fingerprint}, {first}")
        elif one.channel == "released":
            late = True
            lines.append(f"generator {one.generator_id} does not serve it yet: it serves {one.serving_version}")
    if not any(one.channel == "released" for one in status.generators):
        lines.append("no generator has join.channel = released: nobody serves it")
    if status.held:
        lines.append(f"promotions are held until `headway promote`: {status.held}")
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return 1 if late else 0


def _in_folder(config: Any, change: Callable[[Any], Awaitable[ReleaseStatus]]) -> int:
    """Changes the releases of a run that nobody runs. Raises ConfigError if somebody does after all."""
    from learner.releases.making import releases_without_learner  # deferred: the learner's packages load for seconds
    from services.http.refusals import RequestRefused

    async def changed() -> ReleaseStatus:
        with await RunLock.held(config.run.folder) as lock:
            releases = releases_without_learner(
                config.release,
                run=config.run.folder,
                secret_key_file=config.leases.secret_key_file,
                may_write=lock.check,
            )
            return await change(releases)

    if not (config.run.folder / "releases").is_dir():
        raise ConfigError([f"no learner answers, and {config.run.folder} holds no releases"])
    try:
        status = asyncio.run(changed())
    except FolderTaken as error:
        raise ConfigError([f"the learner does not answer, and has the folder of its run: {error}"]) from error
    except RequestRefused as error:
        raise ConfigError([error.problem.message]) from error
    except OSError as error:
        remedy = "make room, or let this user write there, and say it again"
        raise ConfigError([f"cannot write to {config.run.folder}: {error.strerror or error}; {remedy}"]) from error
    held = f"promotions are held until `headway promote`: {status.held}\n" if status.held else ""
    sys.stdout.write(
        f"version {status.released} is released, its files agree with their hashes, digest {status.digest}\n"
        f"no learner runs: it is served from the learner's next start on\n{held}"
    )
    return 0
