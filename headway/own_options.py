"""The options of the umbrella command itself, told apart from those that it passes on to the processes."""

from collections.abc import Mapping, Sequence

from services.config.sources import ConfigError


def own_options(words: Sequence[str], known: Mapping[str, bool]) -> tuple[dict[str, list[str]], list[str]]:
    """The values of the `known` options, which are by name whether they take one, and all other words in their order.

    Raises ConfigError for an option that lacks its value, or has one and should not.
    """
    found: dict[str, list[str]] = {}
    others: list[str] = []
    rest = list(words)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name not in known:
            others.append(f"{name}{equals}{value}")
            continue
        if not known[name] and equals:
            raise ConfigError([f"command line: {name} takes no value, got {value!r}"])
        if known[name] and not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError([f"command line: {name} needs a value"])
            value = rest.pop(0)
        found.setdefault(name, []).append(value)
    return found, others
