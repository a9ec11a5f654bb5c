"""Archives of trees: what they hold comes back, and what no tree has is refused or left out."""

import io
import tarfile
from collections.abc import Callable

import pytest

from env_service.runtimes.archives import ArchiveFault, pack_archive, unpack_archive
from env_service.runtimes.tree import FILE, FOLDER, LINK, TooLarge, TreeEntry


def archive_of(*members: tuple[str, Callable[[tarfile.TarInfo], None], bytes]) -> io.BytesIO:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, change, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            change(member)
            archive.addfile(member, io.BytesIO(content))
    made.seek(0)
    return made


def plain(member: tarfile.TarInfo) -> None:
    member.mode = 0o4755


def of_type(kind: bytes, target: str = "") -> Callable[[tarfile.TarInfo], None]:
    def change(member: tarfile.TarInfo) -> None:
        member.type, member.linkname = kind, target

    return change


def test_a_tree_comes_back_as_one_users_without_set_user_id() -> None:
    entries = [
        TreeEntry(FOLDER, "work", 0o700, b""), TreeEntry(FILE, "work/a b", 0o4755, b"content"),
        TreeEntry(LINK, "work/l", 0o777, b"../x"), TreeEntry(FILE, "work/\udcff", 0o600, b""),
    ]  # fmt: skip
    with pack_archive(entries, user=7, group=8) as packed:
        with tarfile.open(fileobj=packed) as archive:
            assert {(each.uid, each.gid, each.mode & 0o6000) for each in archive} == {(7, 8, 0)}
        packed.seek(0)
        assert unpack_archive(packed, most=11) == [
            TreeEntry(FOLDER, "", 0o700, b""), TreeEntry(FILE, "a b", 0o755, b"content"),
            TreeEntry(LINK, "l", 0o777, b"../x"), TreeEntry(FILE, "\udcff", 0o600, b""),
        ]  # fmt: skip


def test_what_is_neither_file_folder_nor_link_is_left_out_and_a_second_name_is_a_file_of_its_own() -> None:
    packed = archive_of(
        ("top", of_type(tarfile.DIRTYPE), b""), ("top/file", plain, b"1"), ("top/pipe", of_type(tarfile.FIFOTYPE), b""),
        ("top/disk", of_type(tarfile.BLKTYPE), b""), ("top/second", of_type(tarfile.LNKTYPE, "top/file"), b""),
        ("top/none", of_type(tarfile.LNKTYPE, "top/other"), b""),
    )  # fmt: skip
    assert [(entry.kind, entry.path, entry.content) for entry in unpack_archive(packed, most=10)] == [
        (FOLDER, "", b""), (FILE, "file", b"1"), (FILE, "second", b"1"),
    ]  # fmt: skip


def test_more_than_is_wanted_is_refused_before_it_is_read() -> None:
    with pytest.raises(TooLarge, match="more than 3 bytes"):
        unpack_archive(archive_of(("a", plain, b"1234")), most=3)
    twice = archive_of(("a", of_type(tarfile.DIRTYPE), b""), ("a/b", plain, b"12"), ("a/c", plain, b"34"))
    with pytest.raises(TooLarge, match="more than 3 bytes"):
        unpack_archive(twice, most=3)
    names = archive_of(
        ("a", of_type(tarfile.DIRTYPE), b""), ("a/b", plain, b"12"), ("a/c", of_type(tarfile.LNKTYPE, "a/b"), b"")
    )
    with pytest.raises(TooLarge, match="more than 3 bytes"):
        unpack_archive(names, most=3)

    def sparse(member: tarfile.TarInfo) -> None:
        member.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "holes",
                              "GNU.sparse.realsize": str(1 << 40)}  # fmt: skip

    with pytest.raises(TooLarge, match="more than 1000 bytes"):
        unpack_archive(archive_of(("holes", sparse, b"0\n".ljust(512, b"\0"))), most=1000)


def test_paths_that_lead_elsewhere_and_what_is_no_archive_are_refused() -> None:
    for name in ("top/../../x", "other"):
        with pytest.raises(ArchiveFault):
            unpack_archive(archive_of(("top", of_type(tarfile.DIRTYPE), b""), (name, plain, b"")), most=10)
    with pytest.raises(ArchiveFault):
        unpack_archive(io.BytesIO(b"no archive at all" * 100), most=10)
    whole = archive_of(("top", of_type(tarfile.DIRTYPE), b""), ("top/a", plain, b"12")).getvalue()
    with pytest.raises(ArchiveFault):
        unpack_archive(io.BytesIO(whole[:1025]), most=10)
