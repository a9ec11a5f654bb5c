"""Serves an environment of verifiers 0.4, and writes its tasks to a file. It runs in an environment of its own:

uv venv verifiers && uv pip install --python verifiers/bin/python verifiers==0.4.0
verifiers/bin/python examples/verifiers/serve.py sums --tasks tasks.jsonl --address tcp://127.0.0.1:5600

`sums` is a module that exports a Taskset and a Harness; those of verifiers and of installed packages have names, too.
"""

import argparse
import json
from itertools import islice
from pathlib import Path

from verifiers.v1.envs.single_agent import SingleAgentEnvConfig
from verifiers.v1.serve.server import EnvServer
from verifiers.v1.utils.loaders import load_environment


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("taskset")
    parser.add_argument("--harness", default="", help="the taskset's module if not given")
    parser.add_argument("--tasks", type=Path, required=True, help="the file of tasks that is written")
    parser.add_argument("--count", type=int, default=10_000, help="tasks at most")
    parser.add_argument("--address", default="tcp://127.0.0.1:5600")
    parser.add_argument("--sessions", type=int, default=256)
    given = parser.parse_args()
    agent = {"harness": {"id": given.harness or given.taskset}, "runtime": {"type": "subprocess"}}
    config = SingleAgentEnvConfig.model_validate({"taskset": {"id": given.taskset}, "agent": agent})
    tasks = islice(load_environment(config).taskset, given.count)
    given.tasks.write_text("".join(json.dumps(task.data.model_dump(mode="json")) + "\n" for task in tasks))
    EnvServer.run_server(config=config, address=given.address, max_concurrent=given.sessions)


if __name__ == "__main__":
    main()
