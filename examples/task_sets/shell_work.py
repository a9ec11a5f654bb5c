"""Ten more kinds of work in a shell, in the form of those in `examples/computer/make_tasks.py`."""

from collections import Counter
from collections.abc import Iterator
from random import Random

from examples.computer.make_tasks import WORDS, Line, task


def first_of_each(chance: Random) -> Line:
    lines = [chance.choice(WORDS[:9]) for _ in range(60)]
    return task(
        "first of each", "Write list.txt into once.txt without lines that were there before. Keep the order.",
        {"list.txt": "\n".join(lines) + "\n"}, "awk '!seen[$0]++' list.txt > once.txt",
        ("cat once.txt", "\n".join(dict.fromkeys(lines))),
    )  # fmt: skip


def older_than(chance: Random) -> Line:
    people = [(word, chance.randrange(20, 70)) for word in WORDS]
    table = "".join(f"{name}\t{age}\t{chance.choice(WORDS)}\n" for name, age in people)
    return task(
        "older than", "people.tsv has the columns name, age and town, parted by tabs. Write the names of all who are "
        "older than 40 into answer.txt, sorted, one on a line.",
        {"people.tsv": table}, "awk -F'\\t' '$2 > 40 { print $1 }' people.tsv | LC_ALL=C sort > answer.txt",
        ("cat answer.txt", "\n".join(sorted(name for name, age in people if age > 40))),
    )  # fmt: skip


def names_of_numbers(chance: Random) -> Line:
    names = dict(enumerate(chance.sample(WORDS, 12), start=101))
    orders = [(chance.choice(list(names)), chance.randrange(1, 90)) for _ in range(25)]
    return task(
        "names of numbers", "names.txt has a number and a name in each line, orders.txt a number and a count. Write "
        "orders.txt with names in place of the numbers into named.txt, in the same order.",
        {"names.txt": "".join(f"{number} {name}\n" for number, name in names.items()),
         "orders.txt": "".join(f"{number} {count}\n" for number, count in orders)},
        "awk 'NR == FNR { name[$1] = $2; next } { print name[$1], $2 }' names.txt orders.txt > named.txt",
        ("cat named.txt", "\n".join(f"{names[number]} {count}" for number, count in orders)),
    )  # fmt: skip


def count_by_level(chance: Random) -> Line:
    levels = [chance.choice(("DEBUG", "INFO", "WARN", "ERROR")) for _ in range(70)]
    counts = Counter(levels)
    return task(
        "count by level", "Each line of run.log begins with a level. Write a line LEVEL COUNT for each level into "
        "levels.txt, sorted by the level's name.",
        {"run.log": "".join(f"{level} {chance.choice(WORDS)}\n" for level in levels)},
        "cut -d' ' -f1 run.log | LC_ALL=C sort | uniq -c | awk '{ print $2, $1 }' > levels.txt",
        ("cat levels.txt", "\n".join(f"{level} {counts[level]}" for level in sorted(counts))),
    )  # fmt: skip


def folders_of_a_list(chance: Random) -> Line:
    folders = sorted({f"{chance.choice(WORDS[:5])}/{chance.choice(WORDS)}" for _ in range(10)})
    return task(
        "folders of a list", "Make every folder that folders.txt names below tree, each with an empty file README.",
        {"folders.txt": "\n".join(folders) + "\n"},
        "while read -r each; do mkdir -p tree/$each; : > tree/$each/README; done < folders.txt",
        ("find tree -type f -size 0 | LC_ALL=C sort", "\n".join(sorted(f"tree/{folder}/README" for folder in folders))),
    )  # fmt: skip


def newest_version(chance: Random) -> Line:
    versions = sorted({(chance.randrange(1, 4), chance.randrange(0, 15)) for _ in range(9)})
    names = [f"{major}.{minor}" for major, minor in versions]
    return task(
        "newest version", "releases has a folder for each version, such as 1.9 or 1.10. Make a link releases/latest "
        "that leads to the folder of the newest version by its name alone.",
        {f"releases/{name}/notes": f"{name}\n" for name in names},
        "cd releases; ln -s \"$(ls | sort -V | tail -1)\" latest",
        ("readlink releases/latest; cat releases/latest/notes", f"{names[-1]}\n{names[-1]}"),
    )  # fmt: skip


def part_by_level(chance: Random) -> Line:
    lines = [f"{chance.choice(('info', 'warn', 'error'))} {chance.choice(WORDS)} {at}" for at in range(40)]
    parts = {level: [line for line in lines if line.startswith(level)] for level in ("error", "info", "warn")}
    return task(
        "part by level", "Part all.log by the first word of its lines into error.log, info.log and warn.log. Keep the "
        "order, and all.log as it is.",
        {"all.log": "\n".join(lines) + "\n"}, "awk '{ print > ($1 \".log\") }' all.log",
        ("cat error.log; echo --; cat info.log; echo --; cat warn.log; echo --; cat all.log",
         "\n--\n".join("\n".join(part) for part in [*parts.values(), lines])),
    )  # fmt: skip


def swap_columns(chance: Random) -> Line:
    rows = [(word, chance.choice(WORDS), chance.randrange(100)) for word in WORDS[:12]]
    return task(
        "swap columns", "table.csv has three columns. Write it into swapped.csv with the first two exchanged.",
        {"table.csv": "".join(f"{one},{two},{three}\n" for one, two, three in rows)},
        "awk -F, -v OFS=, '{ print $2, $1, $3 }' table.csv > swapped.csv",
        ("cat swapped.csv", "\n".join(f"{two},{one},{three}" for one, two, three in rows)),
    )  # fmt: skip


def remove_empty(chance: Random) -> Line:
    empty = set(chance.sample(WORDS, 7))
    files = {f"box/{word[0]}/{word}.txt": "" if word in empty else f"{word}\n" for word in WORDS}
    left = sorted(path for path, text in files.items() if text)
    return task(
        "remove empty", "Remove all empty files below box, and no others.",
        files, "find box -type f -size 0 -exec rm {} +", ("find box -type f | LC_ALL=C sort", "\n".join(left)),
    )  # fmt: skip


def longest_line(chance: Random) -> Line:
    lines = [" ".join(chance.choices(WORDS, k=chance.randrange(2, 9))) for _ in range(30)]
    longest = max(map(len, lines))
    lines = [line for at, line in enumerate(lines) if len(line) < longest or at == [*map(len, lines)].index(longest)]
    return task(
        "longest line", "Write the number of the longest line of text.txt, counted from 1, and the line itself behind "
        "a space, into answer.txt.",
        {"text.txt": "\n".join(lines) + "\n"},
        "awk 'length > most { most = length; at = NR; line = $0 } END { print at, line }' text.txt > answer.txt",
        ("cat answer.txt", next(f"{at} {line}" for at, line in enumerate(lines, start=1) if len(line) == longest)),
    )  # fmt: skip


KINDS = (
    first_of_each,
    older_than,
    names_of_numbers,
    count_by_level,
    folders_of_a_list,
    newest_version,
    part_by_level,
    swap_columns,
    remove_empty,
    longest_line,
)
"""All of them. Each draws from the same chance, so that their order is part of what comes out."""


def more_shell_tasks(chance: Random) -> Iterator[Line]:
    """Work of each kind."""
    for make in KINDS:
        yield make(chance)
