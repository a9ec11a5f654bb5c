"""Files and words that are no settings at all."""

from pathlib import Path

import pytest

from generator.config import GeneratorConfig
from services.config.models import load_config
from services.config.sources import ConfigError, read_tables


@pytest.mark.parametrize("value", ["[" * 5000, "1" * 5000])
def test_a_file_that_the_parser_gives_up_on_is_said_to_be_none(value: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(f"a = {value}")

    with pytest.raises(ConfigError, match=r"run\.toml cannot be read: .*; expected the settings of a run"):
        read_tables(tmp_path / "run.toml")


def test_a_name_that_is_too_long_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="File name too long"):
        read_tables(tmp_path / ("x" * 300))


@pytest.mark.parametrize(
    "words",
    [
        ("--join.url", "http://[::1"),
        ("--join.url", "http://127.0.0.1:abc"),
        ("--join.learner", "127.0.0.1:7300"),
        ("--join.learner", "http://127.0.0..1:7300"),
        ("--adapters.source", "http://127.0.0.1:73000"),
    ],
)
def test_an_address_that_is_none_is_refused_at_the_start(words: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match="is no address: expected http://host:port or https://host:port"):
        load_config(GeneratorConfig, process="generator", argv=["--model", "m", *words], environ={})


def test_a_host_with_a_slip_of_the_fingers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'127\.0\.\.1' is no host: expected a name or an address"):
        load_config(GeneratorConfig, process="generator", argv=["--model", "m", "--http.host", "127.0..1"], environ={})
