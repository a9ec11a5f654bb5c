"""mini-swe-agent on the computer of a task.

The same steps as its command `mini`: its own configuration, model, and agent. Of its interfaces one is ours, the
environment, which runs commands on the task's computer as its own one for Docker does in a container.
"""

from typing import Any

from driving import GivenTask, command, finish
from minisweagent.agents import get_agent
from minisweagent.config import get_config_from_spec
from minisweagent.environments.local import LocalEnvironment, LocalEnvironmentConfig
from minisweagent.models import get_model
from minisweagent.utils.serialize import recursive_merge


class SessionEnvironment(LocalEnvironment):
    """Commands on the task's computer; the end of the work is told as in its own environments."""

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        timeout_s = float(timeout or self.config.timeout)
        end = command(
            action.get("command", ""), timeout_s=timeout_s, folder=cwd or self.config.cwd, environment=self.config.env
        )
        late = f"An error occurred while executing the command: it timed out after {timeout_s:g} seconds"
        output = {
            "output": end["output"],
            "returncode": -1 if end["timed_out"] else end["exit_code"],
            "exception_info": late if end["timed_out"] else "",
        }
        self._check_finished(output)
        return output

    def get_template_vars(self, **given: Any) -> dict[str, Any]:
        names = ("system", "release", "version", "machine")
        told = command("uname -s; uname -r; uname -v; uname -m")["output"].splitlines()
        return recursive_merge(self.config.model_dump(), dict(zip(names, told, strict=False)), given)


def main() -> None:
    """Run it until it submits, or gives up."""
    task = GivenTask()
    settings = dict(task.settings)
    config = recursive_merge(
        get_config_from_spec(settings.pop("config", "mini.yaml")),
        {
            "agent": {"agent_class": "default", "mode": None, "cost_limit": 0.0, "step_limit": task.max_turns},
            "model": {"model_name": f"openai/{task.model}"},
        },
        settings,
    )
    del config["agent"]["mode"]  # of its interactive agent
    model = get_model(config=config["model"])
    environment = SessionEnvironment(
        config_class=LocalEnvironmentConfig, **{**config.get("environment", {}), "cwd": task.folder}
    )
    ended = get_agent(model, environment, config["agent"], default_type="default").run(task.prompt)
    finish(ended.get("submission", ""), stop=ended.get("exit_status") or "finished")


if __name__ == "__main__":
    main()
