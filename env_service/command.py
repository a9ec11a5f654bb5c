"""The command `env-service`."""

import sys

from env_service.config import EnvServiceConfig
from services.config.models import load_or_exit


def main() -> None:
    """Read the configuration, then load the rest and serve until SIGTERM or SIGINT."""
    config = load_or_exit(
        EnvServiceConfig, process="env-service", description="Rolls out the learner's leases: tasks, tokens, rewards."
    )
    # Deferred: --help and mistakes in the configuration are answered before anything heavy is loaded.
    from env_service.app import run
    from services.logs import configure_logging
    from services.process import run_process

    configure_logging("env-service", level=config.log.level, format=config.log.format)
    sys.exit(run_process("env-service", lambda stop: run(config, stop), finish_s=config.drain_s + 2.0))
