import httpx
import pytest

EXACT = {"id": "a", "verifier": "exact_match", "completion": "7", "arguments": {"answer": "7"}}


async def test_a_batch_is_answered_in_order(client: httpx.AsyncClient) -> None:
    items = [EXACT, {**EXACT, "id": "b", "completion": "8"}, {**EXACT, "id": "c", "verifier": "none"}]
    answer = await client.post("/v1/score", json={"items": items})
    assert answer.status_code == 200
    first, second, third = answer.json()["results"]
    assert (first["id"], first["reward"], first["error"]) == ("a", 1.0, None)
    assert (second["id"], second["reward"], second["verifier_version"]) == ("b", 0.0, "1")
    assert (third["id"], third["reward"], third["error"]["kind"]) == ("c", None, "user")


async def test_the_math_verifier_answers_over_http(client: httpx.AsyncClient) -> None:
    item = {"id": "m", "verifier": "math", "completion": r"So \boxed{\frac{1}{2}}", "arguments": {"answer": "0.5"}}
    answer = await client.post("/v1/score", json={"items": [item]})
    assert answer.json()["results"][0]["reward"] == 1.0


async def test_a_pathological_expression_is_an_error_and_its_neighbour_is_scored(client: httpx.AsyncClient) -> None:
    burns = r"\boxed{\sum_{k=1}^{1} 7^{(9999 \cdot 9999 \cdot 99)}}"
    hard = {"id": "h", "verifier": "math", "completion": burns, "arguments": {"answer": "3"}}
    await client.post("/v1/score", json={"items": [{**hard, "completion": "3"}]})
    answer = await client.post("/v1/score", json={"items": [hard, EXACT], "deadline_s": 2.0})
    first, second = answer.json()["results"]
    assert first["error"]["kind"] == "infrastructure"
    assert second["reward"] == 1.0


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        (b"", 400, "JSON"),
        (b'{"items": [', 400, "JSON"),
        (b"[]", 422, "body"),
        (b'{"items": []}', 422, "items"),
        (b'{"items": [{"id": "a"}]}', 422, "items.0.verifier"),
        (b'{"items": [{"id": 1, "verifier": "exact_match", "completion": ""}]}', 422, "items.0.id"),
        (
            b'{"items": [{"id": "a", "verifier": "exact_match", "completion": "", "argument": {}}]}',
            422,
            "items.0.argument: Extra inputs are not permitted; did you mean arguments?",
        ),
        (b'{"items": [{"id": "a", "verifer": "exact_match", "completion": ""}]}', 422, "did you mean verifier?"),
        (b'{"items": [{"id": "a", "verifier": "exact_match", "completion": "", "zzz": 1}]}', 422, "zzz: Extra"),
        (
            b'{"items": [{"id": "a", "verifier": "exact_match", "completion": ""}, {"id": "a", "verifier": "math", '
            b'"completion": ""}]}',
            422,
            "the id 'a' is given more than once",
        ),
        (b'{"items": [{"id": "a", "verifier": "exact_match", "completion": ""}], "deadline_s": -1}', 422, "deadline_s"),
        (
            b'{"items": [{"id": "a", "verifier": "exact_match", "completion": ""}], "deadline_s": NaN}',
            422,
            "deadline_s",
        ),
        (b'{"items": [{"id": "a", "verifier": "exact_match", "completion": "\\ud800"}]}', 400, "JSON"),
        (b'{"items": "' + b"x" * 100_000 + b'"}', 413, "100000"),
    ],
)
async def test_a_malformed_body_is_refused_with_its_place_named(
    client: httpx.AsyncClient, body: bytes, status: int, named: str
) -> None:
    answer = await client.post("/v1/score", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    assert named in answer.json()["error"]["message"]
    assert (await client.post("/v1/score", json={"items": [EXACT]})).json()["results"][0]["reward"] == 1.0


async def test_a_wrong_token_is_refused(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/score", json={"items": [EXACT]}, headers={"Authorization": "Bearer other"})
    assert answer.status_code == 401


async def test_verifiers_are_listed_with_the_schema_of_their_arguments(client: httpx.AsyncClient) -> None:
    listed = {info["name"]: info for info in (await client.get("/v1/verifiers")).json()["verifiers"]}
    assert {"exact_match", "math", "reasoning_gym", "contains"} <= listed.keys()
    assert listed["contains"]["description"] == "1 when the completion contains the word."
    assert listed["contains"]["version"] == "7"
    assert listed["exact_match"]["arguments_schema"]["required"] == ["answer"]


async def test_items_and_errors_are_counted_by_verifier(client: httpx.AsyncClient) -> None:
    items = [EXACT, {**EXACT, "id": "b", "arguments": {}}, {**EXACT, "id": "c", "verifier": "made up by a caller"}]
    await client.post("/v1/score", json={"items": items})
    metrics = (await client.get("/metrics")).text
    assert 'headway_reward_service_score_seconds_count{verifier="exact_match"} 2.0' in metrics
    assert 'headway_reward_service_errors_total{kind="user",verifier="exact_match"} 1.0' in metrics
    assert 'headway_reward_service_errors_total{kind="user",verifier="unknown"} 1.0' in metrics
    assert "made up" not in metrics
