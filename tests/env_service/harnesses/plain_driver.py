"""Stands in the place of a harness's driver: an agent of a few lines, which does what its settings say."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, os.environ["DRIVERS"])

from driving import GivenTask, command, finish, shell  # type: ignore[import-not-found]


def ask(messages: list[dict[str, Any]]) -> str:
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    body = json.dumps({"model": "gpt-5", "messages": messages, "temperature": 0.3, "max_tokens": 500}).encode()
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def main() -> None:
    task = GivenTask()
    if "told" in task.settings:
        told = {"prompt": task.prompt, "data": task.data, "names": sorted(os.environ), "folder": os.getcwd()}
        Path(task.settings["told"]).write_text(json.dumps({**told, "instructions": task.instructions}))
    if "child" in task.settings:
        child = subprocess.Popen(["sleep", "600"])
        Path(task.settings["child"]).write_text(f"{child.pid} {os.getpid()}")
    prompt = task.prompt
    if "probe" in task.settings:
        prompt = subprocess.run([sys.executable, "-c", task.settings["probe"]], capture_output=True, text=True).stdout
    messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    for _ in range(task.settings.get("turns", 1)):
        said = ask(messages)
        messages.append({"role": "assistant", "content": said})
        if task.folder is not None:
            messages.append({"role": "user", "content": shell(said)})
    if "hangs" in task.settings:
        time.sleep(600)
    if "commands" in task.settings:
        ends = [command(line, timeout_s=1.0) for line in task.settings["commands"]]
        Path(task.settings["ends"]).write_text(json.dumps(ends))
    finish(task.settings.get("answer", said), stop="answered")


main()
