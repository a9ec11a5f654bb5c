import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from learner.algorithms.config import RmConfig, SftConfig
from learner.config import DataConfig, LearnerConfig
from learner.data.errors import DataError
from learner.offline_examples import reward_input
from protocol.reward_models import RewardInput

PLAIN = {"prompt": "a", "chosen": "b", "rejected": "c"}
CHAT = {"prompt": [{"role": "user", "content": "a"}], "chosen": "b", "rejected": "c"}
WHOLE = {
    "chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    "rejected": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}],
}


def config(folder: Path, records: Sequence[Mapping[str, object]], *, algo: RmConfig | SftConfig) -> LearnerConfig:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return LearnerConfig(model=folder, algo=algo, data=DataConfig(path=path))


def test_a_reward_model_of_texts_reads_prompt_and_completion_apart(tmp_path: Path) -> None:
    found = reward_input(config(tmp_path, [PLAIN, PLAIN], algo=RmConfig()))
    assert found == RewardInput(format="plain", tokenize="apart")


@pytest.mark.parametrize("record", [CHAT, WHOLE])
def test_a_reward_model_of_messages_reads_by_the_chat_template(tmp_path: Path, record: Mapping[str, object]) -> None:
    found = reward_input(config(tmp_path, [record], algo=RmConfig()))
    assert found == RewardInput(format="chat", tokenize="apart")


def test_texts_and_messages_in_one_file_are_refused_for_a_reward_model(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="split the file"):
        reward_input(config(tmp_path, [PLAIN, CHAT], algo=RmConfig()))


def test_other_algorithms_make_no_reward_model(tmp_path: Path) -> None:
    assert reward_input(config(tmp_path, [PLAIN], algo=SftConfig())) is None
