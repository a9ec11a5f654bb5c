"""Completions of models that mark their thoughts with tokens of their own: what environments and verifiers are told."""

from datetime import datetime
from pathlib import Path

import pytest

from env_service.environments.bridges import Bridges
from env_service.environments.interface import Action, ChatMessage, Opening, Step, Task, Verification
from env_service.environments.rules import History, Rules
from env_service.environments.tokenization import Tokenization
from env_service.rollouts import summaries
from env_service.rollouts.speech import Language
from tests.env_service.agents.served import Saying
from tests.env_service.bench import benches
from tests.env_service.chat_models import model_with
from tests.env_service.environments.test_thinking_marks import GEMMA, HARMONY
from tests.env_service.peers import lease
from tests.env_service.rollouts.test_conversation import offered

SAID = {"channels": HARMONY, "results_within_calls": GEMMA}
THOUGHT, ANSWER = "<to>3</to>?", "Go <to>4</to>"
MOVES = {name: text.replace("3 or 4?", THOUGHT).replace("It is 3.", ANSWER) for name, text in SAID.items()}


def test_a_stop_text_is_looked_for_in_what_is_told_and_not_in_the_marks(tmp_path: Path) -> None:
    tokenization = Tokenization(model_with("channels", tmp_path))
    opening = Opening((ChatMessage("user", "go"),))
    ids = tokenization.encode_after("", HARMONY)
    for stop, ends in (("final", False), ("It is", True)):
        language = Language(
            tokenization=tokenization, bridges=Bridges(tokenization), rules=Rules(stop=(stop,)), opening=opening,
            opening_ids=(), stop_ids=frozenset(), now=datetime.now(),
        )  # fmt: skip
        end = language.end_of()
        assert end is not None
        assert (end(ids) is not None) == ends


@pytest.mark.parametrize("history", ["append", "split"])
@pytest.mark.parametrize("name", MOVES)
async def test_a_thought_is_told_in_tags_holds_no_action_and_is_not_shown_again(
    name: str, history: History, tmp_path: Path
) -> None:
    model = model_with(name, tmp_path)
    policy, heard = Saying(model, lambda _: MOVES[name]), []

    class Going:
        def reset(self, task: Task, seed: int) -> Opening:
            return Opening((ChatMessage("user", "go"),))

        def step(self, action: Action) -> Step:
            heard.append((action.text, action.value))
            if len(heard) == 1:
                return Step((ChatMessage("user", "and then?"),))
            return Step(verification=Verification("exact_match", {"answer": "4"}))

    rules = Rules(action="tag:to", history=history, max_turns=3)
    async with benches(model) as bench:
        made = await bench(policy, extra=[offered(rules, start=Going)])
        await made.finished(lease(environment="counting", group_size=1))

    assert heard == [(f"<think>{THOUGHT}</think>{ANSWER}", "4")] * 2
    (item,) = made.rewards[0].requests[0].items
    assert item.completion == heard[0][0]
    assert item.messages[1].content.endswith(ANSWER)
    assert not any("<think>" in message.content for message in item.messages)
    assert not any("<think>" in prompt for prompt in policy.prompts), "its template has other marks"
    assert ANSWER in policy.prompts[1]
    assert (THOUGHT in policy.prompts[1]) == (history == "append")


async def test_a_summary_is_what_was_said_without_its_thought(tmp_path: Path) -> None:
    model = model_with("chatml", tmp_path)
    asks = f"{summaries.REQUEST.content}<|im_end|>\n<|im_start|>assistant"
    policy = Saying(model, lambda prompt: "<think>hm</think>THE SUM" if prompt.rstrip().endswith(asks) else "go on")

    class TaleTelling:
        def reset(self, task: Task, seed: int) -> Opening:
            return Opening((ChatMessage("user", "go"),))

        def step(self, action: Action) -> Step:
            return Step(stop="over") if action.last else Step((ChatMessage("user", "a long tale " * 4),))

    rules = Rules(history="summarize", context_tokens=160, max_turns=6)
    async with benches(model) as bench:
        made = await bench(policy, extra=[offered(rules, start=TaleTelling)])
        await made.finished(lease(environment="counting", group_size=1))

    after = [prompt for prompt in policy.prompts if "THE SUM" in prompt]
    assert after
    assert not any("hm" in prompt for prompt in after)
