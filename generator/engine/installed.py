"""The installed vLLM's arguments, kinds of models and sizes of heads, read from its source: to import it takes ten
seconds. Each is empty without vLLM, or where a release of it says them elsewhere.
"""

import ast
import functools
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from services.python_syntax import module_of

_ARGUMENTS = "engine/arg_utils.py"
_MODELS = "model_executor/models/registry.py"
_ATTENTION = "v1/attention/backends/cpu_attn.py"
_LATENT_ATTENTION = "v1/attention/backends/mla/cpu_mla.py"
_KINDS_OF_CONFIGS = "transformers_utils/model_arch_config_convertor.py"


@functools.cache
def vllm_arguments() -> frozenset[str]:
    """The names of vLLM's engine arguments."""
    classes = [node for node in _statements(_ARGUMENTS) if isinstance(node, ast.ClassDef)]
    chosen = [one for one in classes if one.name in ("EngineArgs", "AsyncEngineArgs")]
    fields = (node.target for one in chosen for node in one.body if isinstance(node, ast.AnnAssign))
    return frozenset(target.id for target in fields if isinstance(target, ast.Name))


@functools.cache
def architectures() -> frozenset[str]:
    """The architectures that vLLM has code for, by the names of config.json."""
    tables = {
        node.targets[0].id: node.value
        for node in _statements(_MODELS)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Dict)
    }
    return frozenset(_keys("_VLLM_MODELS", tables))


@functools.cache
def cpu_head_sizes(*, latent: bool = False) -> frozenset[int]:
    """The sizes of a head that attention on a CPU computes; `latent` for that of DeepSeek's kind (MLA)."""
    statements = _statements(_LATENT_ATTENTION if latent else _ATTENTION)
    bodies = [method.body for method in _methods(statements, "get_supported_head_sizes")]
    answers = [node.value for body in bodies for node in body if isinstance(node, ast.Return)]
    sizes = [size for answer in answers if isinstance(answer, ast.List) for size in answer.elts]
    return frozenset(size.value for size in sizes if isinstance(size, ast.Constant) and isinstance(size.value, int))


@functools.cache
def latent_kinds() -> frozenset[str]:
    """The values of `model_type` whose attention is latent (MLA), if they have a `kv_lora_rank`."""
    methods = _methods(_statements(_KINDS_OF_CONFIGS), "is_deepseek_mla")
    tuples = [node for method in methods for node in ast.walk(method) if isinstance(node, ast.Tuple)]
    return frozenset(
        kind.value
        for one in tuples
        for kind in one.elts
        if isinstance(kind, ast.Constant) and isinstance(kind.value, str)
    )


def _keys(name: str, tables: Mapping[str, ast.Dict]) -> Iterator[str]:
    """Of a table by its name, and of those that it takes in as `**other`."""
    table = tables.get(name)
    for key, value in zip(table.keys, table.values, strict=True) if table is not None else ():
        if key is None and isinstance(value, ast.Name):
            yield from _keys(value.id, tables)
        elif isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value


def _methods(statements: Iterable[ast.stmt], name: str) -> list[ast.FunctionDef]:
    """Methods of this name, of all classes."""
    members = [one for node in statements if isinstance(node, ast.ClassDef) for one in node.body]
    return [one for one in members if isinstance(one, ast.FunctionDef) and one.name == name]


def _statements(name: str) -> list[ast.stmt]:
    """Of a source file of vLLM's; none if it is not there."""
    found = importlib.util.find_spec("vllm")
    path = Path(found.origin).parent / name if found is not None and found.origin else None
    return module_of(path.read_text(encoding="utf-8")).body if path is not None and path.exists() else []
