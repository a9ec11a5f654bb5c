"""Adapters as generators know them: by the hash of their files, which they fetch from the targets' folders."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI
from fastapi import Path as PathParameter
from fastapi.responses import FileResponse

from learner.tenants.refusals import unknown
from learner.tenants.sampling import SampleFailed
from learner.tenants.turns import TargetWeights
from protocol.adapters import ADAPTER_FILES, WHOLE_FILES, OfferedAdapter, adapter_name

_KEPT_VERSIONS = 4096


@dataclass(frozen=True)
class _ServedAdapter:
    """Weights of a target, as they are offered. `versions`: the policy version of each that was offered before."""

    weights: TargetWeights
    offered: OfferedAdapter
    versions: dict[int, int] = field(default_factory=dict)


class ServedAdapters:
    """The newest weights of each target that somebody samples from.

    A target that stays goes by the name of its files: equal adapters are one. One that is replaced keeps its own name,
    and the operation that saved it is its version on the way, since a model's steps may also count down, by a load.
    """

    def __init__(self) -> None:
        self._served: dict[str, _ServedAdapter] = {}

    async def newest(self, weights: TargetWeights) -> OfferedAdapter | None:
        """The target's weights, these or later ones; None for the base model. Raises SampleFailed if they are gone."""
        if weights.folder is None:
            return None
        known = self._served.get(weights.target_id)
        if known is None or known.weights.seq_id < weights.seq_id:
            try:
                read = await asyncio.to_thread(_described, weights, weights.folder)
            except (OSError, ValueError, KeyError) as error:
                raise SampleFailed(f"the weights of {weights.target_id} cannot be read: {error}") from error
            known = self._put(weights, read)
        return known.offered

    def current(self, target_id: str) -> OfferedAdapter | None:
        """The newest weights of a target that were asked for; None if nobody has, or they were forgotten."""
        known = self._served.get(target_id)
        return None if known is None else known.offered

    def policy_version(self, weights: TargetWeights, version: int) -> int:
        """The number of steps of the weights that a generator calls by this version; it was given `weights`."""
        known = self._served.get(weights.target_id) if weights.is_inflight else None
        return weights.version if known is None else known.versions.get(version, weights.version)

    def forget(self, target_id: str) -> None:
        """Nobody samples from it any more."""
        self._served.pop(target_id, None)

    def file(self, name: str, file: str) -> Path:
        """A file of the adapter that goes by this name. Raises RequestRefused if there is none."""
        if file in (*ADAPTER_FILES, *WHOLE_FILES):
            for folder in self._folders(name):
                if (folder / file).is_file():
                    return folder / file
        raise unknown("adapter file", f"{name}/{file}")

    def _folders(self, name: str) -> Iterator[Path]:
        for served in self._served.values():
            if served.offered.name == name and served.weights.folder is not None:
                yield served.weights.folder

    def _put(self, weights: TargetWeights, offered: OfferedAdapter) -> _ServedAdapter:
        known = self._served.get(weights.target_id)
        if known is not None and known.weights.seq_id >= weights.seq_id:
            return known  # later ones have come while these were read
        versions = {} if known is None else known.versions
        versions[offered.version] = weights.version
        if len(versions) > _KEPT_VERSIONS:
            del versions[next(iter(versions))]
        self._served[weights.target_id] = served = _ServedAdapter(weights, offered, versions)
        return served


def add_adapter_routes(app: FastAPI, adapters: ServedAdapters) -> None:
    """`GET /v1/adapters/NAME/FILE`, for generators: the application's token guards it."""

    @app.get("/v1/adapters/{name}/{file}")
    async def adapter_file(
        name: Annotated[str, PathParameter(max_length=256)], file: Annotated[str, PathParameter(max_length=256)]
    ) -> FileResponse:
        """A file of an adapter that is sampled from, in peft's format."""
        return FileResponse(adapters.file(name, file), media_type="application/octet-stream")


def _described(weights: TargetWeights, folder: Path) -> OfferedAdapter:
    is_whole = (folder / WHOLE_FILES[0]).is_file()
    files = [(folder / file).read_bytes() for file in (WHOLE_FILES if is_whole else ADAPTER_FILES)]
    name, rank = adapter_name(files), 0 if is_whole else int(json.loads(files[0])["r"])
    if weights.is_inflight:
        return OfferedAdapter(
            target_id=weights.target_id, version=weights.seq_id, name=name, rank=rank, is_replaced=True
        )
    return OfferedAdapter(target_id=name, version=0, name=name, rank=rank)
