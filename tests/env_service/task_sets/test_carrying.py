"""Work goes from an agent's computer into the one where it is judged: files of its folders, and none that judge."""

import pytest

from env_service.runtimes.interface import RuntimeSnapshot
from env_service.runtimes.tree import FILE, FOLDER, LINK, WHITEOUT, TreeEntry
from env_service.task_sets.carrying import CarriedWork, carried_work, is_guarded
from env_service.task_sets.records import GUARDED

Entries = list[TreeEntry]


def folder(path: str, opaque: bytes = b"") -> TreeEntry:
    return TreeEntry(FOLDER, path, 0o755, opaque)


def file(path: str, content: bytes = b"x") -> TreeEntry:
    return TreeEntry(FILE, path, 0o644, content)


def link(path: str, to: str) -> TreeEntry:
    return TreeEntry(LINK, path, 0o777, to.encode())


def carried(before: Entries, after: Entries, *folders: str, allowed: tuple[str, ...] = ()) -> CarriedWork:
    return carried_work(
        RuntimeSnapshot("i", tuple(before)),
        RuntimeSnapshot("i", tuple(after)),
        folders=folders or ("/w",),
        guarded=(*GUARDED, "tests"),
        allowed=allowed,
    )


BEFORE = [folder("w"), file("w/a.py"), folder("w/tests"), file("w/tests/t.py", b"old"), file("w/gone")]


def test_changes_below_the_folder_go_over_and_others_are_named() -> None:
    outside, kept = [folder("etc"), file("etc/x")], [folder("w/tests"), file("w/tests/t.py", b"old")]
    after = [*outside, folder("w"), file("w/a.py", b"new"), *kept, folder("w/d"), file("w/d/b")]

    work = carried(BEFORE, after)

    assert work.snapshot.entries == (folder("w"), file("w/a.py", b"new"), folder("w/d"), file("w/d/b"), *kept)
    assert (work.kept_out, work.outside) == ((), ("/etc/x",))


def test_what_is_guarded_stays_as_it_was() -> None:
    mine = [file("w/tests/t.py", b"mine"), file("w/tests/conftest.py"), file("w/conftest.py")]
    after = [folder("w"), file("w/a.py"), folder("w/tests"), file("w/gone"), folder("w/x.egg-info"), *mine]
    after.append(file("w/x.egg-info/PKG"))

    work = carried(BEFORE, after)

    assert work.snapshot.entries == (
        folder("w"),
        file("w/a.py"),
        file("w/gone"),
        folder("w/tests"),
        file("w/tests/t.py", b"old"),
    )
    assert work.kept_out == ("/w/conftest.py", "/w/tests/conftest.py", "/w/tests/t.py", "/w/x.egg-info/PKG")


def test_bytecode_of_sources_that_are_others_now_is_left_out() -> None:
    kept = [folder("w/__pycache__"), file("w/__pycache__/b.cpython-311.pyc")]
    stale = [file("w/__pycache__/a.cpython-311.opt-1.pyc"), file("w/__pycache__/a.cpython-311-pytest-8.pyc")]
    before = [folder("w"), file("w/a.py"), file("w/b.py"), *kept, *stale]
    planted = [
        file("w/a.pyc"),
        file("w/alone.pyc"),
        folder("w/d"),
        folder("w/d/__pycache__"),
        file("w/d/__pycache__/a"),
    ]

    after = [*(each for each in before if each.path != "w/a.py"), file("w/a.py", b"new"), *planted]
    work = carried(before, after, allowed=("__pycache__", "*.pyc"))

    assert work.snapshot.entries == (
        folder("w"),
        *kept,
        file("w/a.py", b"new"),
        file("w/alone.pyc"),
        file("w/b.py"),
        folder("w/d"),
    )


def test_a_name_that_is_allowed_goes_over() -> None:
    assert carried(BEFORE, [*BEFORE, file("w/pyproject.toml")], allowed=("pyproject.toml",)).kept_out == ()
    assert carried(BEFORE, [*BEFORE, file("w/pyproject.toml")]).kept_out == ("/w/pyproject.toml",)


@pytest.mark.parametrize(
    "mine",
    [
        [folder("w"), file("w/a.py"), file("w/gone")],
        [folder("w"), file("w/a.py"), link("w/tests", "a.py"), file("w/gone")],
        [folder("w"), file("w/a.py"), TreeEntry(WHITEOUT, "w/tests", 0, b""), file("w/gone")],
    ],
    ids=["removed", "a link", "hidden"],
)
def test_a_guarded_folder_that_is_taken_away_is_there_again(mine: Entries) -> None:
    assert carried(BEFORE, mine).snapshot.entries == (
        folder("w"), file("w/a.py"), file("w/gone"), folder("w/tests"), file("w/tests/t.py", b"old"),
    )  # fmt: skip


def test_the_folder_itself_is_no_link() -> None:
    work = carried(BEFORE, [link("w", "/etc")])

    assert work.snapshot.entries == (folder("w"), folder("w/tests"), file("w/tests/t.py", b"old"))


@pytest.mark.parametrize(
    "instead",
    [link("w", "/usr/lib"), TreeEntry(WHITEOUT, "w", 0, b""), folder("w", b"y")],
    ids=["link", "gone", "anew"],
)
def test_a_carried_folder_itself_hides_nothing_of_the_image(instead: TreeEntry) -> None:
    work = carried([], [instead])

    assert (work.snapshot.entries, work.outside) == ((), ("/w",) if instead.kind != FOLDER else ())


def test_a_place_that_is_one_file_goes_over() -> None:
    assert carried([], [folder("srv"), file("srv/a")], "/srv/a").snapshot.entries == (folder("srv"), file("srv/a"))
    assert carried([folder("srv"), file("srv/a")], [folder("srv")], "/srv/a").snapshot.entries == (folder("srv"),)
    assert carried([], [folder("srv"), link("srv/a", "/tests/b")], "/srv/a").snapshot.entries == ()


@pytest.mark.parametrize(
    ("links", "goes"),
    [
        ([link("w/l", "a.py")], True),
        ([link("w/l", "/w/d/../a.py")], True),
        ([link("w/l", "/usr/bin/python3")], True),
        ([link("w/l", "/tests/expected")], False),
        ([link("w/l", "../tests/expected")], False),
        ([link("w/l", "/proc/1/environ")], False),
        ([link("w/l", "l")], False),
        ([link("w/k", "/"), link("w/l", "k/tests")], False),
        # Its end is nearer to the root than its words say.
        ([link("w/k", "/w"), folder("w/d"), link("w/l", "d/../k/../tests")], False),
        ([folder("out"), link("out/k", "/tests"), link("w/l", "/out/k")], False),
    ],
)
def test_a_link_goes_over_if_it_ends_in_a_carried_folder_or_among_programs(links: Entries, goes: bool) -> None:
    work = carried(BEFORE, [*BEFORE, *links])

    assert ("w/l" in [entry[1] for entry in work.snapshot.entries]) is goes
    assert ("/w/l" in work.kept_out) is not goes


def test_a_folder_that_replaced_one_of_the_image_hides_that_still() -> None:
    after = [*BEFORE, folder("w/build", b"y"), file("w/build/out")]

    assert folder("w/build", b"y") in carried(BEFORE, after).snapshot.entries


def test_what_programs_leave_and_folders_on_the_way_are_not_named_as_outside() -> None:
    after = [folder("a"), folder("a/b"), file("a/b/x"), folder("tmp"), file("tmp/y"), folder("a/c"), file("a/c/z")]

    assert carried([folder("a"), folder("a/b")], after, "/a/b").outside == ("/a/c/z",)


def test_patterns_with_a_slash_are_of_paths_and_others_of_names() -> None:
    assert is_guarded("a/tests/b", ["tests"])
    assert not is_guarded("a/my_tests/b", ["tests"])
    assert is_guarded("a/b/c.py", ["a/*"])
    assert not is_guarded("x/a/c.py", ["a/*"])
