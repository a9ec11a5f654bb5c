"""Task sources, and the config that names them."""

import json
import re
from pathlib import Path

import pytest

from env_service.config import EnvServiceConfig
from env_service.environments.catalog import build, longest_prompt
from env_service.environments.interface import ChatMessage, Verification, text_of
from env_service.environments.jsonl import Addition, JsonlTaskSource, split
from env_service.environments.task_configs import JsonlTasks, ReasoningGymTasks
from env_service.environments.task_files import TaskFileError
from env_service.environments.tokenization import Tokenization
from services.config.models import load_config
from services.config.sources import ConfigError


def test_addition_splits_all_pairs_once_and_the_same_way_each_time() -> None:
    train, evaluation = split()

    assert (len(train), len(evaluation)) == (8_000, 2_000)
    assert sorted(train + evaluation) == list(range(10_000))
    assert split() == (train, evaluation)
    assert (train[:3], evaluation[:3]) == ([2910, 3678, 2587], [658, 5193, 68])


def test_addition_asks_for_a_sum_of_three_digits() -> None:
    tasks = Addition()

    for purpose, count in (("train", tasks.train_tasks), ("evaluate", tasks.evaluation_tasks)):
        for index in range(0, count, 97):
            task = tasks.task("train" if purpose == "train" else "evaluate", index)
            assert isinstance(task.prompt, str)
            left, right = task.prompt.rstrip("=").split("+")
            assert (task.prompt, len(task.prompt)) == (f"{left}+{right}=", 6)
            assert task.verification == Verification("exact_match", {"answer": f"{int(left) + int(right):03d}"})


def _write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def _jsonl(path: Path, **settings: object) -> JsonlTasks:
    return JsonlTasks.model_validate({"source": "jsonl", "name": "mine", "train_file": path, **settings})


def test_jsonl_lines_become_tasks(tmp_path: Path) -> None:
    path = _write(
        tmp_path / "t.jsonl",
        {"prompt": "1+1?", "answer": "2"},
        "",
        {
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
            "verifier": "math",
            "arguments": {"answer": "3"},
        },
    )

    tasks = JsonlTaskSource(_jsonl(path, verifier="exact_match", system_prompt="Be brief."))

    assert (tasks.train_tasks, tasks.evaluation_tasks) == (2, 0)
    first, second = tasks.task("train", 0), tasks.task("train", 1)
    assert first.prompt == (ChatMessage("system", "Be brief."), ChatMessage("user", "1+1?"))
    assert first.verification == Verification("exact_match", {"answer": "2"})
    assert second.prompt == (ChatMessage("system", "s"), ChatMessage("user", "u"))
    assert second.verification == Verification("math", {"answer": "3"})


def test_jsonl_prompts_stay_plain_text_without_chat(tmp_path: Path) -> None:
    path = _write(tmp_path / "t.jsonl", {"prompt": "Once", "verifier": "v"})
    held_out = _write(tmp_path / "e.jsonl", {"prompt": "Twice", "verifier": "v"})

    tasks = JsonlTaskSource(_jsonl(path, chat=False, evaluation_file=held_out))

    assert [tasks.task("train", 0).prompt, tasks.task("evaluate", 0).prompt] == ["Once", "Twice"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{not json", "is no JSON object"),
        ({"prompt": "a", "verifier": "v", "promt": "b"}, "did you mean prompt?"),
        ({"verifier": "v"}, "either messages or prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}], "verifier": "v"}, "either messages or prompt"),
        (
            {"messages": [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}], "verifier": "v"},
            "the last of the messages is of the assistant: expected the user's",
        ),
        ({"messages": [{"role": "boss", "content": "b"}], "verifier": "v"}, "messages.0.role"),
        ({"prompt": "a", "answer": "b"}, "names no verifier"),
    ],
)
def test_a_bad_line_is_an_error_that_names_file_and_line(tmp_path: Path, line: object, complaint: str) -> None:
    path = _write(tmp_path / "t.jsonl", {"prompt": "fine", "verifier": "v"}, line)

    with pytest.raises(TaskFileError) as raised:
        JsonlTaskSource(_jsonl(path))

    assert f"{path}:2: " in str(raised.value)
    assert complaint in str(raised.value)


def test_a_missing_or_empty_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match="No such file"):
        JsonlTaskSource(_jsonl(tmp_path / "absent.jsonl"))
    with pytest.raises(TaskFileError, match="holds no task"):
        JsonlTaskSource(_jsonl(_write(tmp_path / "empty.jsonl", "")))


def _gym(**settings: object) -> ReasoningGymTasks:
    given = {"source": "reasoning_gym", "name": "gym", "dataset": "basic_arithmetic", **settings}
    return ReasoningGymTasks.model_validate(given)


async def test_reasoning_gym_tasks_carry_what_the_scorer_needs() -> None:
    from env_service.environments.procedural import ReasoningGymSource

    tasks = ReasoningGymSource(_gym(system_prompt="Answer.", config={"max_terms": 2}))

    task = await tasks.task("train", 3)

    assert task == await tasks.task("train", 3)
    assert isinstance(task.prompt, tuple)
    assert [message.role for message in task.prompt] == ["system", "user"]
    arguments = task.verification.arguments
    assert (task.verification.verifier, arguments["dataset"]) == ("reasoning_gym", "basic_arithmetic")
    entry = arguments["entry"]
    assert isinstance(entry, dict)
    assert set(entry) == {"question", "answer", "metadata"}
    assert task.prompt[1].content == entry["question"]
    assert task.privileged == entry["answer"], "a teacher may be shown it"


async def _longest(**settings: object) -> int:
    """The digits of the longest number in some of the questions of chain_sum."""
    from env_service.environments.procedural import ReasoningGymSource

    tasks = ReasoningGymSource(_gym(dataset="chain_sum", **settings))
    texts = [text_of((await tasks.task("train", index)).prompt) for index in range(20)]
    return max(len(number) for text in texts for number in re.findall(r"\d+", text))


async def test_a_level_of_the_curriculum_sets_the_difficulty_and_settings_go_before() -> None:
    assert await _longest(level=0) < await _longest(level=3) < await _longest(level=100)
    assert await _longest(level=0, levels={"num_digits": 5}) == 6
    assert await _longest(level=5, config={"min_digits": 1, "max_digits": 1}) == 1
    assert await _longest(level=2, easier_too=False) >= await _longest(level=1)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dataset": "acre", "level": 1}, "No curriculum registered for dataset 'acre'"),
        ({"dataset": "chain_sum", "levels": {"digits": 1}}, "no digits; expected some of num_terms, num_digits"),
        ({"dataset": "chain_sum", "levels": {"num_digits": 100}}, "num_digits"),
        ({"dataset": "survo", "level": 50}, "at level 50: max_empty"),
        ({"dataset": "chain_sum", "config": {"seed": 1}}, "seed"),
    ],
)
def test_a_level_that_a_dataset_does_not_have_is_named(settings: dict[str, object], said: str) -> None:
    from env_service.environments.procedural import ReasoningGymSource, UnknownDataset

    with pytest.raises(UnknownDataset, match=said):
        ReasoningGymSource(_gym(**settings))


async def test_reasoning_gym_evaluation_tasks_are_not_training_tasks() -> None:
    from env_service.environments.procedural import ReasoningGymSource

    tasks = ReasoningGymSource(_gym(train_tasks=50, evaluation_tasks=20, config={"min_digits": 4, "max_digits": 5}))

    train = {(await tasks.task("train", index)).prompt for index in range(50)}
    evaluation = {(await tasks.task("evaluate", index)).prompt for index in range(20)}

    assert len(train) == 50
    assert not train & evaluation


def test_an_unknown_dataset_is_an_error_that_names_it() -> None:
    from env_service.environments.procedural import ReasoningGymSource, UnknownDataset

    with pytest.raises(UnknownDataset, match=r"no dataset 'basic_arithmetics'; did you mean basic_arithmetic\?"):
        ReasoningGymSource(_gym(dataset="basic_arithmetics"))
    with pytest.raises(UnknownDataset, match="max_term"):
        ReasoningGymSource(_gym(config={"max_term": 2}))


def _load(tmp_path: Path, text: str) -> EnvServiceConfig:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return load_config(EnvServiceConfig, process="env-service", argv=["--config", str(path)], environ={})


def test_environments_come_from_a_list_of_tables(tmp_path: Path) -> None:
    config = _load(
        tmp_path,
        """
        [env-service]
        model = "models/tiny"
        reward_urls = ["http://127.0.0.1:1"]
        [[env-service.environments]]
        name = "sums"
        source = "addition"
        [[env-service.environments]]
        name = "chains"
        source = "reasoning_gym"
        dataset = "chain_sum"
        config = {max_terms = 3}
        """,
    )

    assert [(each.name, each.source) for each in config.environments] == [
        ("sums", "addition"),
        ("chains", "reasoning_gym"),
    ]


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        ('source = "additions"\nname = "a"', "Expected one of addition, "),
        ('source = "addition"\nnam = "a"', "nam"),
        ('source = "reasoning_gym"\nname = "a"', "dataset"),
        ('source = "addition"\n[[env-service.environments]]\nsource = "addition"', "addition is used twice"),
    ],
)
def test_a_mistake_in_an_environment_is_named(tmp_path: Path, table: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        _load(tmp_path, f'[env-service]\nmodel = "m"\n[[env-service.environments]]\n{table}\n')

    assert complaint in "\n".join(raised.value.problems)


def test_of_an_endless_prompt_no_more_is_tokenized_than_says_that_it_is_too_long(model: Path, tmp_path: Path) -> None:
    line = {"verifier": "exact_match", "arguments": {"answer": "2"}}
    prompts = ["1+1=", "1+2=" * 1_250_000]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({**line, "prompt": each}) + "\n" for each in prompts))
    entry = {"name": "sums", "source": "jsonl", "chat": False, "train_file": str(tmp_path / "tasks.jsonl")}
    config = EnvServiceConfig.model_validate({"model": str(model), "environments": [entry]})

    longest = longest_prompt(build(config.environments), Tokenization(model), context_tokens=512)

    assert longest is not None
    assert longest.at_least
    assert longest.where.endswith("tasks.jsonl:2")
    assert 512 < longest.tokens < 50_000
