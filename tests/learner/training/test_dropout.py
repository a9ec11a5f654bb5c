"""A policy is trained without dropout, wherever its model takes the probability from."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import FalconConfig, FalconForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedConfig, PreTrainedModel

from learner.training.dropout import disable_dropout
from learner.training.policy import load_causal_lm

SHARE = 0.4


def falcon() -> PreTrainedModel:
    """Its layers read both probabilities from the config in each forward pass."""
    config = FalconConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, hidden_dropout=SHARE,
        attention_dropout=SHARE, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return FalconForCausalLM(config)


def gpt2() -> PreTrainedModel:
    """It has modules of dropout."""
    config = GPT2Config(
        vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=SHARE, embd_pdrop=SHARE,
        attn_pdrop=SHARE, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


@pytest.mark.parametrize("made", [falcon, gpt2], ids=["falcon", "gpt2"])
def test_a_loaded_policy_drops_nothing_in_training(made: type, tmp_path: Path) -> None:
    torch.manual_seed(0)
    ids = torch.arange(12)[None]
    plain = made()
    plain.save_pretrained(tmp_path)
    plain.train()
    with torch.no_grad():
        assert not torch.equal(plain(ids, use_cache=False)[0], plain(ids, use_cache=False)[0])
    policy = load_causal_lm(tmp_path, dtype=torch.float32)
    # The attention is replaced by another one, of packed rows, that this call does not need.
    policy.set_attn_implementation("eager")  # type: ignore[operator]
    assert policy.training
    with torch.no_grad():
        first, second = (policy(ids, use_cache=False)[0] for _ in range(2))
        assert torch.equal(first, second)
        torch.testing.assert_close(first, plain.eval()(ids, use_cache=False)[0])


class WithParts(nn.Module):
    """Dropout of all kinds: modules, a number of its own, and a config with another one in it."""

    def __init__(self) -> None:
        super().__init__()
        self.config = PreTrainedConfig(layerdrop=SHARE, hidden_size=8)
        text = PreTrainedConfig(activation_dropout=SHARE, classifier_dropout=None, rms_norm_eps=SHARE)
        self.config.text_config = text
        self.attn_pdrop = SHARE
        self.scale = SHARE
        self.parts = nn.ModuleList([nn.Dropout1d(SHARE), nn.Dropout3d(SHARE), nn.AlphaDropout(SHARE)])


def test_every_kind_of_dropout_is_turned_off_and_no_other_number_changes() -> None:
    model = WithParts()
    disable_dropout(model)
    text = model.config.text_config
    assert (model.config.layerdrop, text.activation_dropout, text.classifier_dropout) == (0.0, 0.0, None)
    assert (model.config.hidden_size, text.rms_norm_eps, model.scale) == (8, SHARE, SHARE)
    assert model.attn_pdrop == 0.0
    assert [part.p for part in model.parts] == [0.0, 0.0, 0.0]
