"""Images from a folder and from OCI's layout: the same content is one root, and no layer leads out of it."""

import gzip
import hashlib
import io
import json
import os
import tarfile
from pathlib import Path

import pytest

from env_service.runtimes.building import build, configure, main
from env_service.runtimes.config import RuntimesConfig
from env_service.runtimes.images import ImageFault
from env_service.runtimes.pool import RuntimePool

USER = RuntimesConfig().uid if os.geteuid() == 0 else os.geteuid()


def layer(*members: tuple[str, bytes | None, str]) -> bytes:
    """A layer of files, by name with content, and of links, by name and target; one with = before it is a hard one."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as made:
        for name, content, link in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = (tarfile.SYMTYPE, link) if link else (tarfile.REGTYPE, "")
            if link.startswith("="):
                member.type, member.linkname = tarfile.LNKTYPE, link[1:]
            member.size, member.uid = len(content or b""), 77
            made.addfile(member, io.BytesIO(content or b""))
    return gzip.compress(held.getvalue())


def oci(folder: Path, *layers: bytes) -> Path:
    """An image in OCI's layout."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def kept(content: bytes, kind: str) -> dict[str, str]:
        digest = hashlib.sha256(content).hexdigest()
        (blobs / digest).write_bytes(content)
        return {"mediaType": kind, "digest": f"sha256:{digest}"}

    config = kept(json.dumps({"config": {"Env": ["PATH=/bin", "HELLO=you"]}}).encode(), "config")
    manifest = {
        "config": config,
        "layers": [kept(each, "application/vnd.oci.image.layer.v1.tar+gzip") for each in layers],
    }
    index = {"manifests": [kept(json.dumps(manifest).encode(), "manifest")]}
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def test_layers_are_applied_and_equal_contents_are_one_root(tmp_path: Path) -> None:
    images = tmp_path / "images"
    image = oci(
        tmp_path / "oci",
        layer(
            ("bin/sh", b"sh", ""),
            ("sys/x", b"", ""),
            ("sys/.wh.x", b"", ""),
            ("etc/old", b"old", ""),
            ("opt/a", b"a", ""),
            ("opt/b", b"b", ""),
        ),
        layer(
            ("etc/.wh.old", b"", ""), ("opt/.wh..wh..opq", b"", ""), ("opt/c", b"c", ""), ("etc/link", None, "/opt/c")
        ),
    )
    record = build("one", images=images, user=USER, oci=image)
    root = images / "roots" / record.root
    assert sorted(path.name for path in (root / "opt").iterdir()) == ["c"]
    assert not (root / "etc/old").exists()
    assert (os.readlink(root / "etc/link"), (root / "bin/sh").stat().st_uid) == ("/opt/c", USER)
    assert record.environment == {"PATH": "/bin", "HELLO": "you"}
    assert build("two", images=images, user=USER, root=root).root == record.root
    assert len(list((images / "roots").iterdir())) == 1
    RuntimePool(RuntimesConfig(folder=images)).need("two")


@pytest.mark.parametrize(
    "members",
    [
        (("../out", b"x", ""),),
        (("lib", None, "/"), ("lib/out", b"x", "")),
        (("up", None, ".."), ("up/.wh.oci", b"", "")),
        (("up", None, "../.."), ("mine", None, "=up/oci/index.json")),
    ],
)
def test_a_layer_that_leads_out_is_refused(tmp_path: Path, members: tuple[tuple[str, bytes | None, str], ...]) -> None:
    with pytest.raises(ImageFault, match=r"leads out of the root|outside"):
        build("bad", images=tmp_path / "images", user=USER, oci=oci(tmp_path / "oci", layer(*members)))
    assert list((tmp_path / "images" / "roots").iterdir()) == []


def test_mistakes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "root").mkdir()
    images = ["--images", str(tmp_path / "images")]
    for words, said in (
        (["host", "--packages", "x"], "host is the image of this machine itself"),
        (["a/b", "--packages", "x"], "the name of an image is of letters"),
        (["one"], "got 0 sources; expected one of --packages, --root and --oci"),
        (["one", "--root", str(tmp_path / "none")], "there is no folder"),
        (["one", "--root", str(tmp_path / "root")], "the root has no /bin/sh"),
        (["one", "--oci", str(tmp_path / "root")], "expected an image in OCI's layout"),
    ):
        assert main(["runtime", "build", *words, *images]) == 2
        assert said in capsys.readouterr().err


def test_a_root_of_packages_has_what_their_scripts_would_have_made(tmp_path: Path) -> None:
    for name, text in {"usr/bin/dash": "", "usr/share/base-passwd/passwd.master": "p", "etc/group": "mine"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "usr/share/base-passwd/group.master").write_text("g")

    configure(tmp_path)

    assert all((tmp_path / folder).is_dir() for folder in ("opt", "srv", "mnt", "usr/local/bin"))
    assert (tmp_path / "usr/bin/sh").exists()
    assert [(tmp_path / file).read_text() for file in ("etc/passwd", "etc/group")] == ["p", "mine"]
