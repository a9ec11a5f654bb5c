"""Groups that branch, over real sockets, against scripted generators."""

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, cast

import pytest

from env_service.environments.imported import EnvironmentFault
from env_service.environments.imported import offered as offered_class
from env_service.environments.interface import (
    Action,
    ChatMessage,
    Environment,
    EnvironmentUnavailable,
    ForkableEnvironment,
    OfferedEnvironment,
    Opening,
    Step,
    Task,
)
from env_service.environments.rules import Rules
from env_service.environments.task_configs import ClassTasks
from env_service.environments.tokenization import Tokenization
from env_service.rollouts.branching import beginnings, firsts, shares
from protocol.codec import decode, encode
from protocol.generation import GeneratePart, GenerateRequest
from protocol.messages import FinishedLease
from protocol.trajectories import Trajectory
from tests.env_service.bench import Bench, MakeBench
from tests.env_service.peers import lease, part
from tests.env_service.rollouts.test_conversation import ConversationTasks, counted


class Spelling:
    """Takes words down until `stop`; its reward is that of the words, and it says what it has."""

    alive: ClassVar[set[int]] = set()

    def __init__(self) -> None:
        self.words: list[str] = []

    def reset(self, task: Task, seed: int) -> Opening:
        self.alive.add(id(self))
        return Opening((ChatMessage("user", "go"),), state="")

    def step(self, action: Action) -> Step:
        self.words.append(action.text)
        said = " ".join(self.words)
        if action.text == "stop":
            return Step(reward=float(len(self.words)), stop="stopped", metrics={"words": len(self.words)})
        return Step((ChatMessage("user", said),), reward=0.5, state=said, invalid=action.text == "bad")

    def fork(self) -> "Spelling":
        forked = copy.deepcopy(self)
        self.alive.add(id(forked))
        return forked

    def close(self) -> None:
        self.alive.discard(id(self))


class Unforkable(Spelling):
    """Cannot be forked once it has heard one of these words."""

    def fork(self) -> Spelling:
        if "itself" in self.words:
            return self
        if "away" in self.words:
            raise EnvironmentUnavailable("no room for a second one")
        if "raises" in self.words:
            raise ValueError("no second one")
        return super().fork()


class Ways:
    """A generator's script: the words of each leaf, turn by turn; leaves that share a turn say it once. Each turn has a
    version of its own, from 3 on.
    """

    def __init__(self, model: Path, *said: str) -> None:
        self._tokenization = Tokenization(model)
        self._end = self._tokenization.special_tokens["<|im_end|>"]
        self._said = [line.split() for line in said]
        self.asked: list[str] = []

    def __call__(self, request: GenerateRequest) -> Sequence[GeneratePart]:
        name = request.request_id.rpartition("/")[2]
        self.asked.append(name)
        if "." not in name:
            stems = sorted({line[0]: None for line in self._said}, key=[line[0] for line in self._said].index)
            return [part(index, self._tokens(stems[index]), version="1.3") for index in range(request.n)]
        index, turn = map(int, name.split("."))
        return [part(0, self._tokens(self._said[index][turn]), version=f"1.{3 + turn}")]

    def _tokens(self, word: str) -> list[int]:
        return [*self._tokenization.encode_after("", word), self._end]


def offered(rules: Rules, start: type[Environment] = Spelling) -> OfferedEnvironment:
    return OfferedEnvironment(name="counting", tasks=ConversationTasks(), start=start, rules=rules)


async def branched(
    chat_bench: MakeBench,
    model: Path,
    *said: str,
    after: tuple[int, ...] = (1,),
    width: int = 2,
    start: type[Environment] = Spelling,
    **rules: object,
) -> tuple[Bench, tuple[Trajectory, ...], Ways]:
    ways = Ways(model, *said)
    given = Rules.model_validate({"branch_after": after, "branch_width": width, **rules})
    made = await chat_bench(ways, extra=[offered(given, start)])
    finished = await made.finished(lease(environment="counting", group_size=len(said)))
    sent = decode(encode(finished))
    assert isinstance(sent, FinishedLease)
    return made, sent.group.trajectories, ways


FOUR = ("one two stop", "one three four stop", "other five stop", "other stop")


async def test_branches_share_the_tokens_logprobs_and_versions_of_their_beginning(
    chat_bench: MakeBench, chat_model: Path
) -> None:
    _, members, ways = await branched(chat_bench, chat_model, *FOUR)

    assert [[(fork.at > 0, fork.branch) for fork in member.forks] for member in members] == [
        [(False, 0), (True, 0)],
        [(False, 0), (True, 1)],
        [(False, 1), (True, 0)],
        [(False, 1), (True, 1)],
    ]
    for one, other in ((members[0], members[1]), (members[2], members[3])):
        at = one.forks[1].at
        assert at == other.forks[1].at == one.turns[0].end
        for row in ("token_ids", "loss_mask", "behavior_logprobs"):
            assert getattr(one, row)[:at].tolist() == getattr(other, row)[:at].tolist()
        assert one.version_spans[0] == other.version_spans[0]
        assert one.turns[0] == other.turns[0]
    assert [sorted(set(member.token_versions()[member.loss_mask == 1].tolist())) for member in members] == [
        [3, 4, 5],
        [3, 4, 5, 6],
        [3, 4, 5],
        [3, 4],
    ]
    assert [member.oldest_version for member in members] == [3, 3, 3, 3]
    assert sorted(ways.asked)[1:] == ["0.1", "0.2", "1.1", "1.2", "1.3", "2.1", "2.2", "3.1"]


async def test_a_branch_reads_as_if_nobody_else_had_been_there(chat_bench: MakeBench, chat_model: Path) -> None:
    _, members, _ = await branched(chat_bench, chat_model, *FOUR)
    made = await chat_bench(Ways(chat_model, FOUR[1]), extra=[offered(Rules())])
    (alone,) = (await made.finished(lease(environment="counting", group_size=1))).group.trajectories

    branch = members[1]
    assert branch.token_ids.tolist() == alone.token_ids.tolist()
    assert branch.loss_mask.tolist() == alone.loss_mask.tolist()
    assert branch.completion_text == alone.completion_text
    assert [replace_times(turn) for turn in branch.turns] == [replace_times(turn) for turn in alone.turns]
    assert branch.reward.reward == alone.reward.reward == 0.5 * 3 + 4


def replace_times(turn: object) -> object:
    return turn.model_copy(update={"asked_s": None, "ended_s": None})  # type: ignore[attr-defined]


async def test_what_is_shared_is_counted_once(chat_bench: MakeBench, chat_model: Path) -> None:
    made, members, _ = await branched(
        chat_bench, chat_model, "bad two stop", "bad bad stop", "other five stop", "other stop"
    )

    assert [member.sampled_tokens for member in members] == [
        int(members[0].loss_mask.sum()),
        int(members[1].loss_mask[members[1].forks[1].at :].sum()),
        int(members[2].loss_mask.sum()),
        int(members[3].loss_mask[members[3].forks[1].at :].sum()),
    ]
    assert [len(member.own_turns) for member in members] == [3, 2, 3, 1]
    assert counted(made, "sampled_tokens_total") == sum(member.sampled_tokens for member in members)
    assert counted(made, "turns_total", environment="counting") == 9
    assert [member.reward.components["invalid_actions"] for member in members] == [1.0, 2.0, 0.0, 0.0]
    assert counted(made, "invalid_actions_total", environment="counting") == 2
    assert counted(made, "forked_environments_total", environment="counting") == 2
    assert not Spelling.alive, "all are closed, the forks too"


async def test_a_conversation_branches_again_and_its_places_are_dealt_out(
    chat_bench: MakeBench, chat_model: Path
) -> None:
    said = ("a b c stop", "a b d stop", "a e f stop", "a e g stop")
    _, members, _ = await branched(chat_bench, chat_model, *said, after=(1, 2))
    ways = [[fork.branch for fork in member.forks] for member in members]
    assert ways == [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]]
    assert all([fork.at for fork in member.forks[1:]] == [turn.end for turn in member.turns[:2]] for member in members)
    texts = [member.completion_text.split("\n\n")[::2] for member in members]
    assert [" ".join(words) for words in texts] == list(said)


async def test_a_conversation_that_is_over_before_it_branches_stays_one(
    chat_bench: MakeBench, chat_model: Path
) -> None:
    _, members, _ = await branched(chat_bench, chat_model, "stop", "none", "other five stop", "other stop")
    assert [[fork.branch for fork in member.forks] for member in members] == [[0], [1, 0], [1, 1]]


@pytest.mark.parametrize(("word", "kind"), [("raises", "data"), ("itself", "data"), ("away", "infrastructure")])
async def test_an_environment_that_cannot_be_forked_costs_the_branch_alone(
    chat_bench: MakeBench, chat_model: Path, word: str, kind: str
) -> None:
    said = (f"{word} two stop", f"{word} three stop", "other five stop", "other stop")
    made, members, _ = await branched(chat_bench, chat_model, *said, start=Unforkable)
    assert [member.reward.error_kind for member in members] == [None, kind, None, None]
    assert [member.reward.reward for member in members] == [4.0, None, 4.0, 2.5]
    label = {"raises": "raised", "itself": "nonsense", "away": "unavailable"}[word]
    assert counted(made, "environment_faults_total", environment="counting", kind=label) == 1


async def test_a_branch_without_a_turn_of_its_own_is_its_beginning(chat_bench: MakeBench, chat_model: Path) -> None:
    ways = Ways(chat_model, *FOUR)

    def script(request: GenerateRequest) -> Sequence[GeneratePart | None]:
        return [] if request.request_id.endswith("2.1") else ways(request)

    rules = Rules(branch_after=(1,), conversation_timeout_s=1.5)
    made = await chat_bench(script, extra=[offered(rules)])
    made.generators[0].hold, made.generators[0].holds = asyncio.Event(), lambda asked: asked.request_id.endswith("2.1")
    members = (await made.finished(lease(environment="counting", group_size=4))).group.trajectories
    made.generators[0].hold.set()
    (member,) = (each for each in members if [fork.branch for fork in each.forks] == [1, 0])
    assert (member.stop_reason, len(member.turns)) == ("time_limit", 1)
    assert member.forks[1].at == member.turns[-1].end == len(member.token_ids)


async def test_a_group_says_how_many_of_its_conversations_were_lost_before_their_first_turn(
    chat_bench: MakeBench, chat_model: Path
) -> None:
    """The second one's first turn never comes. Its leaves are not in the group, and it is not over early either."""
    ways = Ways(chat_model, *FOUR)

    def is_first(request: GenerateRequest) -> bool:
        return "." not in request.request_id.rpartition("/")[2]

    def script(request: GenerateRequest) -> Sequence[GeneratePart | None]:
        return ways(request)[:1]

    made = await chat_bench(script, extra=[offered(Rules(branch_after=(1,), conversation_timeout_s=1.5))])
    made.generators[0].hold, made.generators[0].holds = asyncio.Event(), is_first
    group = (await made.finished(lease(environment="counting", group_size=4))).group
    made.generators[0].hold.set()
    assert [[fork.branch for fork in one.forks] for one in group.trajectories] == [[0, 0], [0, 1]]
    assert group.turnless == 1


async def test_an_evaluation_does_not_branch(chat_bench: MakeBench, chat_model: Path) -> None:
    ways = Ways(chat_model, "one stop", "two stop")
    environment = replace(offered(Rules(branch_after=(1,))), tasks=EvaluationTasks())
    made = await chat_bench(ways, extra=[environment])
    group = (await made.finished(lease(environment="counting", group_size=2, purpose="evaluate"))).group
    assert [member.forks for member in group.trajectories] == [(), ()]


class EvaluationTasks(ConversationTasks):
    evaluation_tasks = 10


def test_leaves_are_dealt_out_as_evenly_as_can_be() -> None:
    assert shares(5, 2) == [3, 2]
    assert shares(2, 4) == [1, 1]
    assert firsts([3, 2, 2]) == [0, 3, 5]
    two = Rules(branch_after=(1,))
    assert beginnings(two, group_size=8, purpose="train") == [2, 2, 2, 2]
    assert beginnings(two, group_size=5, purpose="train") == [2, 2, 1]
    assert beginnings(Rules(branch_after=(1, 3), branch_width=3), group_size=9, purpose="train") == [9]
    assert beginnings(two, group_size=3, purpose="evaluate") == [1, 1, 1]


class NoFork:
    """Not an environment that can be forked."""

    rules = Rules(max_turns=3)

    def reset(self, task: Task, seed: int) -> str:
        return "go"

    def step(self, action: Action) -> Step:
        return Step(stop="done")


class Forking(NoFork):
    def fork(self) -> NoFork:
        return Forking()


class ForkingAgent:
    async def run(self, task: Task, client: object) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("name", "rules", "said"),
    [
        ("NoFork", {"branch_after": [1]}, "has no method fork; expected one that returns a second instance"),
        ("Forking", {"branch_after": [3]}, "max_turns is 3: nothing comes after turn 3"),
        ("Forking", {"branch_after": [1], "redundant": 2}, "redundant is 2: the branches that finish first"),
        ("Forking", {"branch_width": 3}, "branch_width is 3, and branch_after is not set"),
        ("ForkingAgent", {"branch_after": [1]}, "this is an agent"),
    ],
)
def test_branches_that_cannot_be_are_refused_by_name(name: str, rules: dict[str, object], said: str) -> None:
    entry = ClassTasks.model_validate({"name": "mine", "source": f"{__name__}:{name}", "rules": rules})
    with pytest.raises(EnvironmentFault, match=said):
        offered_class(entry)


def test_the_example_goes_on_from_where_it_was_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples" / "branches"))
    entry = ClassTasks.model_validate({"name": "chain", "source": "chain:Chain", "rules": {"branch_after": [1]}})
    one = cast("ForkableEnvironment", offered_class(entry).start())
    first = one.reset(Task(seed=5), seed=0)
    assert isinstance(first, Opening)
    assert isinstance(first.prompt, str)
    sums = [int(part) for part in first.prompt.removesuffix("=").split("+")]
    second = one.step(Action(f"{sum(sums):03}"))
    other = cast("ForkableEnvironment", one.fork())
    assert isinstance(second, Step)
    assert second.reward == 1.0
    said = str(second.observation)
    results = []
    for each, wrong in ((one, 0), (other, 1)):
        left, right = map(int, said.removesuffix("=").split("+"))
        third = each.step(Action(f"{left + right + wrong:03}"))
        assert isinstance(third, Step)
        left, right = map(int, str(third.observation).removesuffix("=").split("+"))
        last = each.step(Action(f"{left + right:03}"))
        assert isinstance(last, Step)
        results.append((third.reward, last.reward, last.stop))
    assert results == [(1.0, 1.0, "done"), (0.0, 1.0, "done")]


def test_places_of_branches_rise() -> None:
    with pytest.raises(ValueError, match=r"branch_after is \[3, 1\]: expected rising numbers of turns"):
        Rules(branch_after=(3, 1))
