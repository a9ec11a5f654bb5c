"""A Dockerfile is done as far as a runtime can, and its other lines are refused by name."""

from pathlib import Path

import pytest

from env_service.runtimes.interface import RuntimeFile
from env_service.task_sets.dockerfile import read_dockerfile
from env_service.task_sets.records import IMAGE_PATH, TaskUnfit


def written(folder: Path, text: str) -> Path:
    path = folder / "Dockerfile"
    path.write_text(text)
    return path


def test_lines_become_steps_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.txt").write_text("a")
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "run.sh").chmod(0o755)
    text = (
        "# a comment\nARG WHO=me\nFROM ubuntu:24.04 AS base\nENV NAME=$WHO \\\n    LANG=C\nWORKDIR /srv\nWORKDIR app\n"
        "COPY src ./data/\nCOPY --chown=1:1 run.sh /bin/\nADD --chmod=600 run.sh one\nUSER nobody\n"
        'RUN echo ${NAME} > who && \\\n  # said\n  true\nRUN ["sh", "-c", "true"]\nCMD ["bash"]\n'
    )

    setup = read_dockerfile(written(tmp_path, text), images={"ubuntu:24.04": "mine"})

    assert (setup.image, setup.cwd, setup.environment) == ("mine", "/srv/app", {"NAME": "me", "LANG": "C"})
    files = [step.files for step in setup.steps if step.files]
    assert files == [
        {"/srv/app/data/a.txt": RuntimeFile(b"a", (tmp_path / "src/a.txt").stat().st_mode & 0o777)},
        {"/bin/run.sh": RuntimeFile(b"#!/bin/sh\n", 0o755)},
        {"/srv/app/one": RuntimeFile(b"#!/bin/sh\n", 0o600)},
    ]
    runs = [step for step in setup.steps if step.said]
    assert [step.run for step in runs] == [("/bin/sh", "-c", "echo ${NAME} > who &&   true"), ("sh", "-c", "true")]
    assert (runs[0].cwd, runs[0].environment) == ("/srv/app", {"WHO": "me", "NAME": "me", "LANG": "C"})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("FROM alpine", "a build in several stages"),
        ("RUN apt-get update && apt-get install -y git", r"wants the network \(apt-get\)"),
        ("RUN set -e; pip install pytest", r"wants the network \(pip\)"),
        ("RUN python3 -m pip install x", r"wants the network \(pip\)"),
        ("RUN git clone https://x.example/y", r"wants the network \(git clone\)"),
        ("RUN --mount=type=cache,target=/x true", "RUN --mount=type=cache,target=/x is not done here"),
        ("COPY --from=base /a /b", "COPY --from is not done here"),
        ("COPY ../secret /b", "leads out of the folder"),
        ("COPY nothing /b", "there is no such file"),
        ("ADD https://x.example/y /b", "wants the network"),
        ("ADD a.tar.gz /b", "would be unpacked"),
        ("RUN <<END\ntrue\nEND", "put it into a file"),
        ("ONBUILD RUN true", "ONBUILD is not done here"),
        ('SHELL ["a"', "expected a list of words in JSON"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_line(tmp_path: Path, line: str, said: str) -> None:
    path = written(tmp_path, f"FROM ubuntu\n\n{line}\n")

    with pytest.raises(TaskUnfit, match=said) as refused:
        read_dockerfile(path, images={"*": "host"})

    assert str(refused.value).startswith(f"{path}:3: ")


def test_an_image_that_is_not_named_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TaskUnfit, match=r"no image here for FROM ubuntu; images names: debian.*\{ 'ubuntu' = IMAGE \}"):
        read_dockerfile(written(tmp_path, "FROM ubuntu\n"), images={"debian": "host"})


def test_commands_that_only_look_like_it_are_run(tmp_path: Path) -> None:
    lines = ("RUN echo pip install is not done", "RUN mkdir -p /opt/curl", "RUN git config --global a.b c")

    setup = read_dockerfile(written(tmp_path, "\n".join(["FROM x", *lines])), images={"x": "host"})

    assert [step.run[-1] for step in setup.steps if step.said] == [line[4:] for line in lines]


def test_lines_that_want_the_network_are_skipped_where_that_is_wished(tmp_path: Path) -> None:
    path = written(tmp_path, "FROM x\nRUN apt-get install -y git\nRUN true\n")

    setup = read_dockerfile(path, images={"x": "host"}, network_steps="skip")

    assert [step.run[-1] for step in setup.steps if step.said] == ["true"]


def test_of_an_image_that_is_what_it_makes_only_place_and_variables_are_taken(tmp_path: Path) -> None:
    path = written(
        tmp_path, "FROM a AS one\nFROM b\nENV X 1 2\nWORKDIR /x\nRUN apt-get update\nCOPY --from=one /a /b\n"
    )

    setup = read_dockerfile(path, images={}, built="mine")

    assert (setup.image, setup.cwd, setup.environment) == ("mine", "/x", {"X": "1 2"})
    assert not any(step.files or step.said for step in setup.steps)


def test_what_is_no_list_of_words_is_a_line_of_the_shell(tmp_path: Path) -> None:
    text = 'FROM x\nRUN [ -e /x ] || true\nRUN ["sh", 1]\nRUN []\n'

    setup = read_dockerfile(written(tmp_path, text), images={"*": "host"})

    assert [step.run[-1] for step in setup.steps if step.said] == ["[ -e /x ] || true", '["sh", 1]', "[]"]


def test_what_docker_does_not_know_either_is_told_apart(tmp_path: Path) -> None:
    path = written(tmp_path, "FROM x\nRUN cat > y << 'END'\nname: z\nEND\n")

    with pytest.raises(TaskUnfit, match="Dockerfile:3: NAME: is no instruction of Docker"):
        read_dockerfile(path, images={"*": "host"})


def test_a_file_beside_the_folder_that_a_dockerfile_copies_from_is_said(tmp_path: Path) -> None:
    (tmp_path / "environment").mkdir()
    (tmp_path / "tests").mkdir()
    path = written(tmp_path / "environment", "FROM x\nCOPY tests/ /tests\n")

    with pytest.raises(TaskUnfit, match="it is in the task's folder, and a Dockerfile copies from environment/ alone"):
        read_dockerfile(path, images={"*": "host"})


def test_the_images_own_path_is_left_to_the_image(tmp_path: Path) -> None:
    text = 'FROM x\nENV PATH="/opt/a:${PATH}"\nRUN true\nENV PATH=$PATH:/opt/b\n'

    setup = read_dockerfile(written(tmp_path, text), images={"*": "host"})

    assert setup.environment == {"PATH": f"/opt/a:{IMAGE_PATH}:/opt/b"}
    assert [step.environment for step in setup.steps if step.said] == [{"PATH": f"/opt/a:{IMAGE_PATH}"}]


def test_files_of_other_images_are_taken_to_be_in_the_image_where_fetching_is_skipped(tmp_path: Path) -> None:
    path = written(
        tmp_path, "FROM x\nCOPY --from=ghcr.example/uv:1 /uv /uvx /bin/\nCOPY Dockerfile /a\nCOPY a--from=b /c\n"
    )
    (tmp_path / "a--from=b").touch()

    setup = read_dockerfile(path, images={"*": "host"}, network_steps="skip")

    assert [list(step.files) for step in setup.steps if step.files] == [["/a"], ["/c"]]
    with pytest.raises(TaskUnfit, match="Dockerfile:2: COPY --from is not done here"):
        read_dockerfile(path, images={"*": "host"})
    with pytest.raises(TaskUnfit, match="a build in several stages"):
        read_dockerfile(
            written(tmp_path, "FROM x AS a\nRUN true\nFROM y\nCOPY --from=a /b /b\n"),
            images={"*": "host"},
            network_steps="skip",
        )


def runs_of(folder: Path, lines: str) -> list[str]:
    setup = read_dockerfile(written(folder, f"FROM x\n{lines}"), images={"x": "host"})
    return [step.run[-1] for step in setup.steps if step.said]


def test_lines_of_one_instruction_are_joined_without_a_space(tmp_path: Path) -> None:
    lines = "RUN printf 'def f():\\n\\\n    return 1\\n\\\n' \\\n\n# said\n > /a.py\n\tRUN\ttrue \\ \n  && true\\\n"

    assert runs_of(tmp_path, lines) == ["printf 'def f():\\n    return 1\\n'  > /a.py", "true   && true"]


def test_a_dockerfile_of_windows_is_read_alike(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_bytes("\ufeffFROM x\r\nRUN true && \\\r\n  false\r\n".encode())

    setup = read_dockerfile(tmp_path / "Dockerfile", images={"x": "host"})

    assert [step.run[-1] for step in setup.steps if step.said] == ["true &&   false"]


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ('ENV V "/opt/bin:$B"', "/opt/bin:b"),
        ('ENV V a \\"b c', 'a "b c'),
        ("ENV V '$B' is $B", "$B is b"),
        ("ENV V='$B' W=1", "$B"),
        ('ENV V="\\$B is $B \\"x\\" \\n"', '$B is b "x" \\n'),
        ("ENV V=\\$B", "$B"),
        ("ENV V=a\\ b", "a b"),
        ('ENV V="$B""c"d', "bcd"),
        ("ENV V=", ""),
        ("ARG B=c\nENV V=$B", "c"),
        ("ARG B\nENV V=$B", "b"),
        ('WORKDIR "/x $B"\nENV V=1', "1"),
    ],
)
def test_variables_are_set_as_docker_sets_them(tmp_path: Path, line: str, value: str) -> None:
    setup = read_dockerfile(written(tmp_path, f"ARG B=b\nFROM x\n{line}\n"), images={"x": "host"})

    assert setup.environment["V"] == value
    assert setup.cwd in ("/app", "/x b")


def test_a_quote_that_does_not_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskUnfit, match=r":2: it cannot be read: no closing quotation mark for \"b"):
        read_dockerfile(written(tmp_path, 'FROM x\nENV A="b\n'), images={"x": "host"})


def copied(folder: Path, lines: str) -> set[str]:
    setup = read_dockerfile(written(folder, f"FROM x\n{lines}"), images={"x": "host"})
    return {path for step in setup.steps for path in step.files} - {"/i/Dockerfile"}


def test_a_file_is_copied_into_a_folder_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "src").mkdir()
    (tmp_path / "src/b.txt").write_text("b")

    assert copied(tmp_path, "WORKDIR /app/deep\nCOPY a.txt /app\n") == {"/app/a.txt"}
    assert copied(tmp_path, "COPY src /data/src\nCOPY a.txt /data\n") == {"/data/src/b.txt", "/data/a.txt"}
    assert copied(tmp_path, "COPY a.txt /usr/local/bin\n") == {"/usr/local/bin/a.txt"}
    assert copied(tmp_path, "COPY a.txt /data/b\nCOPY a.txt end.\n") == {"/data/b", "/end."}


def test_what_dockerignore_names_is_not_copied(tmp_path: Path) -> None:
    for name in (
        "main.py",
        "tests/test_it.py",
        "src/tests/keep.py",
        "src/a.pyc",
        "out/x.log",
        "out/keep.log",
        "deep/er/x.b",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    ignored = tmp_path / ".dockerignore"
    ignored.write_text(
        "# none of these\n/tests/\n**/*.pyc\nout\n!out/keep.log\n  deep/*/?.[ab] \nDockerfile\n.docker*\n"
    )

    assert copied(tmp_path, "COPY . /i\n") == {"/i/main.py", "/i/src/tests/keep.py", "/i/out/keep.log"}
    assert copied(tmp_path, "COPY src out /i/\n") == {"/i/tests/keep.py", "/i/keep.log"}
    with pytest.raises(TaskUnfit, match=r"COPY tests: there is no such file in .*; \.dockerignore leaves it out"):
        copied(tmp_path, "COPY tests /i\n")

    ignored.write_text("*\n!src\n**/a.pyc\n")
    assert copied(tmp_path, "COPY . /i\n") == {"/i/src/tests/keep.py"}

    (tmp_path / "Dockerfile.dockerignore").write_text("**\n!main.py\n")
    assert copied(tmp_path, "COPY . /i\n") == {"/i/main.py"}
