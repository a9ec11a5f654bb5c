"""The built-in games and arithmetic through the rollout loop, and the examples that warm a tiny model up on them."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from env_service.environments import catalog
from env_service.environments.task_configs import ClassTasks
from env_service.environments.tokenization import Tokenization
from examples.maze.make_model import CHARACTERS, conversation, environment_of, tokenizer_of_characters
from learner.data.examples import example_parts, tokenize
from protocol.generation import GeneratePart, GenerateRequest, Sampling
from protocol.trajectories import Trajectory
from tests.env_service.bench import MakeBench, benches
from tests.env_service.chat_models import model_with
from tests.env_service.peers import lease, part

ROOT = Path(__file__).parents[3]
SOURCES: dict[str, dict[str, Any]] = {
    "maze": {},
    "sokoban": {"layout": "rows"},
    "sliding_puzzle": {"moves": "letters"},
    "nim": {"whole_state": False},
    "guessing": {"tries": 6},
    "wordle": {"length": 3, "tries": 15},
    "arithmetic": {"form": "text"},
}
SEED = lease().seed


class TrajectoryLines:
    """A generator's script: what the one trajectory says, turn by turn."""

    def __init__(self, model: Path, lines: Sequence[str]) -> None:
        tokenization = Tokenization(model)
        (end,) = (tokenization.special_tokens[token] for token in tokenization.end_tokens)
        self._turns = [[*tokenization.encode_after("", line), end] for line in lines]

    def __call__(self, request: GenerateRequest) -> Sequence[GeneratePart]:
        _, _, turn = request.request_id.rpartition("/")[2].partition(".")
        return [part(0, self._turns[int(turn or 0)])]


async def rolled_out(
    make: MakeBench, model: Path, source: str, options: dict[str, Any]
) -> tuple[list[dict[str, str]], Trajectory]:
    """Words of the environment's own player, and the trajectory in which the policy says the same."""
    entry = ClassTasks.model_validate({"source": source, "name": "mine", "options": options})
    offered = catalog.build([entry])["mine"]
    task: Any = offered.tasks.task("train", 0)
    player: Any = offered.start()
    turns = offered.rules.max_turns
    messages, reward = await conversation(player, task, noise=0.0, chance=Random(0), turns=turns, seed=SEED)
    assert reward == 1.0
    lines = [message["content"] for message in messages if message["role"] == "assistant"]
    made = await make(TrajectoryLines(model, lines), extra=[offered])
    granted = lease(environment="mine", group_size=1).model_copy(update={"sampling": Sampling(max_tokens=16)})
    (trajectory,) = (await made.finished(granted)).group.trajectories
    return messages, trajectory


@pytest.fixture
async def chat(tmp_path: Path) -> AsyncIterator[tuple[MakeBench, Path]]:
    model = model_with("chatml", tmp_path)
    async with benches(model) as make:
        yield make, model


@pytest.mark.parametrize("source", SOURCES)
async def test_what_wins_alone_wins_in_a_rollout(chat: tuple[MakeBench, Path], source: str) -> None:
    messages, trajectory = await rolled_out(*chat, source, SOURCES[source])

    turns = sum(message["role"] == "assistant" for message in messages)
    assert trajectory.stop_reason in ("won", "right")
    assert trajectory.reward.reward == 1.0
    assert len(trajectory.turns) == turns
    assert trajectory.reward.components["success"] == 1.0
    assert all(turn.state for turn in trajectory.turns)


@pytest.mark.parametrize("source", ["maze", "arithmetic"])
async def test_a_tiny_model_is_warmed_up_on_the_tokens_that_rollouts_have(tmp_path: Path, source: str) -> None:
    tokenizer = tokenizer_of_characters()
    tokenizer.save_pretrained(tmp_path)
    options: dict[str, Any] = {"form": "text"} if source == "arithmetic" else {"system_prompt": "", "invalid_text": ""}
    async with benches(tmp_path) as make:
        messages, trajectory = await rolled_out(make, tmp_path, source, options)

    example = tokenize(example_parts({"messages": messages}, tokenizer), tokenizer)

    assert trajectory.token_ids.tolist() == example.token_ids.tolist()
    assert trajectory.loss_mask.astype(bool).tolist() == example.loss_mask.tolist()


@pytest.mark.parametrize("example", ["maze", "arithmetic", "calculator"])
async def test_an_examples_conversations_have_known_characters_and_fit_the_model(example: str) -> None:
    offered = environment_of(ROOT / "examples" / example / "run.toml")
    for index in range(30):
        task: Any = offered.tasks.task("train", index)
        player: Any = offered.start()
        turns = offered.rules.max_turns
        messages, _ = await conversation(player, task, noise=0.9, chance=Random(index), turns=turns)
        text = "".join(message["content"] + ">" for message in messages)

        assert set(text) <= set(CHARACTERS)
        assert len(text) <= 256
        assert messages[-1]["role"] == "assistant"
