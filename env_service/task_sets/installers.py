"""Programs that stand for installers while scripts of tests and of solutions run, where no network is.

Scripts of tasks mostly fetch their test runner first: apt-get, an installer of uv by curl, and then `uvx pytest`. With
these before the image's own programs, whatever fetches says so and does nothing, and `uv run` and `uvx` run the
image's own program. What the image lacks is then missed where it is used. What is not known to fetch is never passed
over: it is done by the image's own program, or fails.
"""

from collections.abc import Mapping

from env_service.runtimes.interface import RuntimeFile

PROGRAMS = "/judge/bin"
"""The folder that they are laid into."""

_SAYS = 'echo "$(basename "$0") $*: not done, there is no network; the image has to have it" >&2'

# Options of uv, uvx and `uv run` that take a word; one that is missing here makes its word the program, which fails.
_WITH_A_WORD = (
    "-p|--python|-w|--with|--from|--with-requirements|--with-editable|--index|--default-index|-i|--index-url|"
    "--extra-index-url|--project|--env-file|--extra|--group|-c|--constraints|--python-platform|--refresh-package|"
    "--cache-dir|--config-file|--color|--python-preference|--index-strategy|--only-group|--no-group|--package|"
    "--resolution|--prerelease|--exclude-newer|--link-mode|-f|--find-links"
)
_OPTIONS = f"""while [ $# -gt 0 ]; do
  case "$1" in
    --directory) cd -- "$2" || exit; shift 2 ;;
    --directory=*) cd -- "${{1#*=}}" || exit; shift ;;
    {_WITH_A_WORD}) shift; [ $# -eq 0 ] || shift ;;
    -m|--module) shift; exec python3 -m "$@" ;;
    -V|--version) echo "uv 0 (no network)"; exit ;;
    --) shift; break ;;
    -) break ;;
    -*) shift ;;
    *) break ;;
  esac
done
"""
_RUNS = f"""{_OPTIONS}[ $# -gt 0 ] || {{ echo "$0: no program is named" >&2; exit 2; }}
name="$1"; shift
[ -n "$exact" ] || name="${{name%%[=@<>~!]*}}"
case "$name" in -|*.py) exec python3 "$name" "$@" ;; esac
command -v "$name" > /dev/null || case "$name" in
  python) exec python3 "$@" ;;
  pytest) exec python3 -m pytest "$@" ;;
esac
exec "$name" "$@"
"""
_UV = f"""#!/bin/sh
exact=
{_OPTIONS}case "$1 $2" in
  "run "*) exact=yes; shift ;;
  "tool run") shift 2 ;;
  "pip "*) shift; exec {PROGRAMS}/pip "$@" ;;
  "venv "*)
    shift; place=.venv
    for word in "$@"; do case "$word" in -*|[0-9]*) ;; *) place="$word" ;; esac; done
    mkdir -p "$place/bin" && : >> "$place/bin/activate"; exit ;;
  "init "*|"add "*|"sync "*|"self "*|"cache "*|"tool install"|"tool upgrade"|"tool update-shell"|\\
  "python install"|"python pin")
    {_SAYS}; exit 0 ;;
  *) echo "uv $*: not known where no network is" >&2; exit 2 ;;
esac
{_RUNS}"""
_PIPS_WITH_A_WORD = (
    "-r|--requirement|-c|--constraint|-t|--target|--prefix|--root|--cache-dir|-f|--find-links|-i|--index-url|"
    "--extra-index-url|-p|--python"
)
# A package that is here needs no network: pip installs it, with what the image has.
_PIP = f"""#!/bin/sh
command= here= before=
for word in "$@"; do
  shift
  case "$before" in {_PIPS_WITH_A_WORD}) before=; set -- "$@" "$word"; continue ;; esac
  before="$word"
  case "$word" in
    --system|--no-cache) continue ;;
    -*|*://*) ;;
    .|./*|..|../*|/*|.\\[*|*.whl|*.tar.gz) here=yes ;;
    *) command="${{command:-$word}}" ;;
  esac
  set -- "$@" "$word"
done
export PIP_BREAK_SYSTEM_PACKAGES=1
case "$command$here" in
  installyes) exec python3 -m pip "$@" --no-index --no-deps --no-build-isolation ;;
  install|download|sync) {_SAYS}; exit 0 ;;
esac
exec python3 -m pip "$@"
"""
# Only the installer of uv is known; what else a script fetches, it needs.
_FETCHER = f"""#!/bin/sh
case "$*" in *astral.sh/uv*) {_SAYS}; exit 0 ;; esac
path=":$PATH:"
case "$path" in *:{PROGRAMS}:*)
  path="${{path%%:{PROGRAMS}:*}}:${{path#*:{PROGRAMS}:}}"; path="${{path#:}}"; PATH="${{path%:}}"; export PATH ;;
esac
exec "$(basename "$0")" "$@"
"""


def stand_ins(home: str) -> Mapping[str, RuntimeFile]:
    """The programs by absolute path, and what the installer of uv leaves in `home`, by which scripts find it."""
    apt, uv, uvx = f"#!/bin/sh\n{_SAYS}\n", _UV, f"#!/bin/sh\nexact=\n{_RUNS}"
    texts = {"apt-get": apt, "apt": apt, "pip": _PIP, "pip3": _PIP, "uv": uv, "uvx": uvx}
    texts |= {"curl": _FETCHER, "wget": _FETCHER}
    programs = {f"{PROGRAMS}/{name}": RuntimeFile(text.encode(), 0o755) for name, text in texts.items()}
    for each in dict.fromkeys((home, "/root")):
        # In place of what an agent may have left there, where a script looks first.
        programs |= {f"{each}/.local/bin/{name}": programs[f"{PROGRAMS}/{name}"] for name in ("uv", "uvx")}
        programs[f"{each}/.local/bin/env"] = RuntimeFile(b"")
    return programs
