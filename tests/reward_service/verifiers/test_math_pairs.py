r"""The `math` verifier against labels made by hand.

The labels are mathematical judgements, with these conventions where mathematics does not decide: a unit that the right
answer lacks may be added, and one that it has may be left out, but not be another one; a percentage is also its number
where that is above 1; a bare list may stand for a tuple in the same order; a decimal stands for 1/3 or pi if it is
within a millionth of it; `\log` without a base may be of base 10 or e; an equation gives the value of its name.
"""

from collections import Counter

from benchmarks.math_agreement import judge, read_pairs


def test_the_set_holds_enough_pairs_of_every_form_and_of_either_label() -> None:
    pairs = read_pairs()
    labels = Counter(pair.equal for pair in pairs)
    assert len(pairs) >= 300
    assert min(labels.values()) >= len(pairs) / 3
    assert len({(pair.completion, pair.gold, str(pair.arguments)) for pair in pairs}) == len(pairs)


def test_math_agrees_with_the_labels() -> None:
    judged = [judge(pair) for pair in read_pairs()]
    disagreements = [str(one) for one in judged if not one.agrees]
    print(*disagreements, sep="\n")
    assert len(disagreements) <= 0.02 * len(judged), disagreements
