"""Settings that only show themselves wrong as the lanes open: the service ends as with any other wrong settings."""

from pathlib import Path

import pytest

from reward_service.config import RewardServiceConfig
from reward_service.service import serve
from services.process import WRONG_SETTINGS, Stop, describe_error, exit_code_of

JUDGE = {"name": "judge", "url": "http://127.0.0.1:9/v1", "model": "m", "template": "{completion}"}


@pytest.mark.parametrize("sandbox", ["off", "unsafe"])
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"judges": ({**JUDGE, "api_key_env": "NO_SUCH_KEY"},)}, "NO_SUCH_KEY"),
        ({"judges": ({**JUDGE, "cache": {"file": "FOLDER"}},)}, "cannot be used as a file of kept answers"),
        ({"workers": {"prewarm": ("exact_match",)}}, "workers.prewarm: verifier 'exact_match'"),
        # The judge before it has a task group open, which the error comes through.
        ({"judges": (JUDGE,), "workers": {"prewarm": ("judge",)}}, "workers.prewarm: verifier 'judge'"),
    ],
)
async def test_wrong_settings_of_lanes_end_the_start_as_such(
    tmp_path: Path, sandbox: str, settings: dict[str, object], named: str
) -> None:
    given = {"http": {"port": 0}, "sandbox": sandbox, "execution": {"cgroup": "off", "packages": ()}, **settings}
    config = RewardServiceConfig.model_validate(_in_folder(given, tmp_path))
    with pytest.raises(Exception) as failed:  # in a group or not
        await serve(config, Stop())
    assert exit_code_of(failed.value) == WRONG_SETTINGS
    assert named in describe_error(failed.value)


def _in_folder(value: object, folder: Path) -> object:
    """With the folder itself in place of the word FOLDER."""
    if isinstance(value, dict):
        return {name: _in_folder(each, folder) for name, each in value.items()}
    if isinstance(value, tuple):
        return tuple(_in_folder(each, folder) for each in value)
    return folder if value == "FOLDER" else value
