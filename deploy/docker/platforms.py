"""Checks that images can run on the container engine here: a line for each that is for another architecture.

    python3 deploy/docker/platforms.py IMAGE ...                                `make images-check` names our own
    docker compose config --images | xargs python3 deploy/docker/platforms.py   of all that Compose would start

The engine itself says nothing before it starts such an image, and then only `exec format error`, which no entrypoint
can mend, as nothing of the image runs. Where emulation is set up it does run, many times slower. The client is
`docker`, or the one that the environment variable DOCKER names. Exit code 1: an image is for another architecture, or
not here; 3: no engine answers.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence

CLIENT = shlex.split(os.environ.get("DOCKER") or "docker")


class NoAnswer(Exception):
    """The client failed; the text says why."""


def asked(*words: str) -> str:
    """The client's answer. Raises NoAnswer."""
    try:
        done = subprocess.run([*CLIENT, *words], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoAnswer(str(error)) from error
    if done.returncode:
        raise NoAnswer(done.stderr.strip() or f"exit code {done.returncode}")
    return done.stdout


def complaint(image: str, engine: str) -> str:
    """The fault of an image for an engine of a platform, such as linux/amd64; empty if nothing is."""
    try:
        (found,) = json.loads(asked("image", "inspect", image))
    except NoAnswer as error:
        return f"{image} is not here ({error}): make images, or docker compose build"
    own = f"{found['Os']}/{found['Architecture']}"
    if own == engine:
        return ""
    return (
        f"{image} is for {own}, and this engine runs {engine}: it would end with 'exec format error', or run by slow "
        f"emulation; build it here (make images, or docker compose build), or pull the one for {engine}. "
        f"DOCKER_DEFAULT_PLATFORM is {os.environ.get('DOCKER_DEFAULT_PLATFORM') or 'not set'}"
    )


def main(images: Sequence[str]) -> int:
    """The command line."""
    try:
        engine = asked("version", "--format", "{{.Server.Os}}/{{.Server.Arch}}").strip()
    except NoAnswer as error:
        print(f"no container engine answers: {error}", file=sys.stderr)
        return 3
    complaints = [text for image in dict.fromkeys(images) if (text := complaint(image, engine))]
    print("\n".join(complaints) or f"{len(set(images))} images are for {engine}, as this engine is")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
