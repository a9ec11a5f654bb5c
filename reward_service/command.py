"""The command `reward-service`."""

import sys

from reward_service.config import RewardServiceConfig
from services.config.models import load_or_exit
from services.own_imports import own_imports
from services.standard_output import standard_output


@standard_output()
def main() -> None:
    """Read the configuration, then load the service and run it until it is told to stop."""
    config = load_or_exit(
        RewardServiceConfig, process="reward-service", description="Scores completions over HTTP with named verifiers."
    )
    # Deferred, so that --help and a faulty configuration answer at once.
    with own_imports("reward-service"):
        from reward_service.service import serve
        from services.logs import configure_logging
        from services.process import run_process

    configure_logging("reward-service", level=config.log.level, format=config.log.format)
    sys.exit(run_process("reward-service", lambda stop: serve(config, stop), finish_s=config.drain_s + 3.0))
