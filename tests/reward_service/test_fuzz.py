"""A short run of `benchmarks.reward_fuzz` against the real service."""

from pathlib import Path

import pytest

from benchmarks.reward_fuzz import fuzz_operations, fuzz_verifiers
from tests.reward_service.real_service import real_service

pytestmark = pytest.mark.e2e

CONFIG = '[reward-service]\nsandbox = "off"\nhttp = { port = 0 }\nworkers = { count = 1 }\n'


def test_no_request_is_answered_with_a_fault_of_the_service_or_never(tmp_path: Path) -> None:
    with real_service(tmp_path, CONFIG) as (_, client):
        url = str(client.base_url).rstrip("/")
        assert "POST /v1/score" in fuzz_operations(url, examples=10, number=1)
        fuzz_verifiers(url, names=("composite", "exact_match", "math"), examples=5, number=1)
        assert client.get("/healthz").status_code == 200
