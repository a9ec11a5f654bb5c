"""The environments that a config names."""

from collections.abc import Iterable, Mapping

from env_service.config import AdditionTasks, JsonlTasks, MixTasks, ReasoningGymTasks, Tasks
from env_service.environments.addition import Addition
from env_service.environments.interface import OfferedEnvironment, TaskSource
from env_service.environments.jsonl import JsonlTaskSource
from env_service.environments.mix import Mix, Share
from env_service.environments.single_turn import SingleTurn


def build(configs: Iterable[Tasks]) -> Mapping[str, OfferedEnvironment]:
    """Environments by name. Raises ValueError with file and line, or the dataset, of one that cannot be made."""
    given = tuple(configs)
    sources = {config.name: _source(config) for config in given if not isinstance(config, MixTasks)}
    for config in given:
        if isinstance(config, MixTasks):
            sources[config.name] = Mix([Share(sources[part.environment], part.weight) for part in config.parts])
    return {name: OfferedEnvironment(name=name, tasks=tasks, start=SingleTurn) for name, tasks in sources.items()}


def _source(config: AdditionTasks | JsonlTasks | ReasoningGymTasks) -> TaskSource:
    if isinstance(config, AdditionTasks):
        return Addition()
    if isinstance(config, JsonlTasks):
        return JsonlTaskSource(config)
    # Deferred: reasoning-gym takes a second to import, and most runs do without it.
    from env_service.environments.procedural import ReasoningGymSource

    return ReasoningGymSource(config)
