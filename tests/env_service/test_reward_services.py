"""Reward services as they are configured."""

from pathlib import Path

import pytest

from env_service.app import client_settings, reward_client
from env_service.config import EnvServiceConfig
from protocol.rewards import ScoreItem
from services.config.models import load_config
from services.config.sources import ConfigError
from services.http.metrics import Metrics
from services.rewards.settings import HedgeSettings
from tests.env_service.peers import ScriptedRewards, served


def load(tmp_path: Path, text: str) -> EnvServiceConfig:
    path = tmp_path / "run.toml"
    path.write_text(f'[env-service]\nmodel = "m"\n{text}')
    return load_config(EnvServiceConfig, process="env-service", argv=["--config", str(path)], environ={})


async def test_a_verifiers_own_service_is_asked_and_all_else_is_asked_of_the_others(tmp_path: Path) -> None:
    general, code = ScriptedRewards(lambda *_: 1.0), ScriptedRewards(lambda *_: 2.0)
    async with served(general.handle, "/v1/score") as one, served(code.handle, "/v1/score") as two:
        config = load(
            tmp_path,
            f"""
            reward_urls = ["{one}"]
            [[env-service.rewards]]
            url = "{two}/"
            verifiers = ["code", "ifeval"]
            """,
        )
        async with reward_client(config, metrics=Metrics("env-service")) as client:
            items = [ScoreItem(id=name, verifier=name, completion="x") for name in ("math", "code", "ifeval")]
            assert [scored.reward for scored in await client.score(items)] == [1.0, 2.0, 2.0]
            assert await client.unready() == ()
    assert client.urls == (one, f"{two}/")


def test_hedging_is_off_unless_it_is_asked_for(tmp_path: Path) -> None:
    assert client_settings(load(tmp_path, "")).hedging is None
    asked = load(tmp_path, "[env-service.scoring]\nhedge_share = 0.1\nhedge_after_s = 2.0\n")
    assert client_settings(asked).hedging == HedgeSettings(share=0.1, after_s=2.0, percentile=0.95)


def test_somebody_has_to_score(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, "reward_urls = []")

    assert "name at least one reward service" in "\n".join(raised.value.problems)


def test_nobody_has_to_score_what_environments_may_reward_themselves(tmp_path: Path) -> None:
    own = '[[env-service.environments]]\nname = "own"\nsource = "mine:World"\n'

    assert not load(tmp_path, own).needs_rewards
    assert load(tmp_path, f"reward_urls = []\n{own}").reward_urls == ()
    assert load(tmp_path, f'{own}[[env-service.environments]]\nname = "sums"\nsource = "addition"\n').needs_rewards


def test_a_service_for_no_verifier_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, '[[env-service.rewards]]\nurl = "http://127.0.0.1:1"\nverifiers = []')

    assert "verifiers: got []" in "\n".join(raised.value.problems)
