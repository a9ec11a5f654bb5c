"""The script that renders the chart, as a module."""

import importlib.util
from pathlib import Path
from types import ModuleType

K8S = Path(__file__).resolve().parents[2] / "deploy/k8s"


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RENDER = _module(K8S / "render.py")
