"""From files to the units of a step: what each algorithm is given, and what is held out."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learner.config import LearnerConfig
from learner.data.sources import RecordError
from learner.offline_examples import Examples, in_step, read_units
from tests.learner.data.character_tokenizer import CharacterTokenizer, shown

PAIR = {"prompt": "2+2=", "chosen": "4", "rejected": "55", "margin": 0.5}
EXAMPLE = {"prompt": "2+2=", "completion": "4"}
TEACHER = {"name": "t", "path": "m"}


def read(tmp_path: Path, algo: dict[str, object], *records: object, **settings: Any) -> Examples:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    share = settings.pop("held_out_share", 0.0)
    config = {"model": "m", "algo": algo, "data": {"path": path, "held_out_share": share}, **settings}
    return read_units(LearnerConfig.model_validate(config), CharacterTokenizer())


def test_dpo_trains_the_completions_of_a_pair_the_chosen_one_first(tmp_path: Path) -> None:
    examples = read(tmp_path, {"type": "dpo"}, PAIR)
    ((chosen, rejected),) = examples.training
    assert shown(chosen) == ("2+2=4|", "....^^")
    assert shown(rejected) == ("2+2=55|", "....^^^")
    assert (chosen.margin, rejected.margin) == (0.5, 0.5)
    assert examples.form is None


def test_a_reward_model_is_trained_at_the_end_token_through_one_more_token(tmp_path: Path) -> None:
    """The score of a text is that of the state at its last token, which predicts the token that is appended."""
    examples = read(tmp_path, {"type": "rm"}, PAIR)
    ((chosen, rejected),) = examples.training
    assert shown(chosen) == ("2+2=4||", "......^")
    assert shown(rejected) == ("2+2=55||", ".......^")
    assert (chosen.margin, rejected.margin) == (0.5, 0.5)


def test_the_form_of_a_reward_models_pairs_is_known_and_only_one(tmp_path: Path) -> None:
    chat = {**PAIR, "prompt": [{"role": "user", "content": "2+2="}]}
    assert read(tmp_path, {"type": "rm"}, PAIR).form == "plain"
    assert read(tmp_path, {"type": "rm"}, chat).form == "chat"
    with pytest.raises(RecordError, match=r"data.jsonl has pairs of texts and of messages: .* split the file"):
        read(tmp_path, {"type": "rm"}, PAIR, chat)


@pytest.mark.parametrize("algo", ["rm", "dpo"])
def test_pairs_of_one_prompt_are_held_out_together(tmp_path: Path, algo: str) -> None:
    """Four prompts with three pairs each: half of the prompts is two, so six pairs."""
    records = [
        {"prompt": f"{prompt}=", "chosen": f"{number}7", "rejected": f"{number}"}
        for number in range(3)
        for prompt in "abcd"
    ]
    examples = read(tmp_path, {"type": algo}, *records, held_out_share=0.5)
    first, second = (
        {chr(chosen.token_ids[0]) for chosen, _ in part} for part in (examples.training, examples.held_out)
    )
    assert (len(examples.training), len(examples.held_out)) == (6, 6)
    assert (len(first), len(second)) == (2, 2)
    assert not first & second


def test_kto_reads_labels_and_sft_examples(tmp_path: Path) -> None:
    records = [{**EXAMPLE, "label": True}, {"prompt": "1+1=", "completion": "3", "label": False}]
    labelled = read(tmp_path, {"type": "dpo", "loss": "kto"}, *records).training
    assert [(len(unit), unit[0].label) for unit in labelled] == [(2, True), (2, False)]
    ((example,),) = read(tmp_path, {"type": "sft"}, EXAMPLE).training
    assert shown(example) == ("2+2=4|", "....^^")


def test_kto_puts_each_prompt_before_the_completion_of_another_prompt(tmp_path: Path) -> None:
    """Four of six records share a prompt: theirs meet the completions of the two others, never each other's."""
    records = [{"prompt": "a=", "completion": str(number), "label": True} for number in range(4)]
    records += [{"prompt": f"{name}=", "completion": name, "label": False} for name in "bc"]
    units = read(tmp_path, {"type": "dpo", "loss": "kto"}, *records).training
    for example, mismatched in units:
        prompt, completion = shown(example)[0][:2], shown(mismatched)[0][2:]
        assert mismatched.mismatched
        assert not example.mismatched
        assert shown(mismatched) == (prompt + completion, "..^^")
        assert (completion[0] in "bc") if prompt == "a=" else (completion[0] != prompt[0])
    again = read(tmp_path, {"type": "dpo", "loss": "kto"}, *records).training
    assert [shown(unit[1]) for unit in again] == [shown(unit[1]) for unit in units]
    assert [sequence.pair for sequence in in_step(units)] == [-1] * 12


def test_kto_cuts_what_it_only_measures_to_the_length_that_the_model_takes(tmp_path: Path) -> None:
    """A long prompt with the long completion of another one would be longer than any example is."""
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 12}')
    records = [{"prompt": "a" * 9 + "=", "completion": "1"}, {"prompt": "b=", "completion": "2" * 9}]
    labelled = [{**record, "label": True} for record in records]
    (first, cut), (_, other) = read(tmp_path, {"type": "dpo", "loss": "kto"}, *labelled, model=tmp_path).training
    assert shown(first) == ("aaaaaaaaa=1|", "..........^^")
    assert shown(cut) == ("aaaaaaaaa=222", "..........^^^")
    assert shown(other) == ("b=1|", "..^^")


def test_kto_needs_a_second_prompt(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"has one prompt only: kto compares .* give it examples of two prompts"):
        read(tmp_path, {"type": "dpo", "loss": "kto"}, {**EXAMPLE, "label": True}, {**EXAMPLE, "label": False})


def test_a_teachers_logprobs_of_the_data_are_candidates_at_the_trained_tokens(tmp_path: Path) -> None:
    """Two trained tokens, the answer and the end token, with the teacher's two most probable tokens for each."""
    top = {"top_ids": [[52, 53], [0, 52]], "top_logprobs": [[-0.25, -2.0], [-0.5, -1.0]]}
    ((example,),) = read(tmp_path, {"type": "distill"}, {**EXAMPLE, **top}).training
    assert example.candidates is not None
    assert example.candidates.token_ids.tolist() == [[0, 0]] * 4 + [[52, 53], [0, 52]]
    assert example.candidates.logprobs.tolist() == [[0, 0]] * 4 + [[-0.25, -2.0], [-0.5, -1.0]]


def test_what_is_distilled_comes_from_the_data_or_from_one_teacher(tmp_path: Path) -> None:
    top = {"top_ids": [[52], [0]], "top_logprobs": [[-0.25], [-0.5]]}
    ((example,),) = read(tmp_path, {"type": "distill"}, EXAMPLE, teachers=[TEACHER]).training
    assert example.candidates is None
    with pytest.raises(RecordError, match=r"data.jsonl holds no logprobs of a teacher and no teacher is set"):
        read(tmp_path, {"type": "distill"}, EXAMPLE)
    with pytest.raises(RecordError, match=r"data.jsonl holds a teacher's logprobs and learner.teachers sets one, too"):
        read(tmp_path, {"type": "distill"}, {**EXAMPLE, **top}, teachers=[TEACHER])


def test_the_pairs_of_a_step_are_numbered_and_single_examples_are_not(tmp_path: Path) -> None:
    pairs = read(tmp_path, {"type": "dpo"}, PAIR, {**PAIR, "prompt": "3+3="}).training
    assert [sequence.pair for sequence in in_step(pairs)] == [0, 0, 1, 1]
    assert [sequence.pair for sequence in in_step(list(reversed(pairs)))] == [0, 0, 1, 1]
    examples = read(tmp_path, {"type": "sft"}, EXAMPLE, EXAMPLE).training
    assert [sequence.pair for sequence in in_step(examples)] == [-1, -1]
    assert all(np.array_equal(s.token_ids, examples[0][0].token_ids) for s in in_step(examples))
