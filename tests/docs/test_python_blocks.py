"""The Python that the docs show is run, as its page says that it is used. A new block needs a test here."""

import random
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pyarrow
import pyarrow.parquet
import pytest
import torch
from pydantic import JsonValue

from env_service.environments.interface import (
    Action,
    ChatMessage,
    Opening,
    Round,
    Step,
    Task,
    ToolCall,
    TurnOf,
    text_of,
)
from env_service.environments.jsonl import JsonlTaskSource
from env_service.environments.rules import Rules
from env_service.environments.task_configs import JsonlTasks
from env_service.runtimes.config import RuntimesConfig
from env_service.runtimes.pool import RuntimePool, use_runtimes
from learner.algorithms.preset import ScoredBatch
from learner.algorithms.presets.custom import CustomConfig
from protocol.rewards import ScoreItem
from reward_service.config import RewardServiceConfig
from tests.docs.test_blocks import blocks
from tests.reward_service.serving import reachable, serving

EXAMPLES = Path(__file__).parents[2] / "examples"
VERIFIERS: Mapping[tuple[str, str], tuple[dict[str, JsonValue], Mapping[str, float]]] = {
    ("docs/from-zero.md", "def close"): ({"answer": 42}, {"42": 1.0, "it is 47": 0.5, "none": 0.0}),
    ("docs/rewards.md", "def mentions"): ({"keyword": "sail"}, {"They sail.": 1.0, "They sink.": 0.0}),
}
"""A verifier's arguments, and the reward of each completion."""
USED_HERE = (
    *VERIFIERS,
    ("docs/own-loss.md", "def only_good"),
    ("docs/environments-how-to.md", "class Countdown"),
    ("docs/environments-how-to.md", "class Dice"),
    ("docs/runtimes.md", "class Terminal"),
    ("docs/own-task.md", "pyarrow.parquet"),
    ("docs/rewards.md", "def as_in_verl"),
    ("docs/rewards.md", "for_trl"),
    ("docs/rewards.md", "RewardClient"),
)
OF_AN_EXAMPLE = {
    ("docs/environments.md", "class Guess"): ("own_environment/guess.py", "tests/docs/test_environments.py"),
    ("docs/environments-how-to.md", "class Chain"): (
        "branches/chain.py",
        "tests/env_service/rollouts/test_branching.py",
    ),
    ("docs/environments.md", "AsyncOpenAI"): ("own_agent/adder.py", "tests/docs/test_own_agent.py"),
    ("docs/harnesses.md", "function_tool"): (
        "harnesses/adder.py",
        "tests/env_service/harnesses/test_real_harnesses.py",
    ),
}
"""Blocks that are files of examples, and who runs these."""
ELSEWHERE = {
    ("docs/own-loss.md", "def tethered"): "tests/docs/test_own_loss.py trains a policy of three actions with it",
    ("docs/environments.md", "class Total:"): "tests/docs/test_environments.py puts it into a project and plays it",
    (
        "docs/environments-how-to.md",
        "def solve_one",
    ): "tests/docs/test_own_agent.py asks an env_service for a task with it",
    (
        "docs/environments-how-to.md",
        "class Desk",
    ): "a sketch: tests/env_service/rollouts/test_full_contexts.py gives each of its answers",
    (
        "docs/tinker.md",
        "tinker.ServiceClient()",
    ): "a whole server: tests/e2e/test_serve.py makes these calls",
    ("docs/from-zero.md", "headway.train("): "a whole system: tests/e2e/test_from_python.py makes these calls",
}
"""Blocks that are not run here, and why."""


def block(page: str, holding: str) -> str:
    (text,) = [text for place, text in blocks("python") if place.startswith(f"{page}:") and holding in text]
    return text


def module(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, name: str = "mine") -> None:
    """Makes it one that can be imported by this name."""
    (folder / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, name, raising=False)


def run(text: str, **names: object) -> ModuleType:
    """Runs the text with these names known before; returns the module that it defines."""
    made = ModuleType("shown")
    vars(made).update(names)
    exec(compile(text, "shown", "exec"), vars(made))
    return made


def test_every_block_is_run_here_or_said_to_be_run_elsewhere() -> None:
    known = [*USED_HERE, *OF_AN_EXAMPLE, *ELSEWHERE]
    found = [
        [one for one in known if place.startswith(f"{one[0]}:") and one[1] in text] for place, text in blocks("python")
    ]
    strange = [place for (place, _), those in zip(blocks("python"), found, strict=True) if len(those) != 1]
    assert strange == []
    assert sorted(one for those in found for one in those) == sorted(known), "a block that is gone"


@pytest.mark.parametrize(("page", "holding"), OF_AN_EXAMPLE)
def test_a_block_of_an_example_is_in_its_file_whole(page: str, holding: str) -> None:
    file, _ = OF_AN_EXAMPLE[page, holding]
    assert block(page, holding).partition("\n")[2] in (EXAMPLES / file).read_text(encoding="utf-8")


@pytest.mark.parametrize(("page", "holding"), VERIFIERS)
async def test_a_verifier_gives_the_rewards_that_its_page_speaks_of(
    page: str, holding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, rewards = VERIFIERS[page, holding]
    module(block(page, holding), tmp_path, monkeypatch)
    entry = {"name": "mine", "function": f"mine:{holding.removeprefix('def ')}"}

    async with serving(RewardServiceConfig.model_validate({"sandbox": "off", "verifiers": [entry]})) as service:
        results = await service.results(
            [ScoreItem(id=text, verifier="mine", completion=text, arguments=arguments) for text in rewards]
        )

    assert [result.reward for result in results] == pytest.approx(list(rewards.values())), results


def test_the_algorithm_trains_only_what_did_better_than_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module(block("docs/own-loss.md", "def only_good"), tmp_path, monkeypatch)
    preset = CustomConfig(type="custom", path="mine:only_good", options={"clip_high": 0.25}).preset()
    numbers = torch.arange(4)
    scored = ScoredBatch(
        rewards=torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64),
        groups=torch.tensor([0, 0, 1, 1]),
        truncated=torch.zeros(4, dtype=torch.bool),
        components=torch.zeros(4, 1, dtype=torch.float64),
        sequences=numbers,
        token_ids=numbers,
        turns=numbers,
        turn_states=numbers,
        lags=torch.zeros(4, dtype=torch.int64),
        behavior_logprobs=torch.zeros(4, dtype=torch.float64),
    )

    assert preset.advantages is not None
    advantages = preset.advantages(scored).advantages

    assert preset.name == "only_good"
    assert [bool(one > 0) for one in advantages] == [True, False, False, True]
    assert advantages.min() == 0


def test_the_game_says_whose_turn_it_is() -> None:
    text = block("docs/environments-how-to.md", "class Countdown")
    game = run(text, Task=Task, Action=Action, ChatMessage=ChatMessage, TurnOf=TurnOf, Round=Round).Countdown()

    opening = game.reset(Task(prompt=""), 0)
    assert (opening.player, opening.player in game.players) == ("first", True)
    following = game.step(Action("1"))
    assert following.next.player == "second"
    assert "There are 5." in following.next.observation[0].content


def test_the_environment_with_a_tool_rewards_what_the_tool_said() -> None:
    text = block("docs/environments-how-to.md", "class Dice")
    names = {one.__name__: one for one in (Action, ChatMessage, Opening, Rules, Step, Task)}
    dice = run(text, random=random, **names).Dice()

    opening = dice.reset(Task(seed=3), 0)
    called = dice.step(Action("", calls=(ToolCall("roll", {}, id="a1"),)))
    (result,) = called.observation
    said = dice.step(Action(f"It is {result.content}."))

    assert opening.tools[0]["function"]["name"] == result.name == "roll"
    assert (result.role, result.tool_call_id) == ("tool", "a1")
    assert (said.reward, said.stop) == (1.0, "said")


def test_the_reward_functions_of_other_trainers_judge() -> None:
    made = run(block("docs/rewards.md", "for_trl"))

    (reward,) = made.reward_funcs
    assert reward(completions=["4", "5"], answer=["4", "4"]) == [1.0, 0.0]
    assert made.compute_score("math", "4", "4", None) == 1.0
    with made.serving({}) as server:
        assert server.url.startswith("http://127.0.0.1:")


async def test_a_score_function_of_verls_is_called_with_the_tasks_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0 if data_source == "mine" and solution_str.endswith(ground_truth) else 0.25
"""
    module(scores, tmp_path, monkeypatch, name="scores")
    module(block("docs/rewards.md", "def as_in_verl"), tmp_path, monkeypatch)
    entry = {"name": "mine", "function": "mine:as_in_verl"}

    async with serving(RewardServiceConfig.model_validate({"sandbox": "off", "verifiers": [entry]})) as service:
        results = await service.results(
            [
                ScoreItem(id=text, verifier="mine", completion=text, arguments={"answer": "42"})
                for text in ("it is 42", "it is 41")
            ]
        )

    assert [result.reward for result in results] == [1.0, 0.25], results


def test_rows_of_parquet_become_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        {"question": "6*7?", "answer": "42", "level": 1},
        {"question": "Wie groß ist ½?", "answer": "0.5", "level": 2},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), "train.parquet")

    run(block("docs/own-task.md", "pyarrow.parquet"))

    entry = {"source": "jsonl", "name": "shown", "train_file": "tasks.jsonl", "verifier": "math", "chat": False}
    source = JsonlTaskSource(JsonlTasks.model_validate(entry))
    tasks = [source.task("train", number) for number in range(source.train_tasks)]
    assert [task.prompt for task in tasks] == ["6*7?", "Wie groß ist ½?"]
    assert [task.verification.arguments for task in tasks] == [{"answer": "42"}, {"answer": "0.5"}]


async def test_a_program_is_answered_by_a_reward_service() -> None:
    text = block("docs/rewards.md", "RewardClient")
    async with reachable(RewardServiceConfig.model_validate({"sandbox": "off"})) as url:
        rewards = await run(text.replace("http://127.0.0.1:7320", url)).score(["4", "five"], "4")

    assert rewards == [1.0, 0.0]


async def test_the_terminal_ends_when_its_file_is_there() -> None:
    pool = use_runtimes(RuntimePool(RuntimesConfig(spare=0)))
    try:
        terminal = run(block("docs/runtimes.md", "class Terminal")).Terminal()
        await terminal.reset(Task(), 0)
        assert "agent" in text_of((await terminal.step(Action("whoami"))).observation)
        assert (await terminal.step(Action("touch done"))).reward == 1.0
        await terminal.close()
    finally:
        await pool.close()
