"""The first process inside a sandbox: it is there before its program is known, and then becomes it.

Its source is copied into the sandbox and run there by the sandbox's own Python (3.9 or later), so it imports nothing
but what is built in, and little of that: its start is paid by every run. It says on descriptor READY that it stands,
reads one command from descriptor COMMAND, writes the program's files, limits itself, says on READY that the program
begins, and runs it: a Python script in this very interpreter, which saves the start of another one, and anything else
by exec. All that it knows is in the command, and that is the program's own.
"""

import marshal
import os
import resource
import sys

COMMAND = 3
READY = 4
STANDS, BEGINS = b"r", b"b"
CANNOT_START = 125

# The soft limit on CPU time ends a program with SIGXCPU; one that ignores it is killed by the hard limit.
_CPU_GRACE_S = 1


def main() -> None:
    """Become the program. Exits with CANNOT_START, and says why on stderr, if that is not possible."""
    folder = sys.argv[1]
    os.write(READY, STANDS)
    command = _command()
    _close_others()
    if not command:  # nobody needs this sandbox
        os._exit(0)
    argv, interpreters, files, environment, limits = marshal.loads(command)
    try:
        os.makedirs(folder, exist_ok=True)
        os.chdir(folder)
        _write(files)
        _limit(limits)
        os.write(READY, BEGINS)
        os.close(READY)
    except (OSError, ValueError) as error:
        os.write(2, f"the sandbox cannot prepare the program: {error}\n".encode())
        os._exit(CANNOT_START)
    os.environ.clear()
    os.environ.update({"HOME": folder, **environment})
    is_python = argv[0] == "python"
    if is_python and _is_plain(argv[1:]) and not any(key.startswith("PYTHON") for key in environment):
        _run_python(argv[1:])
    else:
        _exec(sys.executable if is_python else interpreters.get(argv[0], argv[0]), argv)


def _close_others() -> None:
    """Nothing but stdin, stdout and stderr is the program's, and READY is closed before it begins."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != READY:
            try:
                os.close(int(name))
            except OSError:  # that of the listing itself
                continue


def _command() -> bytes:
    parts = []
    while part := os.read(COMMAND, 1 << 20):
        parts.append(part)
    return b"".join(parts)


def _write(files: dict[str, bytes]) -> None:
    for name, content in files.items():
        parent = os.path.dirname(name)
        if parent:
            os.makedirs(parent, exist_ok=True)
        with open(name, "wb") as file:
            file.write(content)


def _limit(limits: dict[str, int]) -> None:
    cpu_s = limits["cpu_s"]
    for what, soft, hard in (
        (resource.RLIMIT_CPU, cpu_s, cpu_s + _CPU_GRACE_S),
        (resource.RLIMIT_AS, limits["memory_bytes"], limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["disk_bytes"], limits["disk_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"], limits["open_files"]),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        resource.setrlimit(what, (soft, hard))
    if limits["processes"]:
        resource.setrlimit(resource.RLIMIT_NPROC, (limits["processes"], limits["processes"]))
    # Should the machine itself run out of memory, this is what it may kill first.
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _is_plain(arguments: list[str]) -> bool:
    """True if this interpreter can run it as if it had been started for it: a script, or -c or -m as first option."""
    if not arguments:
        return False
    if arguments[0] in ("-c", "-m"):
        return len(arguments) > 1
    return arguments[0].endswith(".py") and not arguments[0].startswith("-") and os.path.isfile(arguments[0])


def _run_python(arguments: list[str]) -> None:
    sys.orig_argv[:] = ["python", *arguments]
    module = type(sys)("__main__")
    module.__dict__.update(__builtins__=__builtins__, __annotations__={}, __spec__=None)
    sys.modules["__main__"] = module
    try:
        if arguments[0] == "-m":
            _run_module(arguments[1], arguments[1:])
        elif arguments[0] == "-c":
            sys.argv[:] = ["-c", *arguments[2:]]
            sys.path[0] = ""
            exec(compile(arguments[1], "<string>", "exec"), module.__dict__)
        else:
            sys.argv[:] = arguments
            _run_script(os.path.abspath(arguments[0]), module.__dict__)
    except Exception as error:  # noqa: BLE001  what the interpreter does with an exception that nobody has caught
        _report(error)


def _run_module(name: str, argv: list[str]) -> None:
    import runpy  # it is slow to load, and few programs need it

    sys.argv[:] = argv
    sys.path[0] = os.getcwd()
    # What the interpreter itself does for -m.
    runpy._run_module_as_main(name, alter_argv=True)  # type: ignore[attr-defined]


def _run_script(path: str, variables: dict[str, object]) -> None:
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    variables.update(__file__=path, __cached__=None)
    with open(path, "rb") as file:
        source = file.read()
    exec(compile(source, path, "exec"), variables)


def _report(error: Exception) -> None:
    """As at the end of an interpreter, without the frames of this file."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_globals is globals():
        traceback = traceback.tb_next
    sys.excepthook(type(error), error.with_traceback(traceback), traceback)
    sys.exit(1)


def _exec(path: str, argv: list[str]) -> None:
    try:
        os.execvp(path, argv)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        os._exit(126 if isinstance(error, PermissionError) else 127)
