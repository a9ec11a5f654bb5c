"""Programs that stand for installers while scripts of tests and of solutions run, where no network is.

Scripts of tasks mostly fetch their test runner first: apt-get, an installer of uv by curl, and then `uvx pytest`. With
these before the image's own programs, whatever installs says so and does nothing, and `uv run` and `uvx` run the
image's own program. What the image lacks is then missed where it is used.
"""

from collections.abc import Mapping

from env_service.runtimes.interface import RuntimeFile

PROGRAMS = "/judge/bin"
"""The folder that they are laid into."""

_SAYS = 'echo "$(basename "$0") $*: not done, there is no network; the image has to have it" >&2\n'

# Options of uvx and of `uv run` that take a word.
_WITH_A_WORD = (
    "-p|--python|-w|--with|--from|--with-requirements|--with-editable|--index|--default-index|-i|--index-url|"
    "--extra-index-url|--project|--directory|--env-file|--extra|--group|-c|--constraints|--python-platform|--refresh-package"
)
_RUNS = f"""while [ $# -gt 0 ]; do
  case "$1" in
    {_WITH_A_WORD}) shift; [ $# -eq 0 ] || shift ;;
    --) shift; break ;;
    -m|--module) shift; exec python3 -m "$@" ;;
    -*) shift ;;
    *) break ;;
  esac
done
[ $# -gt 0 ] || exit 0
name="${{1%%[=@<>~!]*}}"; shift
case "$name" in *.py) exec python3 "$name" "$@" ;; esac
if [ "$name" = pytest ] && ! command -v pytest > /dev/null; then exec python3 -m pytest "$@"; fi
exec "$name" "$@"
"""
_UV = f"""#!/bin/sh
case "$1" in
  run) shift ;;
  tool) [ "$2" = run ] || {{ {_SAYS.strip()}; exit 0; }}; shift 2 ;;
  venv)
    shift; place=.venv
    for word in "$@"; do case "$word" in -*|[0-9]*) ;; *) place="$word" ;; esac; done
    mkdir -p "$place/bin" && : > "$place/bin/activate"; exit ;;
  *) {_SAYS.strip()}; exit 0 ;;
esac
{_RUNS}"""
_PIP = f"""#!/bin/sh
case "$1" in install|download|uninstall) {_SAYS.strip()}; exit 0 ;; esac
exec python3 -m pip "$@"
"""
# Only the installer of uv is known; what else a script fetches, it needs.
_FETCHER = f"""#!/bin/sh
case "$*" in *astral.sh/uv*) {_SAYS.strip()}; exit 0 ;; esac
path=":$PATH:"; PATH="${{path%%:{PROGRAMS}:*}}:${{path#*:{PROGRAMS}:}}"; export PATH
exec "$(basename "$0")" "$@"
"""


def stand_ins(home: str) -> Mapping[str, RuntimeFile]:
    """The programs by absolute path, and the file by which scripts find what the installer of uv left in `home`."""
    texts = {
        "apt-get": f"#!/bin/sh\n{_SAYS}",
        "apt": f"#!/bin/sh\n{_SAYS}",
        "pip": _PIP,
        "pip3": _PIP,
        "uv": _UV,
        "uvx": f"#!/bin/sh\n{_RUNS}",
        "curl": _FETCHER,
        "wget": _FETCHER,
    }
    programs = {f"{PROGRAMS}/{name}": RuntimeFile(text.encode(), 0o755) for name, text in texts.items()}
    homes = dict.fromkeys((home, "/root"))
    return programs | {f"{each}/.local/bin/env": RuntimeFile(b"") for each in homes}
