"""Answers that may be rated: their id, key, text and version; streamed ones, too; and a learner that is away."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from generator.feedback import RateableAnswers, ServedLine
from learner.data.preferences import read_labelled
from protocol.feedback import KEY_HEADER, ServedCompletion
from services.http.client import HttpClient
from services.http.metrics import Metrics
from tests.learner.data.character_tokenizer import CharacterTokenizer, shown

ENDED = {"finish_reason": "stop", "stop_reason": None}
USER = {"role": "user", "content": "2+2="}


def openai_like() -> FastAPI:
    """Answers as vLLM's routes do: ids are made of the request's."""
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        body, name = await request.json(), f"chatcmpl-{request.headers['x-request-id']}"
        beside = body.get("beside", {})
        if body.get("refused"):
            return JSONResponse({"error": "no"}, 400)
        if not body.get("stream"):
            message = {"role": "assistant", "content": "four", **beside}
            return {"id": name, "choices": [{"index": 0, "message": message, **body.get("end", ENDED)}]}

        async def parts() -> AsyncIterator[str]:
            for index, text in body.get("parts", ((0, "fo"), (1, "fi"), (0, "ur"), (1, "ve"))):
                part = {"id": name, "choices": [{"index": index, "delta": {"content": text, **beside}}]}
                yield f"data: {json.dumps(part, ensure_ascii=False)}\n\n"
            for index, end in body.get("ends", ((0, ENDED), (1, ENDED))):
                part = {"id": name, "choices": [{"index": index, "delta": {"content": ""}, **end}]}
                yield f"data: {json.dumps(part)}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(parts(), media_type="text/event-stream")

    @app.get("/v1/models")
    async def models() -> dict[str, str]:
        return {}

    return app


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["tool_calls", "reasoning", "reasoning_content"])
async def test_an_answer_of_which_a_part_is_not_in_its_text_cannot_be_rated(name: str, stream: bool) -> None:
    """It would be trained as a completion that nobody sampled."""
    _, told = await asked(stream=stream, beside={name: ["a call"]})
    assert told == []
    _, told = await asked(stream=stream, beside={name: []})
    assert len(told) == 1


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "low"},
        {"continue_final_message": True, "add_generation_prompt": False},
        {"add_special_tokens": True},
        {"echo": True},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "a"}]}, USER]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
        {"messages": [{"role": "assistant", "content": None}, USER]},
    ],
)
async def test_an_answer_to_more_than_the_texts_of_messages_cannot_be_rated(more: dict[str, object]) -> None:
    """A file of rated answers has messages and text alone: trained from it, the answer would be to another prompt."""
    answer, told = await asked(**more)
    assert answer.status_code == 200
    assert told == []


async def test_what_a_request_says_without_effect_leaves_its_answer_rateable(tmp_path: Path) -> None:
    """And what is told is what a training file holds."""
    part = {"role": "user", "content": [{"type": "text", "text": "2+2="}]}
    _, (told,) = await asked(messages=[part], tools=None, echo=False, add_special_tokens=False, tool_choice="none")
    assert told.prompt == [{"role": "user", "content": "2+2="}]
    path = tmp_path / "rated.jsonl"
    row = {"prompt": told.prompt, "completion": told.choices[0], "label": True}
    path.write_text(json.dumps(row) + "\n")
    (read,) = read_labelled(path, CharacterTokenizer())
    assert shown(read.completion)[0] == "<u>2+2=|\n<a>four|"


async def test_text_that_no_json_can_hold_stops_no_other_answer() -> None:
    _, told = await asked(messages=[{"role": "user", "content": "\ud800"}])
    assert told == []
    _, (well,) = await asked()
    async with HttpClient() as client:
        line = ServedLine(learner="http://127.0.0.1:9", client=client, metrics=Metrics("generator"))
        line.put(well.model_copy(update={"prompt": "\ud800"}))
        line.put(well)
        running = asyncio.create_task(line.run())
        async with asyncio.timeout(20):
            while list(line._waiting) != [well]:
                assert not running.done()
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running])


async def asked(**more: object) -> tuple[httpx.Response, list[ServedCompletion]]:
    told: list[ServedCompletion] = []
    versions = iter(("1.10", "1.20"))
    app = RateableAnswers(openai_like(), version=lambda: next(versions), told=told.append)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://g") as client:
        body = {"messages": [{"role": "user", "content": "2+2="}], **more}
        answer = await client.post(
            "/v1/chat/completions", content=json.dumps(body), headers={"x-request-id": "chosen-by-the-user"}
        )
        if more.get("models"):
            answer = await client.get("/v1/models")
        return answer, told


async def test_the_learner_is_told_of_text_and_version_and_never_of_the_key() -> None:
    answer, (told,) = await asked()
    assert told.id == answer.json()["id"]
    assert "chosen-by-the-user" not in told.id
    assert told.key_hash == hashlib.sha256(answer.headers[KEY_HEADER].encode()).hexdigest()
    assert (told.version, told.until, told.choices, told.cut_off) == ("1.10", "1.20", ("four",), ())
    assert told.prompt == [{"role": "user", "content": "2+2="}]


async def test_a_streamed_answer_is_put_together_by_choice() -> None:
    answer, (told,) = await asked(stream=True)
    assert "data: [DONE]" in answer.text
    assert KEY_HEADER in answer.headers
    assert (told.choices, told.cut_off) == (("four", "five"), ())


async def test_a_streamed_answer_may_hold_what_unicode_takes_for_the_end_of_a_line() -> None:
    _, (told,) = await asked(stream=True, parts=[(0, "one\u2028two"), (0, "\x85three\u2029")], ends=[(0, ENDED)])
    assert told.choices == ("one\u2028two\x85three\u2029",)


@pytest.mark.parametrize(
    "end",
    [
        {"finish_reason": "length", "stop_reason": None},
        {"finish_reason": "stop", "stop_reason": "\n"},
        {"finish_reason": "stop", "stop_reason": 17},
        {"finish_reason": None},
        {},
    ],
)
async def test_an_answer_that_the_policy_did_not_end_is_told_as_cut_off(end: dict[str, object]) -> None:
    _, (whole,) = await asked(end=end, stop_token_ids=[17])
    _, (streamed,) = await asked(stream=True, ends=[(0, ENDED), (1, end)], stop_token_ids=[17])
    assert (whole.cut_off, streamed.cut_off) == ((0,), (1,))


async def test_an_answer_that_another_of_the_models_end_tokens_ended_is_whole() -> None:
    end = {"finish_reason": "stop", "stop_reason": 106}
    _, (whole,) = await asked(end=end)
    _, (streamed,) = await asked(stream=True, ends=[(0, end), (1, end)], stop_token_ids=[17])
    assert (whole.cut_off, streamed.cut_off) == ((), ())


async def test_a_refused_request_has_no_key_and_is_not_told_of() -> None:
    answer, told = await asked(refused=True)
    assert answer.status_code == 400
    assert KEY_HEADER not in answer.headers
    assert told == []


async def test_a_line_to_a_learner_that_is_away_keeps_the_newest_answers() -> None:
    async with HttpClient() as client:
        line = ServedLine(learner="http://127.0.0.1:9", client=client, metrics=Metrics("generator"))
        running = asyncio.create_task(line.run())
        _, (told,) = await asked()
        for number in range(600):
            line.put(told.model_copy(update={"id": f"chatcmpl-{number}"}))
        await asyncio.sleep(0)
        assert len(line._waiting) == 512
        assert line._waiting[-1].id == "chatcmpl-599"
        running.cancel()
        await asyncio.wait([running])
