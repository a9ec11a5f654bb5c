"""The command `env-service`, which serves; `host` runs one environment for others; `list`, `show`, `play`, `bench` and
`try` look at environments; `runtime` builds images for runtimes, and checks tasks that are done in them; `tasks` makes
tasks of a repository's history; `harness` installs harnesses of others.
"""

import os
import sys
from pathlib import Path

from env_service.config import EnvServiceConfig
from services.config.models import load_or_exit
from services.config.sources import ConfigError
from services.own_imports import own_imports
from services.standard_output import standard_output

_LOOKING = ("list", "show", "play", "bench", "try")
_DESCRIPTION = """\
Rolls out the learner's leases: tasks, tokens, rewards. Beside that, each with a --help of its own:

  env-service list, show, play, bench, try    look at environments, without a run
  env-service host                            serves one environment for env services elsewhere
  env-service runtime build, list, check      images of runtimes, and tasks that are done in them
  env-service tasks                           makes tasks of a repository's history
  env-service harness list, install           harnesses of others"""


@standard_output()
def main() -> None:
    """Read the configuration, then load the rest and serve until SIGTERM or SIGINT; or look at environments."""
    if sys.argv[1:2] and sys.argv[1] in _LOOKING:
        sys.exit(_look(sys.argv[1:]))
    if sys.argv[1:2] == ["tasks"]:
        sys.exit(_tasks(sys.argv[1:]))
    if sys.argv[1:2] == ["runtime"]:
        sys.exit(_runtime(sys.argv[1:]))
    if sys.argv[1:2] == ["harness"]:
        sys.exit(_harness(sys.argv[1:]))
    if sys.argv[1:2] == ["host"]:
        sys.exit(_host(sys.argv[1:]))
    config = load_or_exit(EnvServiceConfig, process="env-service", description=_DESCRIPTION)
    # Deferred: --help and mistakes in the configuration are answered before anything heavy is loaded.
    with own_imports("env-service"):
        from env_service.app import run
        from services.logs import configure_logging
        from services.process import run_process

    configure_logging("env-service", level=config.log.level, format=config.log.format)
    sys.exit(run_process("env-service", lambda stop: run(config, stop), finish_s=config.drain_s + 2.0))


def _runtime(words: list[str]) -> int:
    # Deferred as below.
    if words[1:2] == ["check"]:
        from env_service.builtin import computer_check

        return computer_check.main(words)
    from env_service.runtimes import building

    return building.main(words)


def _harness(words: list[str]) -> int:
    # Deferred as below.
    from env_service.harnesses import installing

    return installing.main(words)


def _tasks(words: list[str]) -> int:
    # Deferred as below.
    from env_service.task_sets import mining

    return mining.main(words)


def _look(words: list[str]) -> int:
    # Deferred as below: it loads what serving does.
    from env_service import workbench

    try:
        return workbench.main(words)
    except ConfigError as error:
        sys.stderr.write("".join(f"env-service: {problem}\n" for problem in error.problems))
        return 2


def _plainly(error: Exception) -> str:
    """The sentence of each complaint about what was given, without the names of what found it."""
    from pydantic import ValidationError

    from services.config.options import plain_reason

    if not isinstance(error, ValidationError):
        return str(error)
    found = error.errors(include_url=False, include_context=False)
    return "; ".join(
        ": ".join([*(".".join(map(str, one["loc"])).split() or []), plain_reason(one["type"], one["msg"])])
        for one in found
    )


def _host(words: list[str]) -> int:
    # Deferred as below: it loads what serving does.
    from pydantic import ValidationError

    from env_service.environments.task_configs import ClassTasks
    from env_service.hosting import host_service
    from services.config.models import load_config_and_code
    from services.config.run_paths import import_code_from
    from services.logs import configure_logging
    from services.process import run_process
    from services.secret_files import SecretFileError

    given, rest = host_service.arguments(words)
    if "://" in given.name:
        sys.stderr.write(
            f"env-service: host serves an environment here: expected its class, package.module:Class, or its name in "
            f"RUN.toml; {given.name} is an address, which is for `source` where it is used\n"
        )
        return 2
    if not rest:
        import_code_from(Path())
    try:
        config = (
            load_config_and_code(EnvServiceConfig, process="env-service", argv=rest, environ=os.environ)
            if rest
            else None
        )
        entries = {each.name: each for each in config.environments if isinstance(each, ClassTasks)} if config else {}
        name = given.name.replace(":", ".")
        entry = entries.get(given.name) or ClassTasks.model_validate({"source": given.name, "name": name})
        http = host_service.http_of(given)
    except (ConfigError, ValidationError, SecretFileError) as error:
        problems = error.problems if isinstance(error, ConfigError) else [_plainly(error)]
        sys.stderr.write("".join(f"env-service: {problem}\n" for problem in problems))
        return 2
    configure_logging("env-service", level="info", format="text")
    return run_process(
        "env-service",
        lambda stop: host_service.serve(
            host_service.isolated(entry, given),
            http,
            stop,
            workers=given.workers,
            step_s=given.step_timeout_s,
            limits=host_service.limits_of(given),
        ),
    )
