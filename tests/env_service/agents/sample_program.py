"""An agent of a user's, as a program: what it does is its first argument."""

import json
import os
import subprocess
import sys
import urllib.request

TASK = json.loads(sys.stdin.readline())

PRINTED = {
    "prints": "done\n0.5",
    "prints_rewards": '{"reward": 1.0, "rewards": [0.5], "stop": "solved"}',
    "prints_bad_rewards": '{"rewards": "many"}',
    "says_nothing": "no number",
}


def posted(url: str, body: dict[str, object]) -> dict[str, object]:
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as said:
        answer: dict[str, object] = json.load(said)
    return answer


def main(what: str) -> None:
    chat = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    request: dict[str, object] = {"model": "m", "messages": [{"role": "user", "content": TASK["data"]["question"]}]}
    if what == "streams":
        posted(chat, {**request, "stream": True})
    posted(chat, request)
    match what:
        case _ if what in PRINTED:
            print(PRINTED[what])
        case "posts":
            posted(os.environ["AGENT_REWARD_URL"], {"reward": 0.25, "stop": "solved"})
        case "posts_and_hangs":
            posted(os.environ["AGENT_REWARD_URL"], {"reward": 0.25, "stop": "solved"})
            subprocess.run(["sleep", "600"], check=False)
        case "crashes":
            sys.stderr.write("Traceback\nValueError: no such file\n")
            sys.exit(3)
        case "leaves_a_child":
            with open(sys.argv[2], "w") as file:
                file.write(str(subprocess.Popen(["sleep", "600"]).pid))
            print("1")
        case "hangs":
            subprocess.run(["sleep", "600"], check=False)
        case "shows":
            with open(sys.argv[2], "w") as file:
                json.dump({"folder": os.getcwd(), "names": sorted(os.environ)}, file)
            print("1")
        case "grows":
            bytearray(1 << 32)


main(sys.argv[1])
