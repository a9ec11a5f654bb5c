"""Small packages without a mistake, and calls that say what their functions do; `make_tasks.py` puts mistakes in."""

PACKAGES: dict[str, dict[str, str]] = {
    "wordbook": {
        "text.py": '''"""Words of a text."""


def words(text):
    """Words in small letters; what is no letter or digit parts them."""
    return "".join(sign.lower() if sign.isalnum() else " " for sign in text).split()


def slug(title, limit=20):
    """Words joined by '-', as many whole ones as fit into `limit` characters."""
    made = ""
    for word in words(title):
        longer = f"{made}-{word}" if made else word
        if len(longer) > limit:
            break
        made = longer
    return made


def wrap(text, width):
    """Lines of whole words, each of at most `width` characters if its words allow that."""
    lines = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return lines
''',
        "index.py": '''"""Finding lines by their words."""

from wordbook.text import words


def build(lines):
    """For each word the numbers of its lines, from 1 on, in order and each once."""
    found = {}
    for number, line in enumerate(lines, start=1):
        for word in words(line):
            numbers = found.setdefault(word, [])
            if not numbers or numbers[-1] != number:
                numbers.append(number)
    return found


def lookup(lines, query):
    """Numbers of the lines that have all words of the query."""
    index = build(lines)
    wanted = [set(index.get(word, [])) for word in words(query)]
    return sorted(set.intersection(*wanted)) if wanted else []


def commonest(lines, count):
    """The most frequent words, equal ones by the alphabet."""
    counts = {}
    for line in lines:
        for word in words(line):
            counts[word] = counts.get(word, 0) + 1
    return sorted(counts, key=lambda word: (-counts[word], word))[:count]
''',
    },
    "ledger": {
        "money.py": '''"""Amounts of money, in cents."""


def cents(text):
    """Cents of an amount such as '12.5', '-3' or '1,200.05'."""
    sign = -1 if text.startswith("-") else 1
    whole, _, part = text.lstrip("-").replace(",", "").partition(".")
    return sign * (int(whole or 0) * 100 + int((part + "00")[:2]))


def shown(amount):
    """An amount with two digits behind the point, and a comma for each thousand."""
    sign = "-" if amount < 0 else ""
    return f"{sign}{abs(amount) // 100:,}.{abs(amount) % 100:02d}"


def shares(amount, parts):
    """Equal parts of an amount; the first ones have a cent more where it does not come out even."""
    each, left = divmod(amount, parts)
    return [each + 1 if at < left else each for at in range(parts)]
''',
        "accounts.py": '''"""Accounts and what moves between them."""

from ledger.money import cents, shown


def balance(entries, account):
    """Cents in an account after all entries (from, to, amount as text)."""
    total = 0
    for source, target, amount in entries:
        if source == account:
            total -= cents(amount)
        if target == account:
            total += cents(amount)
    return total


def overdrawn(entries):
    """Accounts with less than nothing, by the alphabet; 'bank' is none."""
    names = {name for source, target, _ in entries for name in (source, target)}
    return sorted(name for name in names if name != "bank" and balance(entries, name) < 0)


def statement(entries, account):
    """A line for each entry of an account: what moved, and what is there then."""
    lines, total = [], 0
    for source, target, amount in entries:
        moved = (target == account) * cents(amount) - (source == account) * cents(amount)
        if moved:
            total += moved
            lines.append(f"{shown(moved)} {shown(total)}")
    return lines
''',
    },
    "planner": {
        "intervals.py": '''"""Intervals (first, last) of whole minutes, the last one not in them."""


def merged(pairs):
    """Intervals put together where they touch or overlap, in order."""
    found = []
    for first, last in sorted(pairs):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return found


def gaps(pairs, first, last):
    """The free intervals between `first` and `last`."""
    found, at = [], first
    for begins, ends in merged(pairs):
        if begins > at:
            found.append((at, min(begins, last)))
        at = max(at, ends)
        if at >= last:
            break
    if at < last:
        found.append((at, last))
    return found


def overlap(one, other):
    """Minutes that two intervals have in common."""
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))
''',
        "schedule.py": '''"""Times of a day."""

from planner.intervals import gaps, overlap


def minutes(text):
    """Minutes since midnight of '9:05'."""
    hour, minute = text.split(":")
    return int(hour) * 60 + int(minute)


def clock(at):
    """'9:05' of minutes since midnight."""
    return f"{at // 60}:{at % 60:02d}"


def first_free(busy, length, opens="9:00", closes="17:00"):
    """The first time at which `length` minutes are free, '' if there is none. `busy`: pairs of times."""
    pairs = [(minutes(first), minutes(last)) for first, last in busy]
    for first, last in gaps(pairs, minutes(opens), minutes(closes)):
        if last - first >= length:
            return clock(first)
    return ""


def clashes(meetings):
    """Names of meetings (name, from, to) that overlap, in pairs, in the order of the list."""
    found = []
    for at, (name, first, last) in enumerate(meetings):
        for other, begins, ends in meetings[at + 1 :]:
            if overlap((minutes(first), minutes(last)), (minutes(begins), minutes(ends))) > 0:
                found.append((name, other))
    return found
''',
    },
    "gridway": {
        "grid.py": '''"""Maps of signs: '#' is a wall, everything else can be walked on."""


def size(rows):
    """Height and width."""
    return len(rows), max((len(row) for row in rows), default=0)


def free(rows, place):
    """True if a place (row, column) is on the map and no wall."""
    row, column = place
    return 0 <= row < len(rows) and 0 <= column < len(rows[row]) and rows[row][column] != "#"


def beside(rows, place):
    """The free places above, left, right and below, in this order."""
    row, column = place
    near = [(row - 1, column), (row, column - 1), (row, column + 1), (row + 1, column)]
    return [each for each in near if free(rows, each)]


def find(rows, sign):
    """The first place with a sign, row by row; None if there is none."""
    for row, line in enumerate(rows):
        if sign in line:
            return row, line.index(sign)
    return None
''',
        "paths.py": '''"""Ways over a map."""

from gridway.grid import beside, find


def distances(rows, start):
    """Steps to each place that can be reached."""
    found, waiting = {start: 0}, [start]
    for place in waiting:
        for there in beside(rows, place):
            if there not in found:
                found[there] = found[place] + 1
                waiting.append(there)
    return found


def steps(rows):
    """Steps from 'S' to 'E'; -1 if there is no way."""
    return distances(rows, find(rows, "S")).get(find(rows, "E"), -1)


def rooms(rows):
    """How many parts the free places are in."""
    left = {(row, column) for row, line in enumerate(rows) for column, sign in enumerate(line) if sign != "#"}
    count = 0
    while left:
        count += 1
        left -= distances(rows, min(left)).keys()
    return count


def farthest(rows):
    """The place that is most steps from 'S', of equal ones the first."""
    found = distances(rows, find(rows, "S"))
    return min(found, key=lambda place: (-found[place], place))
''',
    },
    "tinyql": {
        "parse.py": '''"""Reading conditions such as 'age >= 30 and town = Bern'."""

SIGNS = (">=", "<=", "!=", "=", ">", "<")


def value(text):
    """A number where the text is one, else the text."""
    return int(text) if text.lstrip("-").isdigit() else text


def condition(text):
    """Column, sign and value of one comparison."""
    for sign in SIGNS:
        if sign in text:
            column, _, told = text.partition(sign)
            return column.strip(), sign, value(told.strip())
    raise ValueError(f"no comparison: {text}")


def conditions(text):
    """The comparisons of a text, which 'or' and 'and' join: a list of lists, one of which has to hold whole."""
    return [[condition(each) for each in part.split(" and ")] for part in text.split(" or ")]
''',
        "query.py": '''"""Asking a list of rows."""

from tinyql.parse import conditions


def holds(row, column, sign, wanted):
    """True if a row fulfils a comparison; one with no such column does not."""
    if column not in row:
        return False
    found = row[column]
    if sign == "=":
        return found == wanted
    if sign == "!=":
        return found != wanted
    if type(found) is not type(wanted):
        return False
    return {">": found > wanted, "<": found < wanted, ">=": found >= wanted, "<=": found <= wanted}[sign]


def select(rows, where="", order="", limit=None):
    """Rows for which the conditions hold, in the order of a column ('-' before it: from the top), at most `limit`."""
    wanted = conditions(where) if where else [[]]
    found = [row for row in rows if any(all(holds(row, *each) for each in part) for part in wanted)]
    if order:
        found = sorted(found, key=lambda row: row[order.lstrip("-")], reverse=order.startswith("-"))
    return found[:limit]


def grouped(rows, column):
    """How many rows there are for each value of a column, the most frequent first, equal ones by the value."""
    counts = {}
    for row in rows:
        counts[row.get(column)] = counts.get(row.get(column), 0) + 1
    return sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))
''',
    },
}
"""Files of the packages, by package and name; `__init__.py` is empty."""

_LINES = "['The old mill', 'An old, old tower', 'mill of the tower', '']"
_ENTRIES = "[('bank', 'ann', '10.50'), ('ann', 'bob', '3.25'), ('bob', 'cay', '4'), ('cay', 'ann', '1,000')]"
_MAP = "['S.#..', '.##.#', '....E', '##.##', '#..#.']"
_ROWS = (
    "[{'n': 'ann', 'age': 31, 'town': 'Bern'}, {'n': 'bob', 'age': 25, 'town': 'Bonn'}, "
    "{'n': 'cay', 'age': 40, 'town': 'Bern'}, {'n': 'dee', 'age': 30, 'town': 'Graz'}]"
)

CALLS: dict[str, tuple[str, ...]] = {
    "wordbook": (
        "text.words('A  b-C!d 9')",
        "text.words('')",
        "text.slug('Hello, World')",
        "text.slug('one two three four five')",
        "text.slug('exactly twenty chars')",
        "text.slug('a b', 1)",
        "text.wrap('one two three', 7)",
        "text.wrap('aa bb cc', 5)",
        "text.wrap('abcdef gh', 3)",
        f"index.build({_LINES})",
        "index.build(['b a b', 'b'])",
        f"index.lookup({_LINES}, 'old')",
        f"index.lookup({_LINES}, 'Tower old')",
        f"index.lookup({_LINES}, 'none')",
        f"index.lookup({_LINES}, '')",
        f"index.commonest({_LINES}, 2)",
        "index.commonest(['b a', 'c'], 5)",
    ),
    "ledger": (
        "money.cents('12.5')",
        "money.cents('-3')",
        "money.cents('1,200.05')",
        "money.cents('.07')",
        "money.cents('-0.019')",
        "money.shown(120005)",
        "money.shown(-7)",
        "money.shown(0)",
        "money.shown(-123456789)",
        "money.shares(100, 3)",
        "money.shares(9, 3)",
        "money.shares(1, 2)",
        f"accounts.balance({_ENTRIES}, 'ann')",
        f"accounts.balance({_ENTRIES}, 'bob')",
        "accounts.balance([('x', 'x', '5')], 'x')",
        f"accounts.overdrawn({_ENTRIES})",
        "accounts.overdrawn([('bank', 'a', '1'), ('a', 'b', '1')])",
        f"accounts.statement({_ENTRIES}, 'ann')",
        "accounts.statement([('a', 'b', '0'), ('b', 'c', '2')], 'b')",
    ),
    "planner": (
        "intervals.merged([(5, 6), (1, 3), (2, 4)])",
        "intervals.merged([(1, 9), (2, 3)])",
        "intervals.merged([(1, 2), (2, 4)])",
        "intervals.merged([])",
        "intervals.gaps([(2, 3), (5, 6)], 0, 8)",
        "intervals.gaps([(0, 3)], 0, 3)",
        "intervals.gaps([(1, 20)], 5, 10)",
        "intervals.gaps([(12, 20)], 5, 10)",
        "intervals.gaps([], 1, 2)",
        "intervals.overlap((1, 5), (3, 9))",
        "intervals.overlap((1, 2), (5, 6))",
        "schedule.minutes('9:05')",
        "schedule.clock(605)",
        "schedule.clock(59)",
        "schedule.first_free([('9:00', '10:00'), ('10:30', '12:00')], 30)",
        "schedule.first_free([('9:00', '10:00'), ('10:30', '12:00')], 31)",
        "schedule.first_free([('8:00', '17:00')], 1)",
        "schedule.first_free([], 480)",
        "schedule.clashes([('a', '9:00', '10:00'), ('b', '9:30', '11:00'), ('c', '10:00', '10:15')])",
        "schedule.clashes([('a', '9:00', '10:00'), ('b', '10:00', '11:00')])",
    ),
    "gridway": (
        "grid.size(['..', '...'])",
        "grid.size([])",
        "grid.free(['.#'], (0, 0))",
        "grid.free(['.#'], (0, 1))",
        "grid.free(['.#'], (-1, 0))",
        "grid.free(['.#'], (0, 2))",
        "grid.beside(['...', '.#.', '...'], (0, 1))",
        "grid.beside(['...', '...', '...'], (1, 1))",
        f"grid.find({_MAP}, 'E')",
        "grid.find(['ab'], 'x')",
        "paths.distances(['..', '#.'], (0, 0))",
        f"paths.steps({_MAP})",
        "paths.steps(['S#E'])",
        "paths.steps(['SE'])",
        f"paths.rooms({_MAP})",
        "paths.rooms(['##'])",
        "paths.rooms(['.#.', '###', '.#.'])",
        f"paths.farthest({_MAP})",
        "paths.farthest(['.S.'])",
    ),
    "tinyql": (
        "parse.value('12')",
        "parse.value('-3')",
        "parse.value('1a')",
        "parse.condition('age >= 30')",
        "parse.condition('a<b')",
        "parse.condition('x != 1')",
        "parse.conditions('a = 1 and b > 2 or c < 3')",
        "query.holds({'a': 1}, 'a', '=', 1)",
        "query.holds({'a': 1}, 'b', '!=', 1)",
        "query.holds({'a': 'x'}, 'a', '>', 1)",
        "query.holds({'a': 3}, 'a', '>=', 3)",
        "query.holds({'a': 3}, 'a', '<', 3)",
        f"query.select({_ROWS}, 'age >= 31')",
        f"query.select({_ROWS}, 'town = Bern and age < 40 or n = dee')",
        f"query.select({_ROWS}, order='-age', limit=2)",
        f"query.select({_ROWS}, order='n', limit=1)",
        f"query.grouped({_ROWS}, 'town')",
        f"query.grouped({_ROWS}, 'none')",
    ),
}
"""Calls by package; each is a test, and what it has to give comes from the package without a mistake."""
