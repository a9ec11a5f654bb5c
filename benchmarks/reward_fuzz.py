"""Fuzzes a running reward service by its own OpenAPI document, and its verifiers by the schemas of their arguments.

    .venv/bin/python -m benchmarks.reward_fuzz URL [--examples N] [--seed N]

Every answer must come in time, with a status, a content type and a body that the document announces, and never with a
status of 5xx. Every item must have a reward or an error of its own. Raises what the first failure was.
"""

import argparse
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from schemathesis import Case, CheckFunction, GenerationMode
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import positive_data_acceptance

from protocol.rewards import VerifierInfo, VerifierList

_HANGS_S = 60.0

T = TypeVar("T")


def main() -> None:
    """Fuzz the service at the given address."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--examples", type=int, default=2000, help="of each operation, valid and invalid, and verifier")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    names = fuzz_operations(arguments.url, examples=arguments.examples, number=arguments.seed)
    names += fuzz_verifiers(arguments.url, examples=arguments.examples, number=arguments.seed)
    print("no failure in", ", ".join(names))


def fuzz_operations(url: str, *, examples: int, number: int) -> list[str]:
    """Valid and invalid requests to every operation, whose names are returned."""
    return _fuzz(_document(url), url=url, examples=examples, number=number, modes=list(GenerationMode))


def fuzz_verifiers(url: str, *, names: Collection[str] | None = None, examples: int, number: int) -> list[str]:
    """Items whose arguments fit the schema of each verifier, or of the named ones; their names are returned."""
    offered = VerifierList.model_validate_json(httpx.get(f"{url}/v1/verifiers", timeout=_HANGS_S).content)
    chosen = [verifier for verifier in offered.verifiers if names is None or verifier.name in names]
    for verifier in chosen:
        document = _document_for(verifier, _document(url))
        _fuzz(document, url=url, examples=examples, number=number, modes=[GenerationMode.POSITIVE])
    return [f"verifier {verifier.name}" for verifier in chosen]


def _document(url: str) -> dict[str, Any]:
    return TypeAdapter(dict[str, Any]).validate_json(httpx.get(f"{url}/openapi.json", timeout=_HANGS_S).content)


def _document_for(verifier: VerifierInfo, document: dict[str, Any]) -> dict[str, Any]:
    """The document of a service whose every item is for one verifier, with arguments that fit it."""
    properties = document["components"]["schemas"]["ScoreItem"]["properties"]
    properties["verifier"] = {"const": verifier.name}
    properties["arguments"] = verifier.arguments_schema
    document["components"]["schemas"]["ScoreItem"]["required"].append("arguments")
    document["components"]["schemas"]["ScoreRequest"]["properties"]["items"]["maxItems"] = 4
    # Where the references of the verifier's schema lead.
    document["$defs"] = verifier.arguments_schema.get("$defs", {})
    document["paths"] = {"/v1/score": document["paths"]["/v1/score"]}
    return document


def _has_twins(body: object) -> bool:
    """True if items of a scoring request share an id."""
    items = body.get("items") if isinstance(body, dict) else None
    ids = [str(item.get("id")) for item in items if isinstance(item, dict)] if isinstance(items, list) else []
    return len(set(ids)) < len(ids)


def _fuzz(document: dict[str, Any], *, url: str, examples: int, number: int, modes: list[GenerationMode]) -> list[str]:
    names = []

    def check(case: Case[Any]) -> None:
        # Whether a program can be run, lists are equally long, or ids differ, is more than a schema can say.
        more = case.path in ("/v1/execute", "/get_reward/{verifier}") or _has_twins(case.body)
        skipped: list[CheckFunction] = [positive_data_acceptance] if more else []
        case.call_and_validate(base_url=url, timeout=_HANGS_S, excluded_checks=skipped)

    for found in schemathesis.openapi.from_dict(document).get_all_operations():
        assert isinstance(found, Ok), found
        operation = found.ok()
        names.append(operation.label)
        for mode in modes:
            # There is no wrong request to an operation without parameters.
            if mode is GenerationMode.POSITIVE or operation.body or operation.query or operation.headers:
                _run(operation.as_strategy(generation_mode=mode), check, examples=examples, number=number)
    return names


def _run(strategy: st.SearchStrategy[T], check: Callable[[T], None], *, examples: int, number: int) -> None:
    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def run(value: T) -> None:
        check(value)

    run()


if __name__ == "__main__":
    main()
