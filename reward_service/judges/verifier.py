"""A judge as a verifier of the service."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from reward_service.endpoints.cache import key_of, open_cache
from reward_service.endpoints.endpoint import open_endpoint
from reward_service.endpoints.lane import AskingLane
from reward_service.judges.arguments import PairwiseArguments, ScoreArguments
from reward_service.judges.asking import Asking
from reward_service.judges.config import JudgeConfig, check_template
from reward_service.judges.judge import Judge
from reward_service.judges.template import RUBRIC, asked_verdict, built_in, system_text
from reward_service.lanes.contract import Lane, Surroundings, Verifier
from reward_service.verifier import UserError

_FINGERPRINT_CHARS = 12
# Settings that change what is asked; the others change only how.
_ASKED = ("model", "kind", "system", "rubric", "temperature", "max_tokens", "keep_thinking", "extra")

_DESCRIPTIONS = {
    "score": "What a language model says of the completion: 0 to 10, scaled to 0 to 1.",
    "pairwise": "Whether a language model prefers the completion to a baseline: 1 won, 0.5 tie, 0 lost.",
}


def judge_verifier(config: JudgeConfig) -> Verifier:
    """Its version holds the model's name and a fingerprint of all that the model is told.

    Raises UserError for a template that cannot be read or used.
    """
    template = _template_of(config)
    fingerprint = _fingerprint(config, template)
    arguments = ScoreArguments if config.kind == "score" else PairwiseArguments

    @asynccontextmanager
    async def opened(surroundings: Surroundings) -> AsyncIterator[Lane]:
        async with (
            open_endpoint(config, metrics=surroundings.metrics) as endpoint,
            open_cache(config.cache) as cache,
        ):
            asking = Asking(config, fingerprint=fingerprint, endpoint=endpoint, cache=cache)
            judge = Judge(config=config, template=template, asking=asking)
            yield AskingLane(arguments=arguments, function=judge.judge, asked=endpoint)

    return Verifier(
        name=config.name,
        version=f"1+{config.model}+{fingerprint[:_FINGERPRINT_CHARS]}",
        description=_DESCRIPTIONS[config.kind],
        arguments=arguments,
        open=opened,
    )


def _template_of(config: JudgeConfig) -> str | None:
    if config.template_file is None:
        return config.template
    try:
        template = config.template_file.read_text(encoding="utf-8")
        check_template(template, kind=config.kind, name=config.name)
    except (OSError, ValueError) as error:
        raise UserError(f"template_file {config.template_file}: {error}") from error
    return template


def _fingerprint(config: JudgeConfig, template: str | None) -> str:
    told = [
        *([template] if template else (built_in(config.kind, with_reference=given) for given in (False, True))),
        system_text(config.system, mark=""),
        asked_verdict(config.kind, mark=""),
        RUBRIC,
    ]
    settings = config.model_dump(mode="json", include=set(_ASKED))
    return key_of(*told, json.dumps(settings, sort_keys=True))
