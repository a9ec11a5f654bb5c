"""Makes the tasks of this folder: `python examples/computer/make_tasks.py`, then `env-service runtime check FILE`.

shell.jsonl: ten kinds of work in a shell, over files that are made from a seed. repairs.jsonl: ten small modules, each
with one mistake that its own test shows; it is judged by calls that are in no file that the policy sees. What has to be
printed comes from Python here, for repairs from the module before the mistake was put in.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random

SEED = 31
HERE = Path(__file__).parent
WORDS = [
    "amber",
    "birch",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "grove",
    "heron",
    "inlet",
    "jetty",
    "knoll",
    "larch",
    "meadow",
    "north",
    "otter",
    "pine",
    "quartz",
]
Line = dict[str, object]

_DRIVER = """import sys
sys.path.append("/work")
from {module} import *
for call in {calls!r}:
    try:
        print(repr(eval(call)))
    except Exception as error:
        print(type(error).__name__)
"""


def task(name: str, prompt: str, files: Mapping[str, str], solution: str, *checks: tuple[str, str]) -> Line:
    """A line of a task file. `checks` are commands and what they print."""
    return {
        "name": name,
        "prompt": prompt,
        "files": dict(files),
        "checks": [{"run": run, "prints": prints} for run, prints in checks],
        "solution": solution,
    }


def count_errors(chance: Random) -> Line:
    levels = [chance.choice(("INFO", "WARN", "ERROR")) for _ in range(80)]
    log = "".join(f"{level} {chance.choice(WORDS)} took {chance.randrange(900)} ms\n" for level in levels)
    return task(
        "count errors", "How many lines of app.log begin with ERROR? Write the number into answer.txt.",
        {"app.log": log}, "grep -c ^ERROR app.log > answer.txt",
        ("cat answer.txt", str(levels.count("ERROR"))),
    )  # fmt: skip


def largest_file(chance: Random) -> Line:
    sizes = {
        f"data/{word}.bin": "x" * size for word, size in zip(WORDS, chance.sample(range(100, 4000), 12), strict=False)
    }
    return task(
        "largest file", "Write the name of the largest file in data, without the folder, into answer.txt.",
        sizes, "ls -S data | head -1 > answer.txt",
        ("cat answer.txt", max(sizes, key=lambda name: len(sizes[name])).removeprefix("data/")),
    )  # fmt: skip


def rename(_chance: Random) -> Line:
    noted = WORDS[:6]
    notes = {f"notes/{word}.txt": f"about {word}\n" for word in noted}
    return task(
        "rename", "Rename all files in notes that end in .txt so that they end in .md. Keep what is in them.",
        notes, "cd notes; for each in *.txt; do mv $each ${each%.txt}.md; done",
        ("cd notes; ls; cat *", "\n".join([*(f"{word}.md" for word in noted), *(f"about {each}" for each in noted)])),
    )  # fmt: skip


def addresses(chance: Random) -> Line:
    people = [f"{chance.choice(WORDS)}@{chance.choice(WORDS)}.example" for _ in range(25)]
    letter = "".join(f"Ask {person} about the {chance.choice(WORDS)}.\n" for person in people)
    return task(
        "addresses", "Write all e-mail addresses in letter.txt into answer.txt, sorted, each once, one on a line.",
        {"letter.txt": letter}, "grep -o '[a-z]*@[a-z]*\\.example' letter.txt | LC_ALL=C sort -u > answer.txt",
        ("cat answer.txt", "\n".join(sorted(set(people)))),
    )  # fmt: skip


def sum_of_a_table(chance: Random) -> Line:
    rows = [(chance.choice(WORDS), chance.randrange(1, 50), chance.randrange(1, 100)) for _ in range(30)]
    table = "name,count,price\n" + "".join(f"{name},{count},{price}\n" for name, count, price in rows)
    return task(
        "sum of a table", "sales.csv has the columns name, count and price. Write the sum of count times price over "
        "all rows into answer.txt.",
        {"sales.csv": table}, "awk -F, 'NR > 1 { sum += $2 * $3 } END { print sum }' sales.csv > answer.txt",
        ("cat answer.txt", str(sum(count * price for _, count, price in rows))),
    )  # fmt: skip


def open_work(chance: Random) -> Line:
    marked = set(chance.sample(WORDS, 5))
    sources = {
        f"src/{word}.py": f"def {word}():\n    {'# TODO' if word in marked else '# done'}\n" for word in WORDS[:12]
    }
    found = sorted(name for name, text in sources.items() if "TODO" in text)
    return task(
        "open work", "Write the paths of all files below src in which the word TODO stands into todo.txt, "
        "sorted, one on a line, as src/NAME.",
        sources, "grep -rl TODO src | sort > todo.txt", ("cat todo.txt", "\n".join(found)),
    )  # fmt: skip


def sort_away(_chance: Random) -> Line:
    mixed = {f"in/{word}.{'log' if at % 2 else 'dat'}": f"{word}\n" for at, word in enumerate(WORDS[:8])}
    logs = sorted(name.removeprefix("in/") for name in mixed if name.endswith(".log"))
    rest = sorted(name.removeprefix("in/") for name in mixed if name.endswith(".dat"))
    return task(
        "sort away", "Move all files that end in .log from in to a new folder archive. Leave the others.",
        mixed, "mkdir archive; mv in/*.log archive/", ("ls archive; echo --; ls in", "\n".join([*logs, "--", *rest])),
    )  # fmt: skip


def secure_addresses(chance: Random) -> Line:
    settings = {
        f"etc/{word}.conf": f"home = http://{word}.example/\nport = {chance.randrange(9999)}\n" for word in WORDS[:5]
    }
    changed = "".join(settings[name].replace("http://", "https://") for name in sorted(settings))
    return task(
        "secure addresses", "In all files that end in .conf in etc, replace http:// by https://. Change nothing else.",
        settings, "sed -i 's|http://|https://|' etc/*.conf", ("cat etc/*.conf", changed),
    )  # fmt: skip


def commonest_word(chance: Random) -> Line:
    text = [chance.choice(WORDS[: 3 + at % 14]) for at in range(200)] + [WORDS[1]] * 20
    chance.shuffle(text)
    return task(
        "commonest word", "Write the word that is most often in text.txt into answer.txt.",
        {"text.txt": "\n".join(" ".join(text[at : at + 10]) for at in range(0, len(text), 10)) + "\n"},
        "tr ' ' '\\n' < text.txt | sort | uniq -c | sort -rn | head -1 | awk '{print $2}' > answer.txt",
        ("cat answer.txt", Counter(text).most_common(1)[0][0]),
    )  # fmt: skip


def make_executable(_chance: Random) -> Line:
    scripts = {
        f"tools/{word}{'.sh' if at % 2 else '.txt'}": f"#!/bin/sh\necho {word}\n" for at, word in enumerate(WORDS[:6])
    }
    runs = sorted(name for name in scripts if name.endswith(".sh"))
    return task(
        "make executable", "Make all files in tools that end in .sh executable, and no others.",
        scripts, "chmod +x tools/*.sh", ("find tools -type f -perm -u+x | sort", "\n".join(runs)),
    )  # fmt: skip


SHELL = (
    count_errors,
    largest_file,
    rename,
    addresses,
    sum_of_a_table,
    open_work,
    sort_away,
    secure_addresses,
    commonest_word,
    make_executable,
)
"""Kinds of work in a shell. Each draws from the same chance, so that their order is part of what comes out."""


def shell_tasks(chance: Random) -> Iterator[Line]:
    """Work in a shell."""
    for make in SHELL:
        yield make(chance)


SOURCES = '''
## slugs
def slug(title):
    """Words of a title in small letters, joined by '-'; other signs part words."""
    words = ''.join(sign.lower() if sign.isalnum() else ' ' for sign in title).split()
    return '-'.join(words)

## intervals
def merged(pairs):
    """Intervals (first, last) put together where they touch or overlap, in order."""
    found = []
    for first, last in sorted(pairs):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return found

## median
def median(numbers):
    """The middle of the numbers in order; the mean of the two middle ones."""
    ordered = sorted(numbers)
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2

## roman
VALUES = {'I': 1, 'V': 5, 'X': 10, 'L': 50, 'C': 100, 'D': 500, 'M': 1000}


def number(text):
    """The value of a Roman number."""
    total = 0
    for sign, after in zip(text, text[1:] + ' '):
        value = VALUES[sign]
        total += -value if VALUES.get(after, 0) > value else value
    return total

## rows
def chunks(items, size):
    """Lists of `size` items in order; the last one may be shorter."""
    return [items[at : at + size] for at in range(0, len(items), size)]

## duration
def seconds(text):
    """Seconds of a duration such as 1h2m3s; each part may be missing."""
    total, digits = 0, ''
    for sign in text:
        if sign.isdigit():
            digits += sign
        else:
            total += int(digits) * {'h': 3600, 'm': 60, 's': 1}[sign]
            digits = ''
    return total

## brackets
PAIRS = {')': '(', ']': '[', '}': '{'}


def balanced(text):
    """True if all brackets are closed in order."""
    opened = []
    for sign in text:
        if sign in PAIRS.values():
            opened.append(sign)
        elif sign in PAIRS and (not opened or opened.pop() != PAIRS[sign]):
            return False
    return not opened

## wrapping
def wrap(text, width):
    """Lines of whole words, each of at most `width` characters if its words allow that."""
    lines = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += ' ' + word
        else:
            lines.append(word)
    return lines

## shop
def total(prices, percent_off=0):
    """Whole cents after a discount, halves rounded up."""
    left = sum(prices) * (100 - percent_off)
    return (left + 50) // 100

## graph
def reached(edges, start):
    """All places that can be reached from one, itself too, in order."""
    seen, waiting = {start}, [start]
    while waiting:
        for there in edges.get(waiting.pop(), ()):
            if there not in seen:
                seen.add(there)
                waiting.append(there)
    return sorted(seen)
'''
"""The modules, without a mistake."""

REPAIRS: tuple[tuple[str, tuple[str, str], str, tuple[str, ...]], ...] = (
    (
        "slugs",
        ("sign.lower() if", "sign if"),
        "assert slug('Hello, World') == 'hello-world'",
        ("slug('A  B')", "slug('--x--Y')", "slug('')", "slug('Rust & C++ 11')"),
    ),
    (
        "intervals",
        ("max(found[-1][1], last)", "last"),
        "assert merged([(1, 9), (2, 3)]) == [(1, 9)]",
        ("merged([(5, 6), (1, 10), (2, 3)])", "merged([(1, 2), (2, 4)])", "merged([])", "merged([(3, 4), (1, 2)])"),
    ),
    (
        "median",
        ("ordered = sorted(numbers)", "ordered = list(numbers)"),
        "assert median([9, 1, 5]) == 5",
        ("median([3, 1, 2])", "median([4, 1, 3, 2])", "median([7])", "median([2, 9, 1, 8, 5])"),
    ),
    (
        "roman",
        ("> value else", ">= value else"),
        "assert number('III') == 3",
        ("number('XX')", "number('MCMXCIV')", "number('IX')", "number('LXXXVIII')"),
    ),
    (
        "rows",
        ("range(0, len(items), size)", "range(0, len(items) - size + 1, size)"),
        "assert chunks([1, 2, 3], 2) == [[1, 2], [3]]",
        ("chunks([1, 2, 3, 4, 5], 3)", "chunks([], 2)", "chunks([1, 2, 3, 4], 2)", "chunks([1], 5)"),
    ),
    (
        "duration",
        ("            digits = ''\n", ""),
        "assert seconds('1m5s') == 65",
        ("seconds('2h')", "seconds('1h1m1s')", "seconds('90s')", "seconds('10m30s')"),
    ),
    (
        "brackets",
        ("return not opened\n", "return True\n"),
        "assert not balanced('((')",
        ("balanced('([]{})')", "balanced('(]')", "balanced('{')", "balanced(')')", "balanced('')"),
    ),
    (
        "wrapping",
        ("len(lines[-1]) + 1 + len(word)", "len(lines[-1]) + len(word)"),
        "assert wrap('aa bb', 4) == ['aa', 'bb']",
        (
            "wrap('one two three', 7)",
            "wrap('aa bb cc', 4)",
            "wrap('a b c d', 2)",
            "wrap('', 5)",
            "wrap('abcdef gh', 3)",
        ),
    ),
    (
        "shop",
        ("(left + 50) // 100", "left // 100"),
        "assert total([5], 10) == 5",
        ("total([199, 1], 50)", "total([333], 10)", "total([])", "total([15], 33)"),
    ),
    (
        "graph",
        ("                waiting.append(there)\n", ""),
        "assert reached({1: [2], 2: [3]}, 1) == [1, 2, 3]",
        (
            "reached({1: [2], 2: [1, 3], 3: [4]}, 1)",
            "reached({}, 5)",
            "reached({1: [1]}, 1)",
            "reached({1: [2], 3: [4]}, 1)",
        ),
    ),
)
"""A module, its mistake (the text that stands there, and what is put in its place), a test, and calls that judge."""


def repair_tasks() -> Iterator[Line]:
    """Modules with a mistake each."""
    sources = dict(part.split("\n", 1) for part in SOURCES.strip().removeprefix("## ").split("\n## "))
    for name, (right, wrong), test, calls in REPAIRS:
        source = sources[name].rstrip() + "\n"
        assert source.count(right) == 1, name
        whole = _module(source)
        assert _passes(test, whole), name
        assert not _passes(test, _module(source.replace(right, wrong))), f"{name}: its test does not show the mistake"
        printed = "\n".join(repr(eval(call, whole)) for call in calls)
        function = next(
            line.split("(")[0].removeprefix("def ") for line in source.splitlines() if line.startswith("def ")
        )
        fixed = f"cat > {name}.py <<'END'\n{source}END\n"
        yield {
            "name": name,
            "prompt": f"{name}.py has one mistake: {function} does not do what its docstring says. "
            f"`python3 test_{name}.py` shows it. Repair the module.",
            "files": {
                f"{name}.py": source.replace(right, wrong),
                f"test_{name}.py": f"from {name} import *\n\n{test}\nprint('passed')\n",
            },
            "checks": [
                {
                    "run": "python3 -I /judge/calls.py",
                    "prints": printed,
                    "files": {"/judge/calls.py": _DRIVER.format(module=name, calls=calls)},
                }
            ],
            "solution": fixed,
        }


def _module(source: str) -> dict[str, object]:
    names: dict[str, object] = {}
    exec(source, names)
    return names


def _passes(test: str, module: dict[str, object]) -> bool:
    try:
        exec(test, module)
    except (AssertionError, LookupError, ValueError):
        return False
    return True


def main() -> None:
    """Write both files."""
    for name, lines in (("shell", shell_tasks(Random(SEED))), ("repairs", repair_tasks())):
        (HERE / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
