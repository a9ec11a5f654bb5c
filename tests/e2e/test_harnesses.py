"""The harnesses themselves against the real vLLM: each token is one that the engine sampled where it is trained.

The model has random weights. It calls no tool that could be read, so each harness does what it does with a model that
errs: the one that must have a call asks for it again, the others take the words for an answer.
"""

import json
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from env_service.environments.rules import Rules
from env_service.environments.tokenization import Tokenization
from env_service.harnesses.catalog import HARNESSES, HarnessName
from env_service.harnesses.environment import HarnessAgent, HarnessOptions
from env_service.harnesses.installing import is_installed
from env_service.rollouts.completions import RolloutProgress
from env_service.runtimes.config import RuntimeLimits, RuntimesConfig
from env_service.runtimes.pool import RuntimePool, use_runtimes
from protocol.messages import FinishedLease
from protocol.trajectories import Trajectory
from tests.conftest import launching
from tests.e2e.processes import until
from tests.e2e.run_files import free_ports
from tests.env_service.agents.served import AgentBench, MakeAgentBench, agent, agent_benches
from tests.env_service.chat_models import model_with
from tests.env_service.harnesses.conftest import COUNT, turns_of
from tests.env_service.harnesses.installed import FOLDER, python_with
from tests.env_service.peers import lease, serving

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TOLERANCE = 1e-3
TOKENS = 12
PLACES = 16_384
# A harness that wants a call asks for it until its own limit or that of the turns.
TURNS = {"mini-swe-agent": 3, "smolagents": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with random weights, a byte-level tokenizer and a chat template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = model_with("chatml", tmp_path_factory.mktemp("model"))
    words = Tokenization(folder)
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=512,
        max_position_embeddings=PLACES,
        eos_token_id=words.special_tokens[min(words.end_tokens)],
        dtype=torch.float32,
        **size,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def generator(model: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a generator that serves the model as it is."""
    if not any(is_installed(name, folder=FOLDER) for name in HARNESSES):
        pytest.skip("needs harnesses in environments of their own: make harnesses")
    (port,) = free_ports(1)
    folder = tmp_path_factory.mktemp("generator")
    file = folder / "generator.toml"
    file.write_text(
        f'[generator]\nmodel = "{model}"\nhttp = {{ port = {port} }}\njoin = {{ learner = "none" }}\n'
        f'engine = {{ dtype = "float32", max_model_len = {PLACES}, max_num_seqs = 8, kv_cache_gb = 0.25 }}\n'
    )
    with launching(request.config, folder) as launch:
        process, url = launch("generator", "--config", str(file)), f"http://127.0.0.1:{port}"
        until(lambda: is_ready(url), what="the generator", during=[process])
        yield url


def is_ready(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{url}/readyz", timeout=2) as answer:
        return bool(answer.status == 200)
    return False


@pytest.fixture
async def runtimes() -> AsyncIterator[RuntimePool]:
    """Runtimes with a small disk, and the usual memory, in which a harness has room."""
    pool = use_runtimes(RuntimePool(RuntimesConfig(spare=0, limits=RuntimeLimits(disk_mib=8))))
    yield pool
    await pool.close()


@pytest.fixture
async def agents(model: Path) -> AsyncIterator[MakeAgentBench]:
    async with agent_benches(model) as make:
        yield make


async def trajectory_of(
    name: HarnessName, generator: str, agents: MakeAgentBench, folder: Path, *, inside: bool
) -> Trajectory:
    (folder / "tasks.jsonl").write_text(json.dumps(COUNT))
    options = HarnessOptions.model_validate(
        {
            "harness": name,
            "python": python_with(name),
            "tasks": {"computer": {"train_file": folder / "tasks.jsonl"}},
            "timeout_s": 200.0,
            "inside": inside,
        }
    )
    rules = Rules(max_turns=3)
    offered = replace(agent(lambda: HarnessAgent(options), rules=rules), tasks=HarnessAgent.tasks(options))
    made: AgentBench = await agents(offered=offered, timeout_s=240.0, silence_s=60.0, environment_timeout_s=60.0)
    made.fleet.replace([serving("real", generator)])
    granted = lease(environment="agent", group_size=1)
    granted = granted.model_copy(update={"sampling": granted.sampling.model_copy(update={"max_tokens": TOKENS})})
    outcome = await made.rollout.run(granted, RolloutProgress())
    assert isinstance(outcome, FinishedLease), outcome
    (trajectory,) = outcome.group.trajectories
    return trajectory


@pytest.mark.parametrize("inside", [False, True], ids=["beside", "inside"])
@pytest.mark.parametrize("name", list(HARNESSES))
async def test_the_logprobs_are_those_of_the_model_on_the_trained_tokens(
    name: HarnessName,
    inside: bool,
    generator: str,
    model: Path,
    agents: MakeAgentBench,
    tmp_path: Path,
    runtimes: RuntimePool,
) -> None:
    """With a single id that differed, in what was sampled or shown before, the logprobs would not agree."""
    import torch
    from transformers import AutoModelForCausalLM

    trajectory = await trajectory_of(name, generator, agents, tmp_path, inside=inside)

    assert len(trajectory.turns) == TURNS.get(name, 1)
    policy = AutoModelForCausalLM.from_pretrained(model)
    for (shown, sampled), turn in zip(turns_of(trajectory), trajectory.turns, strict=True):
        assert 1 <= len(sampled) <= TOKENS
        with torch.no_grad():
            logits = policy(torch.tensor([[*shown, *sampled]])).logits[0].float()
        rows = torch.log_softmax(logits, -1)[len(shown) - 1 : -1]
        scored = np.array([rows[place, token].item() for place, token in enumerate(sampled)])
        told = trajectory.behavior_logprobs[turn.completion_start : turn.end]
        assert np.abs(scored - told).max() < TOLERANCE
