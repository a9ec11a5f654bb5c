"""The tree of weights: each version of it, by whatever way, is that which was packed, bit by bit; and who pulls it."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from generator.weights.tree_download import TreeDownloads, TreeSources
from learner.weights.process_group import Bucket, lay_out
from learner.weights.published import PackedWeights, Packer, Snapshot
from learner.weights.tree import DeltaReport, WeightTree
from protocol.weight_tree import OBJECTS, VersionManifest
from services.http.client import HttpClient, ServiceRefused, ServiceUnreachable
from services.process import DaemonThreads
from tests.learner.generators import ScriptedGenerator
from tests.learner.weights.publishing import OPTIONS, learner, snapshot

THREADS = DaemonThreads(name="tree-tests")
NO_PROBE = snapshot(0).probe


class MovingWeights:
    """Weights of several types, of which each version moves some to a neighbour."""

    def __init__(self, *, seed: int = 0) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self.tensors = [
            ("embedding", torch.randn(40, 50, generator=self._random).bfloat16()),
            ("router", torch.randn(7, 3, generator=self._random)),
            ("norm", torch.ones(11).bfloat16()),
            ("frozen", torch.randn(3000, generator=self._random).bfloat16()),
        ]

    def move(self, share: float = 0.02) -> None:
        for name, tensor in self.tensors:
            if name != "frozen":
                raw = tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)
                raw += (torch.rand(raw.shape, generator=self._random) < share).to(raw.dtype)

    def renew(self) -> None:
        """All of them are others, which changes tell at greater length than they are."""
        for _, tensor in self.tensors:
            tensor.copy_(torch.randn(tensor.shape, generator=self._random))

    async def packed(self, version: int, *, incarnation: int = 1) -> PackedWeights:
        given = Snapshot(version, buckets=lay_out(self.tensors, bucket_bytes=4500), probe=NO_PROBE)
        return await Packer(incarnation=incarnation, threads=THREADS).pack(given)


class FolderClient(HttpClient):
    """Reads objects of a tree where a client would ask for them; `damage` changes some, or loses them with None."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.asked: list[str] = []
        self.damage: Callable[[str, bytes], bytes | None] = lambda name, content: content

    async def download(
        self,
        url: str,
        *,
        deadline_s: float,
        bytes_per_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[bytes, Mapping[str, str]]:
        name = url.rsplit("/", 1)[1]
        self.asked.append(name)
        path = self.folder / OBJECTS / name
        content = self.damage(name, path.read_bytes()) if path.exists() else None
        if content is None:
            raise ServiceRefused(url, status=404, kind="not_kept", message="it is not there")
        return content, {}


@dataclass
class PullingSide:
    """A generator's downloads, from a folder. `packed` is what the learner would give it whole."""

    tree: WeightTree
    folder: Path
    packed: PackedWeights | None = None
    dense: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.client = FolderClient(self.tree.folder)
        sources = TreeSources(
            relays=(), relay_client=self.client, learner="http://learner", client=self.client, patience_s=0.0
        )
        self.downloads = TreeDownloads(sources=sources, folder=self.folder, dense=self._whole)

    async def _whole(self, version: str, index: int, path: str, nbytes: int) -> None:
        assert self.packed is not None
        self.dense.append(index)
        bucket = self.packed.buckets[index]
        assert isinstance(bucket, Bucket), "it is of one rank"
        bucket.data.numpy().tofile(path)

    async def pull(self, packed: PackedWeights) -> int:
        """Downloads a version, and compares every bit. The bytes that came."""
        self.packed = packed
        name = self.tree.manifest(packed)
        assert name is not None
        plan, paths, received = await self.downloads.download(str(packed.version), name)
        assert plan.buckets == tuple(bucket.spec for bucket in packed.buckets)
        for bucket, path in zip(packed.buckets, paths, strict=True):
            assert isinstance(bucket, Bucket), "it is of one rank"
            assert np.array_equal(np.fromfile(path, np.uint8), bucket.data.numpy())
        return received


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr("generator.weights.tree_download._PAUSE_S", 0.0)


def tree_in(tmp_path: Path, *, anchor_every: int = 50) -> WeightTree:
    return WeightTree(tmp_path / "tree", anchor_every=anchor_every, threads=THREADS)


async def grown(tree: WeightTree, weights: MovingWeights, version: int) -> PackedWeights:
    weights.move()
    packed = await weights.packed(version)
    await tree.add(packed)
    return packed


async def test_versions_in_a_row_are_those_that_were_packed_bit_by_bit(tmp_path: Path) -> None:
    weights, tree = MovingWeights(), tree_in(tmp_path, anchor_every=8)
    ours, came = PullingSide(tree, tmp_path / "held"), []
    for version in range(200):
        came.append(await ours.pull(await grown(tree, weights, version)))
    assert not ours.dense
    assert max(came[1:]) < came[0] / 2, "also where there is an anchor: who follows downloads changes alone"
    assert len(list(tree.file("").iterdir())) < 20 * 16, "what nobody needs any more is deleted"
    assert [path.name for path in ours.folder.iterdir()], "one version is held"
    assert len(list(ours.folder.iterdir())) == 1


async def test_who_comes_late_or_has_missed_versions_takes_the_shorter_way(tmp_path: Path) -> None:
    weights, tree = MovingWeights(), tree_in(tmp_path, anchor_every=6)
    always = PullingSide(tree, tmp_path / "always")
    seldom = PullingSide(tree, tmp_path / "seldom")
    for version in range(15):
        packed = await grown(tree, weights, version)
        await always.pull(packed)
        if version % 4 == 1:
            await seldom.pull(packed)
    late = PullingSide(tree, tmp_path / "late")
    whole = await late.pull(packed)
    assert whole > await seldom.pull(packed) > 0
    assert not late.dense + seldom.dense + always.dense
    assert await seldom.pull(packed) < 2000, "nothing but a manifest"


async def test_where_the_changes_are_longer_than_an_anchor_the_anchor_is_taken(tmp_path: Path) -> None:
    weights, tree = MovingWeights(), tree_in(tmp_path, anchor_every=3)
    seldom = PullingSide(tree, tmp_path / "seldom")
    for version in range(9):
        weights.renew()
        packed = await grown(tree, weights, version)
        if not version:
            await seldom.pull(packed)
    before = len(seldom.client.asked)
    await seldom.pull(packed)
    manifests = [
        VersionManifest.model_validate_json(tree.file(name).read_bytes())
        for name in seldom.client.asked[before:]
        if tree.file(name).exists() and tree.file(name).read_bytes().startswith(b'{"version"')
    ]
    assert {manifest.version for manifest in manifests} < {"1.8", "1.7", "1.6", "1.5", "1.4"}


async def test_a_damaged_or_a_lost_object_is_made_good_by_the_learners_own_buckets(tmp_path: Path) -> None:
    weights, tree = MovingWeights(), tree_in(tmp_path)
    ours = PullingSide(tree, tmp_path / "held")
    await ours.pull(await grown(tree, weights, 0))
    for version, damage in enumerate((_flipped, _cut, _lost), 1):
        packed = await grown(tree, weights, version)
        manifest = VersionManifest.model_validate_json(tree.file(str(tree.manifest(packed))).read_bytes())
        victim = manifest.parts[0].name
        ours.client.damage = lambda name, content, at=victim, how=damage: how(content) if name == at else content  # type: ignore[misc]
        ours.dense = []
        await ours.pull(packed)
        assert ours.dense, "the tree could not yield it"
    ours.client.damage, ours.dense = lambda name, content: content, []
    await ours.pull(await grown(tree, weights, 4))
    assert not ours.dense, "changes again"


def _flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def _cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _lost(content: bytes) -> None:
    return None


async def test_changes_to_weights_that_are_not_those_of_the_base_are_found_by_their_hash(tmp_path: Path) -> None:
    """As after a fault of the disk of what is held."""
    weights, tree = MovingWeights(), tree_in(tmp_path)
    ours = PullingSide(tree, tmp_path / "held")
    await ours.pull(await grown(tree, weights, 0))
    (held,) = ours.folder.iterdir()
    spoiled = bytearray((held / "0.bucket").read_bytes())
    spoiled[5] ^= 4
    (held / "0.bucket").write_bytes(spoiled)
    await ours.pull(await grown(tree, weights, 1))
    assert ours.dense == [0]


async def test_another_life_of_the_learner_with_equal_weights_has_nothing_to_be_downloaded(tmp_path: Path) -> None:
    weights, tree = MovingWeights(), tree_in(tmp_path)
    ours = PullingSide(tree, tmp_path / "held")
    packed = await grown(tree, weights, 0)
    await ours.pull(packed)
    again = tree_in(tmp_path)
    same = await weights.packed(0, incarnation=2)
    await again.add(same)
    ours.tree = again
    before = len(ours.client.asked)
    assert np.less(await ours.pull(same), packed.nbytes("whole") / 4)
    assert len(ours.client.asked) == before + 1, "its manifest alone"


async def test_another_layout_is_an_anchor(tmp_path: Path) -> None:
    weights, tree = MovingWeights(), tree_in(tmp_path)
    ours = PullingSide(tree, tmp_path / "held")
    await ours.pull(await grown(tree, weights, 0))
    weights.tensors = [*weights.tensors, ("head", torch.zeros(5, 3))]
    await ours.pull(await grown(tree, weights, 1))
    assert not ours.dense


async def test_a_folder_that_was_taken_over_is_left_to_its_new_owner(tmp_path: Path) -> None:
    class Taken(Exception):
        pass

    weights, is_taken = MovingWeights(), False

    def may_write() -> None:
        if is_taken:
            raise Taken

    tree = WeightTree(tmp_path / "tree", anchor_every=1, threads=THREADS, may_write=may_write)
    for version in range(3):
        await grown(tree, weights, version)
    is_taken = True
    successor = tree_in(tmp_path)
    packed = await grown(successor, weights, 3)
    late = WeightTree(tmp_path / "tree", anchor_every=1, threads=THREADS, may_write=may_write)
    for one in (tree, late):
        with pytest.raises(Taken):
            await grown(one, weights, 4)
    assert len(list(tree.file("").iterdir())) == 2 + len(
        {part.name for part in manifest_of(successor, packed).whole}
    ), "manifest, layout and what they name"


def manifest_of(tree: WeightTree, packed: PackedWeights) -> VersionManifest:
    return VersionManifest.model_validate_json(tree.file(str(tree.manifest(packed))).read_bytes())


# Who is sent what.


async def test_a_generator_that_pulls_is_in_no_broadcast_and_serves_each_version(tmp_path: Path) -> None:
    pulling, other = ScriptedGenerator("a", weights_way="pull"), ScriptedGenerator("b")
    async with pulling.running() as a, other.running() as b, learner(tree_folder=tmp_path / "tree") as ours:
        ours.join(a, b)
        for version in range(4):
            await ours.publish(version, a, b)
        assert a.joins == []
        assert a.pulls == ["1.0", "1.1", "1.2", "1.3"]
        assert all(a.manifests), "each by a manifest"
        assert len(b.pulls) == 1
        assert len(ours.joined) == 2, "those that served nothing before"


async def test_of_two_that_pull_alone_each_version_is_published(tmp_path: Path) -> None:
    pulling = [ScriptedGenerator(name, weights_way="pull") for name in "ab"]
    async with pulling[0].running() as a, pulling[1].running() as b, learner(tree_folder=tmp_path / "tree") as ours:
        ours.join(a, b)
        for version in range(3):
            await ours.publish(version, a, b)
        assert [report.version for report in ours.reports] == [0, 1, 2]


async def test_one_that_pulls_too_slowly_serves_nothing_until_it_has_caught_up_and_the_others_go_on(
    tmp_path: Path,
) -> None:
    pulling, other = ScriptedGenerator("a", weights_way="pull"), ScriptedGenerator("b")
    options = replace(OPTIONS, most_behind=2)
    async with pulling.running() as a, other.running() as b, learner(options, tree_folder=tmp_path / "tree") as ours:
        ours.join(a, b)
        await ours.publish(0, a, b)
        a.hold["pull"] = asyncio.Event()
        for version in (1, 2):
            ours.publisher.offer(snapshot(version))
            await ours.until_served(a=0, b=version)
        ours.publisher.offer(snapshot(3))
        await ours.until_served(b=3)
        a.hold.pop("pull").set()
        await ours.until_served(a=3, b=3)


async def test_where_all_pull_too_slowly_they_serve_on(tmp_path: Path) -> None:
    async with (
        ScriptedGenerator("a", weights_way="pull").running() as a,
        learner(tree_folder=tmp_path / "tree") as ours,
    ):
        ours.join(a)
        await ours.publish(0, a)
        a.hold["pull"] = asyncio.Event()
        for version in range(1, 5):
            ours.publisher.offer(snapshot(version))
            await ours.until(lambda at=version: ours.grown[-1].version == at)  # type: ignore[misc]
        assert ours.serving == {"a": "1.0"}
        a.hold.pop("pull").set()
        await ours.until_served(a=4)


async def test_where_the_tree_cannot_be_written_whole_weights_are_downloaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way of a folder")
    async with (
        ScriptedGenerator("a", weights_way="pull").running() as a,
        learner(tree_folder=tmp_path / "file" / "tree") as ours,
    ):
        ours.join(a)
        for version in range(2):
            await ours.publish(version, a)
        assert a.manifests == [None, None]


async def test_those_that_pull_from_relays_do_so_beside_each_other(tmp_path: Path) -> None:
    pulling = [ScriptedGenerator(name, weights_way="pull", relayed=True) for name in "abc"]
    options = replace(OPTIONS, parallel_pulls=1)
    async with (
        pulling[0].running() as a,
        pulling[1].running() as b,
        pulling[2].running() as c,
        learner(options, tree_folder=tmp_path / "tree") as ours,
    ):
        held = asyncio.Event()
        for each in pulling:
            each.hold["pull"] = held
        ours.join(a, b, c)
        ours.publisher.offer(snapshot(0))
        await ours.until(lambda: all(each.pulls for each in pulling))
        held.set()
        await ours.until_served(a=0, b=0, c=0)


async def test_a_version_that_is_too_old_by_now_is_not_pulled_and_not_put_into_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases are granted by the oldest version that is served."""
    gate, add = asyncio.Event(), WeightTree.add

    async def slow(tree: WeightTree, packed: PackedWeights) -> DeltaReport:
        if packed.version.number:
            await gate.wait()
        return await add(tree, packed)

    monkeypatch.setattr(WeightTree, "add", slow)
    pulling, other = ScriptedGenerator("a", weights_way="pull"), ScriptedGenerator("b")
    options = replace(OPTIONS, most_behind=2)
    async with pulling.running() as a, other.running() as b, learner(options, tree_folder=tmp_path / "tree") as ours:
        ours.join(a, b)
        await ours.publish(0, a, b)
        for version in range(1, 6):
            ours.publisher.offer(snapshot(version))
            await ours.until(lambda at=version: ours.serving.get("b") == f"1.{at}")  # type: ignore[misc]
        gate.set()
        await ours.until_served(a=5, b=5)
        assert a.pulls == ["1.0", "1.5"]


async def test_what_has_become_too_old_while_it_was_pulled_is_not_served(tmp_path: Path) -> None:
    pulling, other = ScriptedGenerator("a", weights_way="pull"), ScriptedGenerator("b")
    options = replace(OPTIONS, most_behind=2)
    async with pulling.running() as a, other.running() as b, learner(options, tree_folder=tmp_path / "tree") as ours:
        ours.join(a, b)
        await ours.publish(0, a, b)
        a.hold["pull"] = asyncio.Event()
        for version in range(1, 6):
            ours.publisher.offer(snapshot(version))
            await ours.until(lambda at=version: ours.serving.get("b") == f"1.{at}")  # type: ignore[misc]
            await ours.until(lambda: len(a.pulls) == 2)
        a.hold.pop("pull").set()
        await ours.until_served(a=5, b=5)
        assert a.versions == ["1.0", "1.5"]


async def test_one_that_hangs_does_not_hold_up_a_version_that_is_held(tmp_path: Path) -> None:
    pulling, other = ScriptedGenerator("a", weights_way="pull"), ScriptedGenerator("b")
    async with pulling.running() as a, other.running() as b, learner(tree_folder=tmp_path / "tree") as ours:
        ours.join(a)
        await ours.publish(0, a)
        a.hold["pull"] = asyncio.Event()
        ours.publisher.offer(snapshot(1), hold=True)
        assert not await ours.publisher.served_in_time(1, wait_s=0.1), "nobody else serves"
        assert ours.serving == {"a": "1.0"}
        ours.join(b)
        await ours.until(lambda: ours.serving.get("b") == "1.1")
        assert await ours.publisher.served_in_time(1, wait_s=0.1)
        assert ours.serving == {"b": "1.1"}
        a.hold.pop("pull").set()
        await ours.until_served(a=1, b=1)


async def test_while_nobody_pulls_no_version_is_held_in_memory_and_the_next_is_an_anchor(tmp_path: Path) -> None:
    pulling, other = ScriptedGenerator("a", weights_way="pull"), ScriptedGenerator("b")
    async with pulling.running() as a, other.running() as b, learner(tree_folder=tmp_path / "tree") as ours:
        ours.join(a, b)
        await ours.publish(0, a, b)
        tree = ours.publisher._tree
        assert tree is not None
        assert tree.newest is not None
        ours.fleet.lost("a")
        await ours.until(lambda: tree.newest is None)
        assert not any(version.packed.buckets for version in tree._grown)
        await ours.publish(1, b)
        ours.join(a)
        await ours.until_served(a=1, b=1)
        assert [bool(report.anchor_bytes) for report in ours.grown] == [True, True]


async def test_where_a_rank_does_not_hand_out_its_part_whole_weights_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(packed: PackedWeights) -> PackedWeights:
        raise ServiceUnreachable("http://rank", "it is gone", sent=False)

    monkeypatch.setattr(PackedWeights, "brought_here", gone)
    pulling = ScriptedGenerator("a", weights_way="pull")
    async with pulling.running() as a, learner(tree_folder=tmp_path / "tree") as ours:
        ours.join(a)
        await ours.publish(0, a)
        assert a.manifests == [None]
