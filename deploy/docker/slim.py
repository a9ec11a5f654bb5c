"""Makes a virtual environment small: `python slim.py /opt/venv`.

What only installs or tests packages goes, and so does compiled code, but for what every start loads: on a read-only
root Python could not keep it, and would compile it each time.
"""

import compileall
import re
import shutil
import subprocess
import sys
from pathlib import Path

# What the processes import before they serve, of the packages; our own code is compiled where it is built.
_AT_START = (
    "pydantic", "pydantic_core", "fastapi", "starlette", "uvicorn", "aiohttp", "zmq", "msgpack", "numpy", "multidict",
    "yarl", "prometheus_client", "anyio", "cryptography", "annotated_types", "typing_inspection", "tokenizers",
    "jinja2",
)  # fmt: skip
# matplotlib, which comes with reasoning-gym, writes PDF with it; nothing here does.
_UNUSED = ("fontTools",)
_INSTALLERS = re.compile(r"(pip|setuptools|_distutils_hack|distutils-precedence\.pth|pkg_resources)(-.*|$)")


def main(venv: Path) -> None:
    """Slims the environment in place."""
    (packages,) = venv.glob("lib/python3.*/site-packages")
    for path in packages.iterdir():
        if path.name in _UNUSED or _INSTALLERS.match(path.name):
            _remove(path)
    for path in [*packages.rglob("tests"), *packages.rglob("__pycache__")]:
        if path.is_dir():
            shutil.rmtree(path)
    # Debugging symbols only. Libraries that a wheel brings along (*.libs) were rewritten, and do not stand it.
    libraries = [str(path) for path in packages.rglob("*.so") if not path.parent.name.endswith(".libs")]
    subprocess.run(["strip", "--strip-debug", *libraries], check=True)
    for script in (venv / "bin").glob("pip*"):
        script.unlink()
    for name in _AT_START:
        for path in packages.glob(f"{name}*"):
            if path.is_dir():
                compileall.compile_dir(path, quiet=2, stripdir=str(packages), workers=1)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
