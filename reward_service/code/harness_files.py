"""The files of the harness as the sandbox gets them."""

import importlib.resources
from collections.abc import Mapping

_PACKAGE = "reward_service.code.harness"
_FOLDER = _PACKAGE.replace(".", "/")


def harness_files() -> Mapping[str, bytes]:
    """The modules of the harness at the paths by which they import each other."""
    folder = importlib.resources.files(_PACKAGE)
    modules = [file for file in folder.iterdir() if file.name.endswith(".py")]
    files = {f"{_FOLDER}/{module.name}": module.read_bytes() for module in modules}
    packages = {"reward_service/__init__.py": b"", "reward_service/code/__init__.py": b""}
    return {**packages, **files}


def entry_file(module: str) -> bytes:
    """A script that runs a module of the harness from the working directory."""
    return f"from {_PACKAGE}.{module} import main\n\nmain()\n".encode()
