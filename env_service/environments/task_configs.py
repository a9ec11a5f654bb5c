"""Settings of tasks: the entries of [[env-service.environments]]."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Discriminator, Field, JsonValue, SecretStr, Tag, model_validator

from env_service.environments.rules import HINT_REWARD, HintReward, Rules, StopText, TeacherHint, check_hint
from services.config.models import ConfigModel
from services.config.options import nearest
from services.config.run_paths import CountsFrom

BUILT_IN: Mapping[str, str] = {
    "maze": "env_service.builtin.grid_games:MazeEnvironment",
    "arithmetic": "env_service.builtin.arithmetic:ArithmeticEnvironment",
    "code_repair": "env_service.builtin.code_repair:CodeRepairEnvironment",
    "tools": "env_service.builtin.tool_use:ToolUseEnvironment",
    "computer": "env_service.builtin.computer:ComputerEnvironment",
    "harbor": "env_service.builtin.task_sets:HarborEnvironment",
    "repositories": "env_service.builtin.task_sets:RepositoryEnvironment",
    "sokoban": "env_service.builtin.grid_games:SokobanEnvironment",
    "sliding_puzzle": "env_service.builtin.grid_games:SlidingPuzzleEnvironment",
    "nim": "env_service.builtin.number_games:NimEnvironment",
    "guessing": "env_service.builtin.number_games:GuessingEnvironment",
    "gymnasium": "env_service.builtin.gymnasium_games:GymnasiumEnvironment",
    "textarena": "env_service.builtin.textarena_games:TextArenaEnvironment",
    "remote": "env_service.hosting.remote:RemoteEnvironment",
    "openenv": "env_service.hosting.openenv:OpenEnvEnvironment",
    "agent": "env_service.agents.program:AgentProgram",
    "harness": "env_service.harnesses.environment:HarnessAgent",
    "verifiers": "env_service.hosting.verifiers_server:VerifiersAgent",
    "nim_duel": "env_service.builtin.duels:NimDuel",
    "tic_tac_toe": "env_service.builtin.duels:TicTacToe",
    "textarena_match": "env_service.builtin.textarena_games:TextArenaMatch",
    "wordle": "env_service.builtin.wordle:WordleEnvironment",
}
"""The environments that come with Headway, by name: import paths, so that none is loaded before it is wanted."""

_TOLD = (
    "variables that the chat template gets in its conversations, such as { enable_thinking = false }; they override "
    "`run.chat_template_kwargs`"
)
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", description="name that leases refer to")]


VerifierName = Annotated[str, Field(min_length=1, max_length=256, description="name of a verifier")]


class PlacesConfig(ConfigModel):
    """Places of an environment beside others, as in a mix: those of rollouts that take hours beside short ones."""

    most: int | None = Field(
        None, ge=1, description="its leases, each a group, that run at once in an env-service at most; none: no limit"
    )
    weight: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="its share of the places that are in use, relative to the others', 1 where they say nothing: the "
        "next lease of a mix is of the part that has least of its share. None, and so of all others: leases come as "
        "tasks do in the mix",
    )


class HintedTasks(ConfigModel):
    """Tasks of one turn, of which a teacher may be shown more than the policy."""

    teacher_hint: TeacherHint = None
    hint_reward: HintReward = HINT_REWARD

    @model_validator(mode="after")
    def _hint_shows_something(self) -> Self:
        check_hint(self.teacher_hint, reward=self.hint_reward)
        return self


class AdditionTasks(HintedTasks):
    """Two-digit addition: `37+48=` is to be continued with `085`."""

    source: Literal["addition"] = "addition"
    name: Name = "addition"
    places: PlacesConfig = PlacesConfig()


class ReasoningGymTasks(HintedTasks):
    """Tasks that reasoning-gym generates. Evaluation tasks come from seeds that no training task has."""

    source: Literal["reasoning_gym"]
    name: Name
    dataset: str = Field(description="name of a reasoning-gym dataset, such as basic_arithmetic")
    config: dict[str, JsonValue] = Field(default_factory=dict, description="settings of the dataset")
    level: int | None = Field(
        None,
        ge=0,
        le=100,
        description="difficulty by the dataset's own curriculum, 0 the easiest; attributes that have no such level are "
        "at their highest. `config` overrides it",
    )
    levels: dict[str, Annotated[int, Field(ge=0, le=100)]] = Field(
        default_factory=dict, description="levels of single attributes of the curriculum, over `level`"
    )
    easier_too: bool = Field(
        True, description="whether the curriculum's ranges begin at its easiest level, or hold the given one alone"
    )
    seed: int = Field(0, ge=0, lt=1 << 31, description="seed of the first training task; each task has one of its own")
    train_tasks: int = Field(10_000, ge=1, le=100_000_000, description="number of training tasks")
    evaluation_tasks: int = Field(200, ge=0, le=1_000_000, description="number of evaluation tasks")
    system_prompt: str = Field("", description="text of a system message before the question; empty for none")
    question_suffix: str = Field("", description="text after each question, such as the wanted form of the answer")
    chat: bool = Field(True, description="whether the model's chat template is applied")
    stop: tuple[StopText, ...] = Field(
        (), max_length=16, description="texts that end a completion; their tokens stay, and are trained on"
    )
    extract: tuple[Literal["tag", "boxed", "whole"], ...] = Field(
        ("tag", "boxed"), min_length=1, description="where the answer is looked for in a completion, in this order"
    )
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict, description=_TOLD)
    places: PlacesConfig = PlacesConfig()


class JsonlTasks(HintedTasks):
    """Tasks from files with one JSON object per line.

    Each has `messages` or `prompt`, and `verifier` with `arguments`, or `answer` for the default verifier. `privileged`
    is text for `teacher_hint`, if it is not the answer.
    """

    source: Literal["jsonl"]
    name: Name
    train_file: Path = Field(description="file of training tasks")
    evaluation_file: Path | None = Field(None, description="file of evaluation tasks, if there are any")
    verifier: str | None = Field(None, description="verifier of the lines that name none; gets {answer}")
    system_prompt: str = Field("", description="system message before prompts that have none; empty for none")
    chat: bool = Field(True, description="whether a plain `prompt` becomes a user message of the chat template")
    stop: tuple[StopText, ...] = Field(
        (), max_length=16, description="texts that end a completion; their tokens stay, and are trained on"
    )
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict, description=_TOLD)
    places: PlacesConfig = PlacesConfig()


class MixPart(ConfigModel):
    """An environment in a mix."""

    environment: Name
    weight: float = Field(1.0, gt=0, le=1e6, description="its share of the training tasks, relative to the others'")


class MixTasks(ConfigModel):
    """The tasks of other environments together, in shares; all evaluation tasks, the environments in turn.

    An epoch holds each training task at least once; of those that are too few for their share, the tasks recur.
    """

    source: Literal["mix"]
    name: Name
    parts: tuple[MixPart, ...] = Field(min_length=1, max_length=256, description="environments with their weights")


class LevelTasks(ConfigModel):
    """Other environments as the levels of a curriculum, the easiest first: the learner takes tasks of one level, and
    moves to another by how many are solved (`learner.rollouts.curriculum`). All evaluation tasks, the levels in turn.
    """

    source: Literal["levels"]
    name: Name
    levels: tuple[Name, ...] = Field(min_length=2, max_length=100, description="environments, the easiest first")


class OpponentConfig(ConfigModel):
    """A player of a game in the policy's place, which is not trained: generators that serve another model, or an
    older version of this one.
    """

    urls: tuple[str, ...] = Field(
        min_length=1, max_length=256, description="addresses of generators that serve it, alone: `join.learner = none`"
    )
    plays: tuple[str, ...] = Field(
        (), max_length=16, description="players that it plays; if none is named, one of them, another with each task"
    )
    model: Path | None = Field(
        None, description="Hugging Face directory of its tokenizer and chat template; the policy's own if not given"
    )
    chat_template: Path | None = Field(
        None,
        description="Jinja file of its chat template; if not given its model's, or run.chat_template where it plays "
        "with the policy's model",
    )
    chat_template_kwargs: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="variables that its chat template gets; where it plays with the policy's template, they "
        "override the policy's",
    )
    token: SecretStr | None = Field(None, description="bearer token of its generators; `generator_token` if not given")
    temperature: float = Field(1.0, ge=0, le=2, description="temperature that it is sampled at; 0 is greedy")


class ClassTasks(ConfigModel):
    """An environment that is a class: a built-in one by its name, one's own by its import path."""

    source: str = Field(pattern=r"^[A-Za-z_][\w.]*(:[A-Za-z_]\w*)?$", description="package.module:Class, or a name")
    name: Name
    options: Annotated[dict[str, JsonValue], CountsFrom("folder")] = Field(
        default_factory=dict, description="what the class's constructor takes"
    )
    folder: Path | None = Field(
        None, description="folder that relative paths in `options` count from; that of run.toml if not given"
    )
    rules: Rules = Field(Rules(), description="turns, tokens and actions; what is not set is as the class says")
    places: PlacesConfig = PlacesConfig()
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict, description=_TOLD)
    train_tasks: int = Field(
        10_000, ge=1, le=100_000_000, description="training tasks, if the class has none of its own"
    )
    evaluation_tasks: int = Field(200, ge=0, le=1_000_000, description="evaluation tasks, if it has none of its own")
    seed: int = Field(0, ge=0, lt=1 << 31, description="seed of the tasks' seeds")
    opponent: OpponentConfig | None = Field(
        None, description="in a game of several players, who plays some of them; none: the policy plays all"
    )
    isolation: Literal["none", "workers", "process"] = Field(
        "none",
        description="where it runs: `none`, in this process; `workers`, in the processes that env-service.workers "
        "counts; `process`, each conversation in a process that it has for itself",
    )
    processes: int = Field(64, ge=1, le=4096, description="processes at most, with isolation = `process`")
    spares: int = Field(2, ge=0, le=256, description="processes that are started before they are wanted")
    fresh: bool = Field(
        False, description="true: a new process for each conversation; false: a process runs one after the other"
    )

    @model_validator(mode="before")
    @classmethod
    def _address_of_a_host(cls, given: Any) -> Any:
        """An address in place of a class is that of `env-service host`."""
        source = given.get("source") if isinstance(given, dict) else None
        if not isinstance(source, str) or not source.startswith(("http://", "https://")):
            return given
        return {**given, "source": "remote", "options": {"urls": [source], **given.get("options", {})}}

    @model_validator(mode="before")
    @classmethod
    def _known_or_a_path(cls, given: Any) -> Any:
        """Before the rest: of an entry whose source is misspelled all keys would be called unknown."""
        source = given.get("source") if isinstance(given, dict) else None
        if not isinstance(source, str) or ":" in source or source in BUILT_IN:
            return given
        names = sorted({*_MODELS, *BUILT_IN})
        guess = nearest(source, names)
        raise ValueError(
            f"source {source!r} is no environment; {f'did you mean {guess}? ' if guess else ''}Expected one of "
            f"{', '.join(names)}, or the import path of a class, package.module:Class"
        )

    @property
    def path(self) -> str:
        """The import path of the class."""
        return BUILT_IN.get(self.source, self.source)


_MODELS = {
    get_args(model.model_fields["source"].annotation)[0]: model
    for model in (AdditionTasks, ReasoningGymTasks, JsonlTasks, MixTasks, LevelTasks)
}


def _tag(given: Any) -> str:
    source = given.get("source") if isinstance(given, dict) else getattr(given, "source", None)
    return str(source) if source in _MODELS else "class"


Tasks = Annotated[
    Annotated[AdditionTasks, Tag("addition")]
    | Annotated[ReasoningGymTasks, Tag("reasoning_gym")]
    | Annotated[JsonlTasks, Tag("jsonl")]
    | Annotated[MixTasks, Tag("mix")]
    | Annotated[LevelTasks, Tag("levels")]
    | Annotated[ClassTasks, Tag("class")],
    Discriminator(_tag),
]
