"""Changes of the weights from version to version, and the time to serve them over a slow link, or the whole weights.

    python -m benchmarks.weight_deltas changes [--versions 40] [--rates 1e-6 1e-5 1e-4 5e-4] [--check 200]
    python -m benchmarks.weight_deltas link [--parameters 30000000] [--share 0.02] [--loss 0 10] [--generators 3]

`changes` trains models/addition by GRPO as `benchmarks.lag_cost` does (the real trainer, a plain sampler of the same
weights in place of vLLM and the services; 256 completions a step in groups of 4, by four updates: two in each of two
passes), at a constant learning rate after five updates of warm-up, in bfloat16 with float32 masters. Before each step
the weights are published to the real tree, pulled from it by the generator's own code, and compared with the weights as
they are, bit by bit.

`link` needs root. Learner, relay and generators are in network namespaces of their own, with a bridge between: the
learner's uplink has 100 Mbit/s (a token bucket of the kernel), and every link drops so many of a thousand packets at
random where it receives (an XDP program). No delay is added. The learner has its real routes, with synthetic weights of
which each version moves a share to a neighbour; relay and generators run their real code, without an engine.
"""

import argparse
import asyncio
import ctypes
import json
import os
import shlex
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.machine import described_machine
from generator.weights.tree_download import TreeDownloads, TreeSources
from protocol.weight_tree import OBJECTS, TREE_ROUTE
from services.http.client import HttpClient, ServiceRefused

if TYPE_CHECKING:
    from learner.weights.published import PackedWeights
    from learner.weights.tree import DeltaReport, WeightTree

RESULTS = Path(__file__).with_name("results")
HEAD = "# Weights over a slow network\n\n`benchmarks/weight_deltas.py`, which says what is measured.\n"
MBIT = 100
_XDP, _BPF_PROG_LOAD, _BPF_LINK_CREATE, _BPF = 37, 5, 28, 321


class TreeFolderClient(HttpClient):
    """Reads a tree's objects from its folder, in place of a connection."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    async def download(
        self,
        url: str,
        *,
        deadline_s: float,
        bytes_per_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[bytes, Mapping[str, str]]:
        """Any object by the end of its URL."""
        del deadline_s, bytes_per_s, headers
        path = self._folder / OBJECTS / url.rsplit("/", 1)[1]
        if not path.exists():
            raise ServiceRefused(url, status=404, kind="not_kept", message="it is not there")
        return path.read_bytes(), {}


async def _no_whole_bucket(version: str, index: int, path: str, nbytes: int) -> None:
    raise AssertionError(f"bucket {index} of version {version} was not made of the tree")


@dataclass
class FollowedTree:
    """A tree, and a generator's downloads of it in the same process."""

    tree: "WeightTree"
    downloads: TreeDownloads

    @classmethod
    def in_folder(cls, folder: Path, *, anchor_every: int) -> "FollowedTree":
        from learner.weights.tree import WeightTree
        from services.process import DaemonThreads

        tree = WeightTree(folder / "tree", anchor_every=anchor_every, threads=DaemonThreads(name="benchmark"))
        held = folder / "held"
        held.mkdir()
        client = TreeFolderClient(tree.folder)
        sources = TreeSources(relays=(), relay_client=client, learner="http://l", client=client, patience_s=0.0)
        return cls(tree, TreeDownloads(sources=sources, folder=held, dense=_no_whole_bucket))

    async def publish(self, packed: "PackedWeights") -> "DeltaReport":
        """Adds a version, pulls it, and fails unless every bit is that of the weights."""
        from learner.weights.process_group import Bucket

        report = await self.tree.add(packed)
        name = self.tree.manifest(packed)
        assert name is not None, "it has just been added"
        _, paths, _ = await self.downloads.download(str(packed.version), name)
        for bucket, path in zip(packed.buckets, paths, strict=True):
            assert isinstance(bucket, Bucket), "it is of one rank"
            assert np.array_equal(np.fromfile(path, np.uint8), bucket.data.numpy()), f"version {packed.version} differs"
        return report


async def changes_of_a_training(rate: float, *, versions: int, updates: int, folder: Path) -> list["DeltaReport"]:
    """Trains so many steps at a learning rate, and publishes each; all are compared bit by bit."""
    import torch

    from benchmarks.lag_cost import COMPLETIONS, DEMO, GROUP_SIZE
    from benchmarks.plain_sampler import MODEL, PlainSampler
    from learner.algorithms.presets.grpo import GrpoConfig
    from learner.training.config import OptimizerConfig, TrainingConfig
    from learner.training.ranks import Ranks, open_process_group
    from learner.training.trainer import Trainer
    from learner.weights.probe import Probe
    from learner.weights.published import Packer, Snapshot
    from services.process import DaemonThreads

    torch.set_num_threads(1)
    ranks = Ranks()
    optimizer = OptimizerConfig(learning_rate=rate, schedule="constant", warmup_updates=5, beta2=0.999)
    training = TrainingConfig(
        dtype="bfloat16", publish_dtype="bfloat16", updates_per_step=min(2, updates),
        epochs_per_step=max(1, updates // 2),
        optimizer=optimizer,
    )  # fmt: skip
    trainer = Trainer(
        MODEL, algorithm=GrpoConfig.model_validate(DEMO), config=training, ranks=ranks,
        commands=open_process_group(ranks, timeout_s=60),
    )  # fmt: skip
    followed = FollowedTree.in_folder(folder, anchor_every=50)
    packer = Packer(incarnation=1, threads=DaemonThreads(name="packer"))
    sampler, reports = PlainSampler(seed=0), []
    for step in range(versions + 1):
        copy = trainer.host_copy(bucket_bytes=64 << 20)
        snapshot = Snapshot(version=step, buckets=copy.buckets, probe=Probe(texts=(), logprobs=()))
        reports.append(await followed.publish(await packer.pack(snapshot)))
        sampler.load(trainer)
        trainer.train_step(sampler.batch(groups=COMPLETIONS // GROUP_SIZE, group_size=GROUP_SIZE), version=step)
    return reports


def changes(given: argparse.Namespace) -> list[str]:
    """The table of what versions change, by learning rate."""
    rows = []
    for index, rate in enumerate(given.rates):
        count = given.check if index == given.rates.index(given.check_rate) else given.versions
        command = [
            sys.executable,
            "-m",
            "benchmarks.weight_deltas",
            "changes",
            "--one",
            str(rate),
            "--versions",
            str(count),
            "--updates",
            str(given.updates),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{shlex.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        found = json.loads(done.stdout.splitlines()[-1])
        rows.append(_row_of_changes(rate, found))
        print(rows[-1], flush=True)
    return [
        "| learning rate | versions, equal bit by bit | weights changed by a version: median, least to most | "
        "whole, bytes | anchor, bytes | changes, bytes: median, most | whole / changes | bits a changed weight |",
        "|---" * 8 + "|",
        *rows,
    ]


def _row_of_changes(rate: float, found: Sequence[dict[str, Any]]) -> str:
    after = found[1:]
    shares = sorted(one["changed_share"] for one in after)
    sizes = sorted(one["changes_bytes"] for one in after)
    whole = found[0]["whole_bytes"]
    middle = statistics.median(sizes)
    bits = statistics.median(8 * one["changes_bytes"] / max(1, one["changed_share"] * whole / 2) for one in after)
    spread = f"{statistics.median(shares):.2%}, {shares[0]:.2%} to {shares[-1]:.2%}"
    return (
        f"| {rate:g} | {len(after)} | {spread} | {whole:,} | "
        f"{found[0]['anchor_bytes']:,} | {middle:,.0f}, {sizes[-1]:,} | {whole / middle:.1f} | {bits:.1f} |"
    )


# Over a link.


def drop_at(interface: str, *, permille: int) -> None:
    """So many of a thousand packets that arrive at an interface are lost, at random, for as long as this process lives.

    Raises OSError where the kernel does not let us.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def instruction(code: int, target: int, source: int, offset: int, value: int) -> bytes:
        return struct.pack("<BBhi", code, target | source << 4, offset, value)

    program = b"".join(
        [
            instruction(0x85, 0, 0, 0, 7),  # r0 = a random number
            instruction(0x94, 0, 0, 0, 1000),  # r0 %= 1000
            instruction(0xB7, 1, 0, 0, 2),  # r1 = XDP_PASS
            instruction(0x35, 0, 0, 1, permille),  # if r0 < permille:
            instruction(0xB7, 1, 0, 0, 1),  # r1 = XDP_DROP
            instruction(0xBF, 0, 1, 0, 0),
            instruction(0x95, 0, 0, 0, 0),
        ]
    )
    code, licence = ctypes.create_string_buffer(program, len(program)), ctypes.create_string_buffer(b"GPL")
    told = struct.pack("<IIQQ", 6, len(program) // 8, ctypes.addressof(code), ctypes.addressof(licence))
    loaded = libc.syscall(_BPF, _BPF_PROG_LOAD, ctypes.create_string_buffer(told.ljust(128, b"\0"), 128), 128)
    if loaded >= 0:
        at = struct.pack("<IIII", loaded, socket.if_nametoindex(interface), _XDP, 2)
        if libc.syscall(_BPF, _BPF_LINK_CREATE, ctypes.create_string_buffer(at.ljust(128, b"\0"), 128), 128) >= 0:
            return
    raise OSError(ctypes.get_errno(), f"cannot lose packets at {interface}: {os.strerror(ctypes.get_errno())}")


@contextmanager
def namespaces(names: Sequence[str], *, uplink: str) -> Iterator[dict[str, str]]:
    """A network namespace for each name, joined by a bridge; their addresses. What `uplink` sends has MBIT alone."""
    mine = {name: f"hw{os.getpid() % 10000}{name}" for name in names}
    bridge = f"hb{os.getpid() % 10000}"

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    try:
        for number, (name, namespace) in enumerate(mine.items()):
            ip("netns", "add", namespace)
            if not number:
                ip("netns", "add", bridge)
                ip("-n", bridge, "link", "add", "br0", "type", "bridge")
                ip("-n", bridge, "link", "set", "br0", "up")
            ip("-n", namespace, "link", "add", "eth0", "type", "veth", "peer", "name", f"to{name}", "netns", bridge)
            ip("-n", bridge, "link", "set", f"to{name}", "master", "br0", "up")
            ip("-n", namespace, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            ip("-n", namespace, "link", "set", "eth0", "up")
            ip("-n", namespace, "link", "set", "lo", "up")
        subprocess.run(
            ["tc", "-n", mine[uplink], "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", f"{MBIT}mbit", "burst",
             "64kb", "latency", "100ms"], check=True,
        )  # fmt: skip
        yield {name: f"10.77.0.{number + 1}" for number, name in enumerate(mine)}
    finally:
        for namespace in (*mine.values(), bridge):
            subprocess.run(["ip", "netns", "del", namespace], check=False, stderr=subprocess.DEVNULL)


class RoleProcess:
    """A process of this module in a namespace of its own: a line of JSON in, one out."""

    def __init__(self, role: str, namespace: str, **told: object) -> None:
        self._process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, sys.executable, "-m", "benchmarks.weight_deltas", "role", role,
             json.dumps(told)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def tell(self, **asked: object) -> None:
        """Asks for something; `heard` has the answer."""
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()

    def heard(self) -> dict[str, Any]:
        """The next answer."""
        assert self._process.stdout is not None, "it is a pipe"
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError(f"a process of the benchmark ended: {self._process.wait()}")

    def ask(self, **asked: object) -> dict[str, Any]:
        """Asks, and waits for the answer."""
        self.tell(**asked)
        return self.heard()

    def kill(self) -> None:
        """Ends it as a machine's death would."""
        self._process.kill()
        self._process.wait()


def _sent_bytes() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


async def _lines() -> Any:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield json.loads(line)


def _say(**answer: object) -> None:
    print(json.dumps(answer), flush=True)


async def learner_role(*, host: str, parameters: int, share: float, folder: str) -> None:
    """The learner's routes, and a version more for each line."""
    import torch

    from learner.weights.probe import Probe
    from learner.weights.process_group import lay_out
    from learner.weights.published import Packer, PublishedWeights, Snapshot, add_weight_routes
    from learner.weights.tree import WeightTree, add_tree_routes
    from protocol.status import Readiness
    from services.http.app import create_app
    from services.http.metrics import Metrics
    from services.http.server import Listener, serve_http
    from services.process import DaemonThreads

    threads = DaemonThreads(name="learner")
    tree, shelf = WeightTree(Path(folder), anchor_every=50, threads=threads), PublishedWeights()
    packer = Packer(incarnation=1, threads=threads)
    app = create_app(
        service="learner", version="1", token=None, readiness=lambda: Readiness(ready=True),
        metrics=Metrics("learner"), known_as=(host,),
    )  # fmt: skip
    add_weight_routes(app, shelf=shelf)
    add_tree_routes(app, folder=tree.folder)
    random = torch.Generator().manual_seed(0)
    weights = (torch.randn(parameters, generator=random) * 0.02).bfloat16()
    with Listener(host=host, port=7300) as listener:
        server = asyncio.create_task(serve_http(app, listener, finish_s=0))
        _say(ready=True)
        number = 0
        async for asked in _lines():
            if asked["do"] == "publish":
                moved = torch.rand(parameters, generator=random) < share
                weights.view(torch.int16).add_(moved.to(torch.int16))
                parts = range(0, parameters, 1 << 23)
                named = [(f"layer.{index}", weights[at : at + (1 << 23)]) for index, at in enumerate(parts)]
                buckets = lay_out(named, bucket_bytes=64 << 20)
                packed = await packer.pack(Snapshot(number, buckets=buckets, probe=Probe(texts=(), logprobs=())))
                shelf.put(packed)
                report = await tree.add(packed)
                _say(
                    version=str(packed.version), manifest=tree.manifest(packed), whole=report.whole_bytes,
                    changes=report.changes_bytes, anchor=report.anchor_bytes, seconds=report.seconds,
                )  # fmt: skip
                number += 1
            else:
                _say(sent=_sent_bytes())
        server.cancel()


async def generator_role(*, learner: str, relays: list[str], folder: str, token: str) -> None:
    """A generator's downloads, of what each line says."""
    from pydantic import SecretStr

    from protocol.fleet import PullPlan
    from services.secret_files import read_secret

    async with HttpClient() as client, HttpClient(token=SecretStr(read_secret(Path(token)))) as relay_client:

        async def bucket(version: str, index: int, path: str, nbytes: int) -> None:
            with open(path, "wb") as file:  # noqa: ASYNC230 - as the generator does, in order
                for offset in range(0, nbytes, 4 << 20):
                    length = min(4 << 20, nbytes - offset)
                    url = f"{learner}/v1/weights/{version}/buckets/{index}?form=whole&offset={offset}&length={length}"
                    content, _ = await client.download(url, deadline_s=60)
                    file.write(content)

        sources = TreeSources(
            relays=relays,
            relay_client=relay_client,
            learner=f"{learner}{TREE_ROUTE}",
            client=client,
            patience_s=5.0,
        )
        held = Path(tempfile.mkdtemp(dir=folder))
        downloads = TreeDownloads(sources=sources, folder=held, dense=bucket)
        _say(ready=True)
        async for asked in _lines():
            began = time.monotonic()
            received = 0
            if asked["whole"]:
                plan = await client.get(
                    f"{learner}/v1/weights/{asked['version']}/plan?form=whole", PullPlan, deadline_s=30, retries=3
                )
                for index, spec in enumerate(plan.buckets):
                    await bucket(asked["version"], index, str(held / "whole"), spec.nbytes)
                    received += spec.nbytes
            else:
                _, _, received = await downloads.download(asked["version"], asked["manifest"])
            _say(seconds=time.monotonic() - began, received=received)


def play(role: str, told: dict[str, Any]) -> None:
    """A process of `link`, which loses packets where it receives."""
    if permille := told.pop("permille"):
        drop_at("eth0", permille=permille)
    if role == "relay":
        from headway.command import main as headway

        sys.argv = ["headway", "relay", *told["words"]]
        headway()
    asyncio.run(learner_role(**told) if role == "learner" else generator_role(**told))


class _MeasuredLink:
    """The processes of one measurement."""

    def __init__(self, at: dict[str, str], given: argparse.Namespace, folder: Path, *, permille: int) -> None:
        self._at, self._folder, self._permille = at, folder, permille
        self._names = {name: f"hw{os.getpid() % 10000}{name}" for name in at}
        self.learner = RoleProcess(
            "learner", self._names["l"], permille=permille, host=at["l"], parameters=given.parameters,
            share=given.share, folder=str(folder / "tree"),
        )  # fmt: skip
        self.learner.heard()
        self.token = folder / "relay.token"
        self.relay = self.start_relay()
        self.direct = self._generator("d", relays=[])
        self.behind = [self._generator(f"g{number}", relays=[self._relay_url]) for number in range(given.generators)]

    @property
    def _relay_url(self) -> str:
        return f"http://{self._at['r']}:7330"

    def start_relay(self) -> RoleProcess:
        """The real command."""
        words = [
            "--from", f"http://{self._at['l']}:7300", "--folder", str(self._folder / "relay"), "--host", self._at["r"],
            "--token-file", str(self.token),
        ]  # fmt: skip
        return RoleProcess("relay", self._names["r"], permille=self._permille, words=words)

    def _generator(self, name: str, *, relays: list[str]) -> RoleProcess:
        made = RoleProcess(
            "generator", self._names[name], permille=self._permille, learner=f"http://{self._at['l']}:7300",
            relays=relays, folder=str(self._folder), token=str(self.token),
        )  # fmt: skip
        made.heard()
        return made

    def publish(self) -> dict[str, Any]:
        """A version more."""
        return self.learner.ask(do="publish")

    def row(self, what: str, who: Sequence[RoleProcess], said: dict[str, Any], *, whole: bool = False) -> str:
        """All of them download a version at once."""
        before, began = self.learner.ask(do="count")["sent"], time.monotonic()
        for each in who:
            each.tell(version=said["version"], manifest=said["manifest"], whole=whole)
        heard = [each.heard() for each in who]
        passed = time.monotonic() - began
        sent = self.learner.ask(do="count")["sent"] - before
        most = max(one["received"] for one in heard)
        return (
            f"| {self._permille / 10:g} % | {what} | {len(who)} | {most / 1e6:.2f} | {sent / 1e6:.2f} | "
            f"{sent * 8 / 1e6 / MBIT:.2f} | {max(one['seconds'] for one in heard):.2f} | {passed:.2f} |"
        )

    def end(self) -> None:
        """Ends all of them."""
        for each in (self.learner, self.relay, self.direct, *self.behind):
            each.kill()


def _rows_over(link: _MeasuredLink, *, permille: int) -> Iterator[str]:
    first = link.publish()
    yield link.row("whole, from the learner, as without `weights = pull`", [link.direct], first, whole=True)
    yield link.row("the same, all behind one link", [link.direct, *link.behind], first, whole=True)
    yield link.row("join by the anchor, from the learner", [link.direct], first)
    yield link.row("join by the anchor, through the relay", link.behind, first)
    yield link.row("changes, from the learner", [link.direct], link.publish())
    yield link.row("changes, through the relay", link.behind, link.publish())
    link.relay.kill()
    yield link.row("changes, the relay was killed: 5 s of patience, then the learner", link.behind, link.publish())
    link.relay = link.start_relay()
    time.sleep(35)
    yield link.row("changes, the relay is back, and had a version missed", link.behind, link.publish())


def over_link(given: argparse.Namespace) -> list[str]:
    """The table of downloads over a link of MBIT, by lost packets."""
    rows = []
    for permille in given.loss:
        names = ["l", "r", "d", *(f"g{number}" for number in range(given.generators))]
        with tempfile.TemporaryDirectory() as folder, namespaces(names, uplink="l") as at:
            token = Path(folder) / "relay.token"
            token.write_text("a-token-of-the-benchmark-alone")
            token.chmod(0o400)
            link = _MeasuredLink(at, given, Path(folder), permille=permille)
            try:
                for row in _rows_over(link, permille=permille):
                    rows.append(row)
                    print(row, flush=True)
            finally:
                link.end()
    return [
        "| packets lost | what | generators | each received, MB | the learner's uplink sent, MB | "
        f"that takes, at {MBIT} Mbit/s, s | slowest, s | with asking, s |",
        "|---" * 8 + "|",
        *rows,
    ]


def main() -> None:
    """Measures, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    trained = kinds.add_parser("changes")
    trained.add_argument("--versions", type=int, default=40)
    trained.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4, 5e-4])
    trained.add_argument("--check", type=int, default=200)
    trained.add_argument("--check-rate", type=float, default=1e-5)
    trained.add_argument("--updates", type=int, default=4, choices=(1, 2, 4), help="of a step")
    trained.add_argument("--one", type=float, help=argparse.SUPPRESS)
    link = kinds.add_parser("link")
    link.add_argument("--parameters", type=int, default=30 << 20)
    link.add_argument("--share", type=float, default=0.02)
    link.add_argument("--loss", type=int, nargs="+", default=[0, 10])
    link.add_argument("--generators", type=int, default=3)
    role = kinds.add_parser("role")
    role.add_argument("name")
    role.add_argument("told", type=json.loads)
    given = parser.parse_args()
    if given.kind == "role":
        play(given.name, given.told)
    elif given.kind == "changes" and given.one is not None:
        with tempfile.TemporaryDirectory() as folder:
            done = changes_of_a_training(given.one, versions=given.versions, updates=given.updates, folder=Path(folder))
            print(json.dumps([vars(report) for report in asyncio.run(done)]))
    else:
        rows = over_link(given) if given.kind == "link" else changes(given)
        command = f"`{shlex.join(['python', '-m', 'benchmarks.weight_deltas', *sys.argv[1:]])}`"
        load = ", ".join(f"{each:.0f}" for each in os.getloadavg())
        text = "\n".join([f"{command}: {described_machine()}; load averages at the end {load}.", "", *rows, ""])
        (RESULTS / f"weight_deltas_{given.kind}.md").write_text(f"{HEAD}\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()
