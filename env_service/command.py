"""The command `env-service`, which serves; with `list`, `show`, `play`, `bench` or `try` it looks at environments."""

import sys

from env_service.config import EnvServiceConfig
from services.config.models import load_or_exit
from services.config.sources import ConfigError

_LOOKING = ("list", "show", "play", "bench", "try")


def main() -> None:
    """Read the configuration, then load the rest and serve until SIGTERM or SIGINT; or look at environments."""
    if sys.argv[1:2] and sys.argv[1] in _LOOKING:
        sys.exit(_look(sys.argv[1:]))
    config = load_or_exit(
        EnvServiceConfig, process="env-service", description="Rolls out the learner's leases: tasks, tokens, rewards."
    )
    # Deferred: --help and mistakes in the configuration are answered before anything heavy is loaded.
    from env_service.app import run
    from services.logs import configure_logging
    from services.process import run_process

    configure_logging("env-service", level=config.log.level, format=config.log.format)
    sys.exit(run_process("env-service", lambda stop: run(config, stop), finish_s=config.drain_s + 2.0))


def _look(words: list[str]) -> int:
    # Deferred as below: it loads what serving does.
    from env_service import workbench

    try:
        return workbench.main(words)
    except ConfigError as error:
        sys.stderr.write("".join(f"env-service: {problem}\n" for problem in error.problems))
        return 2
