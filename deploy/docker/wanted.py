"""Prints what an extra of pyproject.toml wants, with what the project always wants: `python wanted.py reward`."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
print(*project["dependencies"], *project["optional-dependencies"][sys.argv[1]])
