"""A run's name for its env_services, so that one that outlives the run does not take another run's leases for its own.

Every run counts its leases and incarnations from the start, and two runs may have folders of the same name.
"""

import secrets
from pathlib import Path


def run_name(folder: Path) -> str:
    """The random name of the run in this folder; it is made when it is first asked for."""
    path = folder / "run_name"
    if not path.exists():
        draft = folder / "run_name.new"
        draft.write_text(f"{secrets.token_hex(8)}\n", encoding="utf-8")
        draft.replace(path)
    return path.read_text(encoding="utf-8").strip()
