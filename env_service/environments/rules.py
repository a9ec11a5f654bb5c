"""Settings of an environment's conversations: how many turns and tokens, how actions are read."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from services.config.models import ConfigModel

History = Literal["append", "split", "summarize"]
ActionForm = Annotated[
    str,
    Field(
        pattern=r"^(text|json|tools|tag:[A-Za-z][A-Za-z0-9_-]{0,63})$",
        description="how an action is read: `text` as it is, `tag:NAME` from the last <NAME>…</NAME>, `json` from the "
        "last JSON object, both behind the policy's thought (`</think>`), `tools` from the calls of tools",
    ),
]
PRIVILEGED = "{privileged}"
"""Place of a task's text in a teacher's hint."""
SIBLING = "{sibling}"
"""Place, in a teacher's hint, of what a trajectory of the group said that has solved the task."""
HINT_REWARD = 1.0
StopText = Annotated[str, Field(min_length=1, max_length=64)]
ToolFormat = Literal[
    "hermes", "qwen_coder", "glm", "mistral", "llama", "pythonic", "granite", "deepseek", "kimi", "harmony", "gemma"
]


TeacherHint = Annotated[
    Annotated[str, Field(min_length=1, max_length=1 << 16)] | None,
    Field(
        description="text that a teacher with `privileged` of the learner is shown beside a training task's prompt, "
        "and the policy is not; {privileged} in it is the task's own text, or else the `answer` that its verifier is "
        "given; {sibling} is what the trajectory of the group with the best reward said, of at least hint_reward, to "
        "teach those of less. It goes before a plain prompt, and behind the last message of another one. none: none "
        "is shown",
    ),
]
HintReward = Annotated[
    float,
    Field(
        ge=-1e6,
        le=1e6,
        description="with {sibling} in teacher_hint: reward from which a trajectory has solved its task. Of a group "
        "without one none is taught",
    ),
]


class Rules(ConfigModel):
    """The rules of an environment's conversations. A class may set them as its attribute `rules`; what the entry of the
    config file sets under `rules` overrides them.
    """

    max_turns: int = Field(32, ge=1, le=1024, description="turns of the policy; after the last one it is cut off")
    turn_tokens: int | None = Field(
        None, ge=1, description="tokens sampled in a turn at most; what the learner asks for if not given"
    )
    trajectory_tokens: int | None = Field(
        None, ge=2, description="tokens of the whole conversation at most, given and sampled; none sets no limit"
    )
    redundant: int = Field(
        0,
        ge=0,
        le=1024,
        description="extra trajectories of a training group; the first to finish make the group, and these are "
        "mostly the short ones",
    )
    branch_after: tuple[Annotated[int, Field(ge=1, le=1023)], ...] = Field(
        (),
        max_length=8,
        description="after these turns a conversation of a training group goes on in several ways, which share what "
        "was before; the environment needs a method `fork`",
    )
    branch_width: int = Field(
        2,
        ge=2,
        le=64,
        description="with `branch_after`: ways in which a conversation goes on; a group begins with as few as give its "
        "`group_size` in the end",
    )
    stop: tuple[StopText, ...] = Field(
        (), max_length=16, description="texts that end a turn; their tokens stay, and are trained on"
    )
    history: History = Field(
        "append",
        description="append: one sequence, what was sampled and shown stays; split: each turn's prompt is rendered "
        "anew from the messages, and is a sequence of its own; summarize: append, but before the prompt of a turn gets "
        "longer than `context_tokens` the policy is asked for a summary, a turn of its own, and goes on from that",
    )
    context_tokens: int | None = Field(
        None,
        ge=16,
        description="with `history = summarize`, or an environment that has `on_full`: tokens that the prompt of a "
        "turn may have",
    )
    action: ActionForm = "text"
    tool_format: ToolFormat | Literal["auto"] = Field(
        "auto",
        description="how calls of tools are written, those of agents too; auto: as the model's chat template writes "
        "them, or in any format where that shows no tools",
    )
    invalid_penalty: float = Field(
        0.0, ge=0, le=1e3, description="taken from a turn's reward when its action cannot be read or is not allowed"
    )
    max_invalid: int | None = Field(
        None, ge=1, description="the conversation is cut off after so many invalid actions; none sets no limit"
    )
    teacher_hint: TeacherHint = None
    hint_reward: HintReward = HINT_REWARD
    step_timeout_s: float | None = Field(
        None, gt=0, description="longest time of one step; retry.environment_timeout_s if not given"
    )
    conversation_timeout_s: float | None = Field(
        None, gt=0, description="longest time of a conversation, with all sampling, after which it is cut off"
    )
    replayable: bool = Field(
        False,
        description="its steps depend on task, seed and the actions before alone: with `env-service.checkpoints`, an "
        "env_service that was started again rebuilds it by the recorded actions, and goes on",
    )
    save_every: int = Field(
        1,
        ge=1,
        description="turns between two saves of an environment that has `save` and `restore`, with "
        "`env-service.checkpoints`",
    )

    @model_validator(mode="after")
    def _branch_after_rises(self) -> Self:
        if list(self.branch_after) != sorted(set(self.branch_after)):
            raise ValueError(f"branch_after is {list(self.branch_after)}: expected rising numbers of turns")
        return self

    @model_validator(mode="after")
    def _hint_shows_something(self) -> Self:
        check_hint(self.teacher_hint, reward=self.hint_reward)
        if self.teacher_hint is not None and self.history != "append":
            raise ValueError(
                f'teacher_hint is set and history is "{self.history}": a teacher reads a trajectory as one text behind '
                'its prompt; set history to "append", or leave teacher_hint out'
            )
        return self


def check_hint(hint: str | None, *, reward: float) -> None:
    """Raises ValueError for a hint that shows nothing of the task, and for a `hint_reward` that has no effect."""
    if hint is not None and PRIVILEGED not in hint and SIBLING not in hint:
        raise ValueError(
            f"teacher_hint is {hint[:80]!r}: expected {PRIVILEGED} in it, which is the task's own text, or {SIBLING}, "
            "what a trajectory of the group said that has solved it"
        )
    if reward != HINT_REWARD and SIBLING not in (hint or ""):
        raise ValueError(f"hint_reward is set, and teacher_hint has no {SIBLING} in it: remove it, or put that there")
