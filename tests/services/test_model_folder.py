"""Fingerprints change with what decides the meaning of tokens and weights, and with nothing else."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from services.model_folder import (
    chat_template,
    experts_of,
    fingerprint_directory,
    has_experts,
    positions,
    template_digest,
    template_in,
)

CONFIG = {"model_type": "llama", "hidden_size": 8, "vocab_size": 16, "tie_word_embeddings": True}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_json(tmp_path / "config.json", CONFIG)
    write_json(tmp_path / "tokenizer.json", {"model": {"vocab": {"a": 0}}})
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": "a", "chat_template": "{{ messages }}"})
    return tmp_path


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def other_width(model: Path) -> None:
    write_json(model / "config.json", CONFIG | {"hidden_size": 16})


def untied(model: Path) -> None:
    write_json(model / "config.json", CONFIG | {"tie_word_embeddings": False})


def other_vocabulary(model: Path) -> None:
    write_json(model / "tokenizer.json", {"model": {"vocab": {"b": 0}}})


def more_merges(model: Path) -> None:
    (model / "merges.txt").write_text("a b\n", encoding="utf-8")


def other_template(model: Path) -> None:
    write_json(model / "tokenizer_config.json", {"eos_token": "a", "chat_template": "{{ messages[0] }}"})


def template_in_a_file(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ messages | length }}", encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (other_width, "model"),
        (untied, "model"),
        (other_vocabulary, "tokenizer"),
        (more_merges, "tokenizer"),
        (other_template, "chat_template"),
        (template_in_a_file, "chat_template"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_change_shows_in_its_own_fingerprint_alone(model: Path, change: Callable[[Path], None], part: str) -> None:
    before = fingerprint_directory(model).model_dump()
    change(model)
    after = fingerprint_directory(model).model_dump()
    assert {name for name in before if before[name] != after[name]} == {part}


def test_a_template_of_a_file_counts_as_if_the_model_had_it(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages | length }}", encoding="utf-8")
    given = fingerprint_directory(model, file)
    assert given != fingerprint_directory(model)
    template_in_a_file(model)
    assert given == fingerprint_directory(model)


def test_what_a_template_is_told_is_a_part_of_it(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages | length }}", encoding="utf-8")
    for template in (None, file):
        plain = fingerprint_directory(model, template)
        told = fingerprint_directory(model, template, {"enable_thinking": False, "mode": "x"})
        assert fingerprint_directory(model, template, {}) == plain
        assert told == fingerprint_directory(model, template, {"mode": "x", "enable_thinking": False})
        assert told != fingerprint_directory(model, template, {"enable_thinking": True, "mode": "x"})
        assert told.model_copy(update={"chat_template": plain.chat_template}) == plain


def test_order_of_keys_release_and_weights_do_not_matter(model: Path) -> None:
    before = fingerprint_directory(model)
    reordered = {"transformers_version": "99", "dtype": "float16", **dict(reversed(CONFIG.items()))}
    write_json(model / "config.json", reordered)
    (model / "model.safetensors").write_bytes(b"other weights")
    assert fingerprint_directory(model) == before


def test_a_template_in_a_file_wins_over_the_one_in_the_settings(model: Path) -> None:
    assert chat_template(model) == "{{ messages }}"
    template_in_a_file(model)
    assert chat_template(model) == "{{ messages | length }}"


def test_the_mark_with_which_some_editors_begin_a_file_is_no_part_of_a_template(tmp_path: Path) -> None:
    """Jinja would put it before every prompt."""
    bare, marked = tmp_path / "bare.jinja", tmp_path / "marked.jinja"
    bare.write_text("{{ messages }}", encoding="utf-8")
    marked.write_text("{{ messages }}", encoding="utf-8-sig")
    assert template_in(marked) == template_in(bare)
    assert template_digest(marked) == template_digest(bare)


def test_a_model_without_a_template_has_an_empty_one(model: Path) -> None:
    (model / "tokenizer_config.json").unlink()
    assert chat_template(model) == ""
    write_json(model / "tokenizer_config.json", {"chat_template": None})
    assert chat_template(model) == ""


@pytest.mark.parametrize(("missing", "named"), [("config.json", "config.json"), ("tokenizer.json", "tokenizer")])
def test_a_missing_file_is_named(model: Path, missing: str, named: str) -> None:
    (model / missing).unlink()
    with pytest.raises(FileNotFoundError, match=named):
        fingerprint_directory(model)


def test_a_configuration_that_is_no_object_is_refused(model: Path) -> None:
    write_json(model / "config.json", [1])
    with pytest.raises(ValueError, match="holds list, expected an object"):
        fingerprint_directory(model)


def test_models_whose_shape_lies_in_their_text_config_are_told_apart(model: Path) -> None:
    found = set()
    for width in (8, 16):
        outer = {"model_type": "gemma3", "tie_word_embeddings": True}
        write_json(model / "config.json", {**outer, "text_config": {**CONFIG, "hidden_size": width}})
        found.add(fingerprint_directory(model).model)
    assert len(found) == 2


def test_the_fingerprint_of_a_model_of_text_alone_is_that_of_former_releases(model: Path) -> None:
    assert fingerprint_directory(model).model == "93e2911f628aec42c3b73b0516580cfc"


EXPERTS: list[tuple[dict[str, object], tuple[int, int], bool]] = [
    ({"num_experts": 128, "num_experts_per_tok": 8}, (128, 8), True),  # Qwen3-MoE
    ({"num_local_experts": 8, "num_experts_per_tok": 2}, (8, 2), True),  # Mixtral
    ({"num_local_experts": 32, "num_experts_per_tok": 4}, (32, 4), True),  # gpt-oss
    ({"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8}, (256, 8), True),  # DeepSeek-V3
    ({"moe_num_experts": 64, "moe_k": 6}, (64, 6), True),  # ERNIE 4.5
    ({"num_experts": 128, "top_k_experts": 8, "enable_moe_block": True}, (128, 8), True),  # Gemma 4
    ({"num_experts": None, "top_k_experts": None, "enable_moe_block": False}, (0, 0), False),  # Gemma 4 without
    ({"num_experts": 64, "moe_topk": [8, 8]}, (64, 0), True),  # one number for each layer
    ({"hidden_size": 8}, (0, 0), False),
]


@pytest.mark.parametrize(("config", "counts", "may_have"), EXPERTS)
def test_experts_are_known_by_the_names_that_families_of_models_have_for_them(
    tmp_path: Path, config: dict[str, object], counts: tuple[int, int], may_have: bool
) -> None:
    write_json(tmp_path / "config.json", CONFIG | config)
    assert experts_of(config.get) == counts
    assert has_experts(tmp_path) is may_have
    write_json(tmp_path / "config.json", {"text_config": CONFIG | config})
    assert has_experts(tmp_path) is may_have


def test_of_a_folder_without_a_configuration_nothing_is_known(tmp_path: Path) -> None:
    assert has_experts(tmp_path) is None
    assert positions(tmp_path) is None
