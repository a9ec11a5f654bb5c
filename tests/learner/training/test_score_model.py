import io
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from learner.training.batch import TrainSequence, flatten
from learner.training.config import OptimizerConfig, TrainingConfig
from learner.training.engine import TrainingEngine
from learner.training.models import Output, new_score_model
from learner.training.packing import Microbatch, pack, shared_prefixes
from learner.training.policy import NamedTensor, TextFiles, WeightSnapshot, host_copy
from learner.training.ranks import CommandChannel
from learner.training.score_model import Critic, ScoreModel, load_score_model, save_score_model
from tests.learner.training.tiny_model import VOCABULARY, random_sequences, write_tiny_llama

FLOAT = torch.float32
END, BEGIN = 1, 0  # of the tiny model


def packed(sequences: Sequence[TrainSequence], members: Sequence[int] | None = None) -> Microbatch:
    batch = flatten(sequences)
    row = np.arange(len(sequences)) if members is None else np.array(members, dtype=np.int64)
    return pack(batch, row, prefixes=shared_prefixes(batch))


def prompts(count: int) -> list[list[int]]:
    """Token sequences of different lengths, which end in the end-of-sequence token."""
    draw = np.random.default_rng(2)
    return [[*draw.integers(2, VOCABULARY, draw.integers(1, 15)).tolist(), END] for _ in range(count)]


def judged(token_ids: Sequence[int]) -> TrainSequence:
    """The sequence with one more token, whose prediction is made where the last real one stands."""
    mask = np.arange(len(token_ids) + 1) == len(token_ids)
    return TrainSequence.supervised(token_ids=np.array([*token_ids, 7], dtype=np.int32), loss_mask=mask)


def snapshot(model: ScoreModel) -> WeightSnapshot:
    return WeightSnapshot(
        tensors=tuple(NamedTensor(name=name, value=value.detach()) for name, value in model.named_parameters())
    )


def scores(model: ScoreModel, microbatch: Microbatch) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(microbatch)[0]
    return found


def scores_of_transformers(path: Path, token_ids: Sequence[Sequence[int]]) -> Tensor:
    """As a server would: one batch, padded on the right with the token that the config names."""
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=FLOAT)
    longest = max(map(len, token_ids))
    padding = model.config.pad_token_id
    rows = [[*tokens, *[padding] * (longest - len(tokens))] for tokens in token_ids]
    mask = [[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens in token_ids]
    with torch.no_grad():
        found: Tensor = model(input_ids=torch.tensor(rows), attention_mask=torch.tensor(mask)).logits[:, 0]
    return found


def test_a_critic_from_a_language_model_values_every_state_at_0(tiny_llama: Path) -> None:
    microbatch = packed(random_sequences(5))
    found = scores(load_score_model(tiny_llama, dtype=FLOAT), microbatch)
    assert found.tolist() == [0.0] * len(microbatch.targets)


def test_transformers_does_not_warn_of_a_head_that_is_new_on_purpose(tied_llama: Path) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("transformers")  # its records go no further than its own handlers
    logger.addHandler(handler)
    try:
        load_score_model(tied_llama, dtype=FLOAT)
        logging.getLogger("transformers.modeling_utils").warning("LOAD REPORT of another model")
    finally:
        logger.removeHandler(handler)
    assert stream.getvalue() == "LOAD REPORT of another model\n"


def test_a_new_head_is_drawn_from_its_seed_and_from_nothing_else(tied_llama: Path) -> None:
    before = torch.get_rng_state()
    first, again, other = (
        load_score_model(tied_llama, dtype=FLOAT, head_seed=seed).head.weight.detach() for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    # 64 entries of variance 1/65: their squares add up to about 1, with a standard deviation of sqrt(2/64) = 0.18.
    assert first.square().sum().item() == pytest.approx(1.0, abs=0.9)


def test_transformers_gives_the_saved_model_the_same_scores(tiny_llama: Path, tmp_path: Path) -> None:
    model = load_score_model(tiny_llama, dtype=FLOAT, head_seed=3)
    save_score_model(snapshot(model), model=model, source=TextFiles(tiny_llama), destination=tmp_path / "saved")
    texts = prompts(9)
    ours = scores(model, packed([judged(token_ids) for token_ids in texts]))
    assert ours.std() > 0.1
    torch.testing.assert_close(ours, scores_of_transformers(tmp_path / "saved", texts), rtol=0, atol=1e-5)
    config = json.loads((tmp_path / "saved/config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["pad_token_id"] == BEGIN


def test_a_saved_head_is_kept_whatever_head_is_asked_for(tied_llama: Path, tmp_path: Path) -> None:
    model = load_score_model(tied_llama, dtype=FLOAT, head_seed=3)
    save_score_model(snapshot(model), model=model, source=TextFiles(tied_llama), destination=tmp_path / "saved")
    microbatch = packed(random_sequences(5))
    expected = scores(model, microbatch)
    for seed in (None, 8):
        again = load_score_model(tmp_path / "saved", dtype=FLOAT, head_seed=seed)
        torch.testing.assert_close(scores(again, microbatch), expected, rtol=0, atol=0)


def test_values_and_gradients_are_those_of_the_plain_model_before_each_trained_token(
    tied_llama: Path, tmp_path: Path
) -> None:
    model = load_score_model(tied_llama, dtype=torch.float64, head_seed=4)
    save_score_model(snapshot(model), model=model, source=TextFiles(tied_llama), destination=tmp_path)
    sequences = random_sequences(6)
    values, *_ = model(packed(sequences))
    slopes = torch.linspace(-1, 1, len(values), dtype=torch.float64)
    (slopes * values).sum().backward()

    plain = LlamaForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float64)
    plain.model.embed_tokens.padding_idx = (
        None  # it would withhold the gradient of the token that batches are padded with
    )
    parts = []
    for sequence in sequences:
        states = plain.model(input_ids=torch.from_numpy(sequence.token_ids).long()[None]).last_hidden_state[0]
        parts.append(plain.score(states[torch.from_numpy(np.flatnonzero(sequence.loss_mask)) - 1])[:, 0])
    expected = torch.cat(parts)
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-6)
    (slopes * expected).sum().backward()  # type: ignore[no-untyped-call]
    ours = dict(model.classifier.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(ours[name].grad, parameter.grad, rtol=1e-5, atol=1e-5)


def test_the_head_of_a_bfloat16_model_computes_in_float32(tied_llama: Path) -> None:
    model = load_score_model(tied_llama, dtype=torch.bfloat16, head_seed=1)
    assert scores(model, packed(random_sequences(3))).dtype == torch.float32
    # 256 + 1 needs nine bits, one more than bfloat16 has.
    with torch.no_grad():
        model.head.weight.fill_(0)
        model.head.weight[0, :2] = 1
    states = torch.zeros(1, model.head.in_features, dtype=torch.bfloat16)
    states[0, :2] = torch.tensor([256.0, 1.0])
    assert model.head(states).item() == 257


def test_a_row_without_targets_has_no_scores_and_reaches_every_parameter(tied_llama: Path) -> None:
    model = load_score_model(tied_llama, dtype=FLOAT, head_seed=1)
    values, *_ = model(packed(random_sequences(2), members=[]))
    assert values.shape == (0,)
    values.sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() == 0 for p in model.parameters())


@pytest.mark.parametrize("stage", [0, 3])
def test_a_score_model_is_trained_and_saved_at_every_extreme_of_sharding(
    commands: CommandChannel, tied_llama: Path, tmp_path: Path, stage: int
) -> None:
    config = TrainingConfig(zero_stage=stage, optimizer=OptimizerConfig(learning_rate=1e-2))
    model = load_score_model(tied_llama, dtype=FLOAT)
    engine: TrainingEngine[Output] = TrainingEngine(model, config=config, device=torch.device("cpu"))
    texts = prompts(4)
    microbatch = packed([judged(token_ids) for token_ids in texts])
    wanted = torch.tensor([1.0, -1.0, 0.5, 2.0])
    losses = []
    for _ in range(25):
        values, *_ = engine.forward(microbatch)
        loss = (values - wanted).square().sum()
        losses.append(loss.item())
        engine.backward(loss, last=True)
        engine.update(learning_rate=1e-2)
    # The head begins at 0: the first loss is 1 + 1 + 1/4 + 4.
    assert losses[0] == 6.25
    assert losses[-1] < 0.5
    with torch.no_grad():
        trained = engine.forward(microbatch)[0]
    copy = host_copy(engine, dtype="float32", keep=True)
    save_score_model(copy, model=model, source=TextFiles(tied_llama), destination=tmp_path / "saved")
    torch.testing.assert_close(scores_of_transformers(tmp_path / "saved", texts), trained, rtol=0, atol=1e-5)
    engine.close()


@pytest.mark.parametrize(("owner", "lora"), [("critic", {}), ("reward model", {}), ("reward model", {"rank": 2})])
def test_gradient_checkpointing_computes_layers_once_more_and_gives_the_same_gradients(
    commands: CommandChannel, tied_llama: Path, owner: str, lora: dict[str, object]
) -> None:
    def gradients(checkpointing: bool) -> dict[str, Tensor]:
        settings = {"gradient_checkpointing": checkpointing, "lora": lora, "head_seed": 3}
        config = TrainingConfig.model_validate(settings)
        if owner == "critic":
            critic = Critic(tied_llama, config=config, device=torch.device("cpu"), value_clip=None)
            model, engine = critic.engine.model, critic.engine
            assert isinstance(model, ScoreModel)
            torch.nn.init.ones_(model.head.weight)  # a new one of 0 has no gradient below it
        else:
            torch.manual_seed(5)
            model = new_score_model(tied_llama, config=config)
            engine = TrainingEngine(model, config=config, device=torch.device("cpu"))
        calls: list[int] = []
        mlp = next(module for name, module in model.named_modules() if name.endswith("layers.0.mlp"))
        mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        engine.backward(engine.forward(packed(random_sequences(5)))[0].square().sum(), last=True)
        assert len(calls) == (2 if checkpointing else 1)
        found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
        engine.close()
        return found

    plain, again = gradients(False), gradients(True)
    assert len(plain) > 5
    assert plain.keys() == again.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, rtol=0, atol=1e-5)


def small_llama(**settings: object) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=16,
        vocab_size=12,
        **settings,
    )


@pytest.mark.parametrize(
    ("padding", "begin", "end", "generation_end", "chosen"),
    [
        (5, 0, 1, None, 5),  # its own
        (1, 0, 1, None, 0),  # its own ends sequences
        (None, 0, [1, 2], None, 0),
        (5, 0, 1, [1, 5], 0),  # only generation ends with it
        (1, 1, 1, None, 11),  # one token for everything: the last of twelve
        (11, None, 11, None, 10),
    ],
)
def test_the_padding_token_is_one_that_ends_no_sequence(
    tmp_path: Path,
    padding: int | None,
    begin: int | None,
    end: int | list[int],
    generation_end: list[int] | None,
    chosen: int,
) -> None:
    model = LlamaForCausalLM(small_llama(pad_token_id=padding, bos_token_id=begin, eos_token_id=end))
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    if generation_end:
        text = json.dumps({"eos_token_id": generation_end})
        (tmp_path / "generation_config.json").write_text(text, encoding="utf-8")
    found: object = load_score_model(tmp_path, dtype=FLOAT).classifier.config
    assert isinstance(found, LlamaConfig)
    assert found.pad_token_id == chosen


def small_tokenizer(*names: str, **special: str) -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate(names)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")), unk_token="<unk>", **special
    )


def test_a_padding_token_that_the_model_lacks_is_one_that_the_tokenizer_can_name(tmp_path: Path) -> None:
    """As in Qwen's models: one token begins and ends, another ends turns, and the vocabulary is larger than named."""
    source = tmp_path / "source"
    LlamaForCausalLM(small_llama(pad_token_id=0, bos_token_id=0, eos_token_id=0)).save_pretrained(source)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 6]}), encoding="utf-8")
    names = ("<end>", "<unk>", "a", "b", "c", "<more>", "<turn>")
    small_tokenizer(*names, eos_token="<end>", pad_token="<end>").save_pretrained(source)
    model = load_score_model(source, dtype=FLOAT, head_seed=1)
    save_score_model(snapshot(model), model=model, source=TextFiles(source), destination=tmp_path / "saved")
    config = json.loads((tmp_path / "saved/config.json").read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert (tokenizer.pad_token, tokenizer.pad_token_id, config["pad_token_id"]) == ("<more>", 5, 5)
    assert tokenizer.pad({"input_ids": [[2], [2, 3, 4]]})["input_ids"] == [[2, 5, 5], [2, 3, 4]]


def test_the_saved_tokenizer_pads_as_the_config_says(tmp_path: Path) -> None:
    # One of the common ways to have no padding token of one's own: padding with the token that ends sequences.
    source = tmp_path / "source"
    LlamaForCausalLM(small_llama(pad_token_id=1, bos_token_id=0, eos_token_id=1)).save_pretrained(source)
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    small_tokenizer("<s>", "</s>", "<unk>", "a", "b", "c", padding_side="left", **special).save_pretrained(source)
    model = load_score_model(source, dtype=FLOAT, head_seed=1)
    save_score_model(snapshot(model), model=model, source=TextFiles(source), destination=tmp_path / "saved")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert (tokenizer.pad_token, tokenizer.padding_side, tokenizer.eos_token) == ("<s>", "right", "</s>")
    assert tokenizer.convert_tokens_to_ids(["a", "c"]) == [3, 5]


def test_a_classifier_of_several_labels_is_refused(tmp_path: Path) -> None:
    LlamaForSequenceClassification(small_llama(num_labels=3)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="classifier with 3 labels: expected one with 1"):
        load_score_model(tmp_path, dtype=FLOAT)


def test_a_model_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path, tied=True)
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 weights .* first is model\.layers\.1\.mlp\.up_proj\.weight"):
        load_score_model(path, dtype=FLOAT)
