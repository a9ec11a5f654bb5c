"""Embeddings of an encoder's process, computed in the test's own process."""

import base64
from array import array
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from reward_service.embeddings.verifier import cosine, unit
from reward_service.models.config import EncoderConfig
from reward_service.models.folder import encoder_fingerprint
from reward_service.models.process import EncoderToLoad
from reward_service.models.worker import load_encoder
from reward_service.verifier.submission import InfrastructureError, UserError
from tests.reward_service.models.tiny_encoder import LONGEST, states, write_encoder

TEXTS = ("a", "no way", "is it so")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"))


def to_load(folder: Path, **settings: object) -> EncoderToLoad:
    fields = {
        "path": str(folder), "device": "cpu", "dtype": "auto", "pooling": "mean", "max_tokens": LONGEST, "threads": 1,
        "fingerprint": encoder_fingerprint(EncoderConfig(name="close", path=folder)), **settings,
    }  # fmt: skip
    return EncoderToLoad.model_validate(fields)


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_texts_that_are_encoded_together_are_encoded_as_if_alone(folder: Path, pooling: str) -> None:
    answer = load_encoder(to_load(folder, pooling=pooling)).encode(TEXTS)
    for text, vector in zip(TEXTS, answer.vectors, strict=True):
        alone = states(folder, text)
        pooled = {"mean": alone.mean(dim=0), "first": alone[0], "last": alone[-1]}[pooling]
        found = array("f", base64.b64decode(vector))
        assert list(found) == pytest.approx((pooled / pooled.norm()).tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "b" * (LONGEST + 1),
            "a text has 33 tokens, and the encoder takes at most 32 (max_tokens, or what the files of the model say)",
        ),
        ("", "a text has no token that the encoder knows"),
    ],
)
def test_a_text_that_does_not_fit_is_an_error_of_the_data(folder: Path, text: str, message: str) -> None:
    answer = load_encoder(to_load(folder)).encode(["a", text])
    assert answer.error is not None
    assert (answer.error.kind, answer.error.message, answer.vectors) == ("data", message, ())


def test_weights_of_no_encoder_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the weights in .* lack .*: is it an encoder\?"):
        load_encoder(to_load(write_encoder(tmp_path, nothing=True)))


def test_files_that_have_changed_are_not_loaded(folder: Path) -> None:
    with pytest.raises(UserError, match="have changed since the service was started"):
        load_encoder(to_load(folder, fingerprint="other"))


def test_numbers_that_are_not_finite_give_no_similarity(tmp_path: Path) -> None:
    file = write_encoder(tmp_path) / "model.safetensors"
    save_file({name: value * float("nan") for name, value in load_file(file).items()}, file, metadata={"format": "pt"})
    (vector,) = load_encoder(to_load(tmp_path)).encode(["a"]).vectors
    with pytest.raises(InfrastructureError, match="has the length nan, and so no direction"):
        unit(array("f", base64.b64decode(vector)))


def test_a_cosine_is_between_minus_one_and_one_or_an_error() -> None:
    assert cosine(array("f", [1.0, 0.0]), array("f", [1.0000001, 0.0])) == 1.0
    assert cosine(array("f", [1.0, 0.0]), array("f", [-1.0000001, 0.0])) == -1.0
    for other, named in (([1.0], "2 and 1 numbers"), ([float("nan"), 0.0], "not finite")):
        with pytest.raises(InfrastructureError, match=named):
            cosine(array("f", [1.0, 0.0]), array("f", other))
