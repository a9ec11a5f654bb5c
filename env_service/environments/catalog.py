"""The environments that a config names."""

from collections.abc import Iterable, Mapping

from env_service.config import AdditionTasks, JsonlTasks, Tasks
from env_service.environments.addition import Addition
from env_service.environments.interface import OfferedEnvironment, TaskSource
from env_service.environments.jsonl import JsonlTaskSource
from env_service.environments.single_turn import SingleTurn


def build(configs: Iterable[Tasks]) -> Mapping[str, OfferedEnvironment]:
    """Environments by name. Raises ValueError with file and line, or the dataset, of one that cannot be made."""
    return {
        config.name: OfferedEnvironment(name=config.name, tasks=_source(config), start=SingleTurn) for config in configs
    }


def _source(config: Tasks) -> TaskSource:
    if isinstance(config, AdditionTasks):
        return Addition()
    if isinstance(config, JsonlTasks):
        return JsonlTaskSource(config)
    # Deferred: reasoning-gym takes a second to import, and most runs do without it.
    from env_service.environments.procedural import ReasoningGymSource

    return ReasoningGymSource(config)
