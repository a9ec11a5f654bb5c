"""Cuts of entries into requests. Some verifiers compare the items of a group, and need them in one request.

A client does not know which verifiers do. So it cuts between groups as long as there are several, and through one where
it is all that there is: larger than a request, or to be halved since it hangs a service.
"""

from collections.abc import Sequence

from services.rewards.items import Entry


def by_group(entries: Sequence[Entry]) -> list[list[Entry]]:
    """The entries of each group together, in the order of the first ones; an entry without a group is one by itself."""
    found: dict[object, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.item.group or entry, []).append(entry)
    return list(found.values())


def pieces(entries: Sequence[Entry], *, most: int) -> list[list[Entry]]:
    """The entries in pieces of at most `most`; a group is in one piece if it is not larger."""
    made: list[list[Entry]] = [[]]
    for group in by_group(entries):
        if made[-1] and len(made[-1]) + len(group) > most:
            made.append([])
        for entry in group:
            if len(made[-1]) == most:
                made.append([])
            made[-1].append(entry)
    return made if made[0] else []


def halves(entries: Sequence[Entry]) -> tuple[list[Entry], list[Entry]]:
    """Two parts of about one size, neither of them empty, of at least two entries. Cut between groups where there are
    several.
    """
    groups = by_group(entries)
    if len(groups) == 1:
        middle = len(entries) // 2
        return list(entries[:middle]), list(entries[middle:])
    first, rest = list(groups[0]), groups[1:]
    while len(rest) > 1 and len(first) + len(rest[0]) <= len(entries) // 2:
        first += rest.pop(0)
    return first, [entry for group in rest for entry in group]


def affordable(entries: Sequence[Entry], *, most: int) -> list[Entry]:
    """The first of the entries, at most `most`. A group of which nothing is answered is among them whole or not at all;
    one that is answered in part is not compared by its verifier, and may be cut.
    """
    taken: list[Entry] = []
    for group in by_group(entries):
        room = most - len(taken)
        is_whole = len(group) == group[0].item.group_size
        if len(group) <= room:
            taken += group
        elif not is_whole:
            taken += group[:room]
    return taken
