"""The harnesses that are known: their packages, and what each is told so that it asks nobody but its session."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

HarnessName = Literal["mini-swe-agent", "openai-agents", "pydantic-ai", "smolagents", "anthropic"]

_HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class KnownHarness:
    """A harness. `own_agents`: it runs an agent of a file of the user's. `needs_computer`: it does nothing but run
    commands. `environ` is for its process.
    """

    name: HarnessName
    own_agents: bool = True
    needs_computer: bool = False
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def driver(self) -> Path:
        """The program that begins it."""
        return _HERE / "drivers" / f"run_{self.name.replace('-', '_')}.py"

    @property
    def lock(self) -> Path:
        """Its packages, by version and hash."""
        return _HERE / "locks" / f"{self.name}.txt"


HARNESSES: Mapping[HarnessName, KnownHarness] = {
    each.name: each
    for each in (
        KnownHarness(
            name="mini-swe-agent",
            own_agents=False,
            needs_computer=True,
            environ={
                "MSWEA_SILENT_STARTUP": "1",
                "MSWEA_COST_TRACKING": "ignore_errors",
                "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "2",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            },
        ),
        KnownHarness(name="openai-agents", environ={"OPENAI_AGENTS_DISABLE_TRACING": "1"}),
        KnownHarness(name="pydantic-ai"),
        KnownHarness(name="smolagents", environ={"HF_HUB_OFFLINE": "1"}),
        KnownHarness(name="anthropic"),
    )
}
assert set(HARNESSES) == set(get_args(HarnessName))


def python_of(name: HarnessName, *, installed: Path) -> Path:
    """The interpreter of a harness's virtual environment, in the folder of all of them."""
    return installed / name / "bin" / "python"
