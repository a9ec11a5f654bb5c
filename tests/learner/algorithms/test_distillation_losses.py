import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from learner.algorithms import ratios
from learner.algorithms.preset import LossTokens
from learner.algorithms.presets.distill import DistillConfig
from tests.learner.algorithms.differences import gradient, logs

Divergence = Callable[[Tensor, Tensor, bool], Tensor]


def forward(student: Tensor, teacher: Tensor, tail: bool) -> Tensor:
    return ratios.forward_kl(student_logprobs=student, teacher_logprobs=teacher, tail=tail)


def reverse(student: Tensor, teacher: Tensor, tail: bool) -> Tensor:
    return ratios.reverse_kl(student_logprobs=student, teacher_logprobs=teacher, tail=tail)


def jensen_shannon(student: Tensor, teacher: Tensor, tail: bool, beta: float = 0.5) -> Tensor:
    return ratios.jensen_shannon(student_logprobs=student, teacher_logprobs=teacher, beta=beta, tail=tail)


def skewed_forward(student: Tensor, teacher: Tensor, tail: bool, skew: float = 0.1) -> Tensor:
    return ratios.skewed_forward_kl(student_logprobs=student, teacher_logprobs=teacher, skew=skew, tail=tail)


def skewed_reverse(student: Tensor, teacher: Tensor, tail: bool, skew: float = 0.1) -> Tensor:
    return ratios.skewed_reverse_kl(student_logprobs=student, teacher_logprobs=teacher, skew=skew, tail=tail)


def adaptive(student: Tensor, teacher: Tensor, tail: bool, head_mass: float = 0.5) -> Tensor:
    return ratios.adaptive_kl(student_logprobs=student, teacher_logprobs=teacher, head_mass=head_mass, tail=tail)


# Merging outcomes can only lower these, and all of their gradient is followed.
FAMILY: dict[str, Divergence] = {
    "forward": forward,
    "reverse": reverse,
    "jensen_shannon": jensen_shannon,
    "jensen_shannon 0.1": partial(jensen_shannon, beta=0.1),
    "skewed_forward": skewed_forward,
    "skewed_forward 0.9": partial(skewed_forward, skew=0.9),
    "skewed_reverse": skewed_reverse,
    "skewed_reverse 0.9": partial(skewed_reverse, skew=0.9),
}
DIVERGENCES: dict[str, Divergence] = {**FAMILY, "adaptive": adaptive, "adaptive 0.9": partial(adaptive, head_mass=0.9)}
every_divergence = pytest.mark.parametrize("name", DIVERGENCES)
of_the_family = pytest.mark.parametrize("name", FAMILY)


def random_logits(seed: int, positions: int = 6, vocabulary: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(positions, vocabulary, generator=generator, dtype=torch.float64)


def distributions(seed: int) -> tuple[Tensor, Tensor]:
    """Logprobs of a student and a teacher over a vocabulary of 7, the teacher's most likely tokens first."""
    teacher = random_logits(seed).log_softmax(-1)
    order = teacher.argsort(dim=-1, descending=True)
    return random_logits(seed + 1000).log_softmax(-1).gather(-1, order), teacher.gather(-1, order)


def test_the_two_directions_of_the_divergence_weigh_by_teacher_and_by_student() -> None:
    teacher, student = logs(0.75, 0.25)[None], logs(0.5, 0.5)[None]
    # Ratios teacher/student 1.5 and 0.5.
    assert forward(student, teacher, False).tolist() == pytest.approx([0.75 * math.log(1.5) + 0.25 * math.log(0.5)])
    assert reverse(student, teacher, False).tolist() == pytest.approx([-0.5 * math.log(1.5) - 0.5 * math.log(0.5)])


def test_the_jensen_shannon_divergence_is_taken_to_the_mixture() -> None:
    teacher, student = logs(0.75, 0.25)[None], logs(0.5, 0.5)[None]
    # beta = 0.2: mixture 0.2 x 0.75 + 0.8 x 0.5 = 0.55, and 0.45.
    to_teacher = 0.75 * math.log(0.75 / 0.55) + 0.25 * math.log(0.25 / 0.45)
    to_student = 0.5 * math.log(0.5 / 0.55) + 0.5 * math.log(0.5 / 0.45)
    divergence = jensen_shannon(student, teacher, False, beta=0.2)
    assert divergence.tolist() == pytest.approx([0.2 * to_teacher + 0.8 * to_student])


def test_the_tail_is_one_more_outcome_with_the_mass_that_the_candidates_leave() -> None:
    # Teacher 0.5, 0.3 and a tail of 0.2; student 0.25, 0.15 and a tail of 0.6: ratios 2, 2 and 1/3.
    teacher, student = logs(0.5, 0.3)[None], logs(0.25, 0.15)[None]
    expected = 0.8 * math.log(2) - 0.2 * math.log(3)
    assert forward(student, teacher, True).tolist() == pytest.approx([expected])
    assert forward(student, teacher, False).tolist() == pytest.approx([0.8 * math.log(2)])
    assert reverse(student, teacher, True).tolist() == pytest.approx([-0.4 * math.log(2) + 0.6 * math.log(3)])
    # Without the tail a student that gives the candidates less than the teacher does looks better than the teacher.
    assert float(reverse(student, teacher, False)) < 0


@of_the_family
@pytest.mark.parametrize("seed", range(10))
def test_with_the_tail_the_divergence_grows_with_the_candidates_up_to_the_full_one(name: str, seed: int) -> None:
    student, teacher = distributions(seed)
    divergence = DIVERGENCES[name]
    full = divergence(student, teacher, False)
    # The bound on the candidates' mass makes the tail of a full vocabulary 1e-6 instead of 0 on both sides.
    lumped = [divergence(student[:, :c], teacher[:, :c], True) for c in range(1, 8)]
    for smaller, larger in zip(lumped, [*lumped[1:], full], strict=True):
        assert (smaller >= -1e-5).all()
        assert (smaller <= larger + 1e-5).all()
    torch.testing.assert_close(lumped[-1], full, atol=1e-5, rtol=0)


@every_divergence
@pytest.mark.parametrize("tail", [False, True])
def test_a_student_that_matches_its_teacher_has_no_divergence_and_no_gradient(name: str, tail: bool) -> None:
    logits = random_logits(3)
    teacher = logits.log_softmax(-1)
    candidates = slice(0, 3 if tail else 7)

    def total(flat: Tensor) -> Tensor:
        student = flat.view_as(logits).log_softmax(-1)
        return DIVERGENCES[name](student[:, candidates], teacher[:, candidates], tail).sum()

    assert float(total(logits.flatten())) == pytest.approx(0, abs=1e-12)
    assert gradient(total, logits.flatten()).abs().max() < 1e-12


def test_the_gradient_of_the_forward_divergence_by_the_logits_is_student_minus_teacher() -> None:
    logits, teacher = random_logits(5), random_logits(6).log_softmax(-1)

    def total(flat: Tensor) -> Tensor:
        return forward(flat.view_as(logits).log_softmax(-1), teacher, False).sum()

    expected = logits.softmax(-1) - teacher.exp()
    torch.testing.assert_close(gradient(total, logits.flatten()), expected.flatten())


@of_the_family
@pytest.mark.parametrize("tail", [False, True])
def test_a_divergence_has_the_gradient_of_finite_differences(name: str, tail: bool) -> None:
    logits, teacher = random_logits(7).requires_grad_(), random_logits(8).log_softmax(-1)
    candidates = slice(0, 3 if tail else 7)
    assert torch.autograd.gradcheck(
        lambda leaf: DIVERGENCES[name](leaf.log_softmax(-1)[:, candidates], teacher[:, candidates], tail), (logits,)
    )


def test_the_jensen_shannon_divergence_tends_to_both_directions_at_its_ends() -> None:
    student, teacher = distributions(0)
    low, high = (
        jensen_shannon(student, teacher, False, beta=1e-6),
        jensen_shannon(student, teacher, False, beta=1 - 1e-6),
    )
    torch.testing.assert_close(low / 1e-6, forward(student, teacher, False), rtol=1e-3, atol=0)
    torch.testing.assert_close(high / 1e-6, reverse(student, teacher, False), rtol=1e-3, atol=0)


def test_the_jensen_shannon_divergence_of_disjoint_distributions_is_the_entropy_of_its_weights() -> None:
    student, teacher = logs(1e-30, 1)[None], logs(1, 1e-30)[None]
    entropy = -0.3 * math.log(0.3) - 0.7 * math.log(0.7)
    assert jensen_shannon(student, teacher, False, beta=0.3).tolist() == pytest.approx([entropy])


def test_a_student_learns_what_it_calls_nearly_impossible() -> None:
    # exp(-200) is 0 in float32; the gradient of forward KL is still the teacher's probability.
    student, teacher = torch.tensor([-200.0, 0.0]), torch.tensor([[0.5, 0.5]]).log()
    slopes = gradient(lambda leaf: forward(leaf[None], teacher, False).sum(), student)
    assert slopes.tolist() == pytest.approx([-0.5, -0.5])


@every_divergence
@pytest.mark.parametrize("tail", [False, True])
def test_divergences_and_gradients_stay_finite_for_impossible_and_certain_tokens(name: str, tail: bool) -> None:
    wild = torch.tensor(
        [
            [0.0, -math.inf, -math.inf],
            [-math.inf, 0.0, -math.inf],
            [-1e-8, -30.0, -200.0],
            [-1.0986, -1.0986, -1.0986],
            [-math.inf, -math.inf, -math.inf],
            [-1e5, -1e5, 0.0],
        ]
    )
    students, teachers = wild.repeat(6, 1), wild.repeat_interleave(6, dim=0)
    divergence = DIVERGENCES[name]
    assert torch.isfinite(divergence(students, teachers, tail)).all()
    slopes = gradient(lambda leaf: divergence(leaf.view_as(teachers), teachers, tail).sum(), students.flatten())
    assert torch.isfinite(slopes).all()


@every_divergence
def test_each_position_stands_for_itself_so_that_no_split_changes_the_sum(name: str) -> None:
    student, teacher = distributions(9)
    whole = DIVERGENCES[name](student, teacher, True)
    parts = [DIVERGENCES[name](student[part], teacher[part], True) for part in (slice(0, 1), slice(1, 6))]
    torch.testing.assert_close(whole, torch.cat(parts))
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(whole, DIVERGENCES[name](student[:, order], teacher[:, order], True))


@every_divergence
def test_the_teacher_gets_no_gradient(name: str) -> None:
    student, teacher = distributions(2)
    leaf = teacher.clone().requires_grad_()
    assert not DIVERGENCES[name](student, leaf, True).requires_grad


# A teacher and a student over three tokens, of which the likeliest stand in the middle and at the end.
TEACHER, STUDENT = (0.3, 0.6, 0.1), (0.2, 0.3, 0.5)


def three_tokens() -> tuple[Tensor, Tensor]:
    return logs(*STUDENT)[None], logs(*TEACHER)[None]


def test_the_skewed_forward_divergence_is_taken_to_a_mixture_with_a_little_of_the_teacher() -> None:
    student, teacher = three_tokens()
    # skew = 0.2: mixture 0.2 x 0.3 + 0.8 x 0.2 = 0.22; 0.12 + 0.24 = 0.36; 0.02 + 0.4 = 0.42.
    expected = 0.3 * math.log(0.3 / 0.22) + 0.6 * math.log(0.6 / 0.36) + 0.1 * math.log(0.1 / 0.42)
    assert skewed_forward(student, teacher, False, skew=0.2).tolist() == pytest.approx([expected])
    assert expected == pytest.approx(0.2560333)


def test_the_skewed_reverse_divergence_is_taken_to_a_mixture_with_a_little_of_the_student() -> None:
    student, teacher = three_tokens()
    # skew = 0.2: mixture 0.2 x 0.2 + 0.8 x 0.3 = 0.28; 0.06 + 0.48 = 0.54; 0.1 + 0.08 = 0.18.
    expected = 0.2 * math.log(0.2 / 0.28) + 0.3 * math.log(0.3 / 0.54) + 0.5 * math.log(0.5 / 0.18)
    assert skewed_reverse(student, teacher, False, skew=0.2).tolist() == pytest.approx([expected])
    assert expected == pytest.approx(0.2671952)


# Gaps are 0.1, 0.3 and 0.4, 0.8 in all. The teacher's likeliest token is always of the head, though its mass of 0.6 is
# above 0.5; the next makes it 0.9. Shares are 0.3 / 0.8 and 0.4 / 0.8.
@pytest.mark.parametrize(("head_mass", "share"), [(0.1, 0.375), (0.5, 0.375), (0.8, 0.375), (0.95, 0.5)])
def test_the_adaptive_divergence_weighs_the_forward_one_by_the_gap_in_the_teachers_head(
    head_mass: float, share: float
) -> None:
    student, teacher = three_tokens()
    to_student = 0.3 * math.log(0.3 / 0.2) + 0.6 * math.log(0.6 / 0.3) + 0.1 * math.log(0.1 / 0.5)
    to_teacher = 0.2 * math.log(0.2 / 0.3) + 0.3 * math.log(0.3 / 0.6) + 0.5 * math.log(0.5 / 0.1)
    found = adaptive(student, teacher, False, head_mass=head_mass)
    assert found.tolist() == pytest.approx([share * to_student + (1 - share) * to_teacher])


def test_the_bucket_of_the_tail_is_never_of_the_teachers_head() -> None:
    # Teacher 0.25, 0.15 and a tail of 0.6; student 0.5, 0.2 and a tail of 0.3: gaps of 0.25, 0.05 and 0.3. Both
    # candidates, of mass 0.4, are the head.
    student, teacher = logs(0.5, 0.2)[None], logs(0.25, 0.15)[None]
    halves = 0.5 * forward(student, teacher, True) + 0.5 * reverse(student, teacher, True)
    assert adaptive(student, teacher, True).tolist() == pytest.approx(halves.tolist())


@pytest.mark.parametrize(("skewed", "plain"), [(skewed_forward, forward), (skewed_reverse, reverse)])
def test_without_a_skew_a_skewed_divergence_is_the_plain_one_and_with_all_of_it_nothing_is_left(
    skewed: Callable[..., Tensor], plain: Divergence
) -> None:
    student, teacher = distributions(4)

    def without(flat: Tensor) -> Tensor:
        return skewed(flat.view_as(teacher), teacher, True, skew=0.0).sum()

    def itself(flat: Tensor) -> Tensor:
        return plain(flat.view_as(teacher), teacher, True).sum()

    torch.testing.assert_close(skewed(student, teacher, True, skew=0.0), plain(student, teacher, True))
    torch.testing.assert_close(gradient(without, student.flatten()), gradient(itself, student.flatten()))
    assert skewed(student, teacher, True, skew=1 - 1e-9).abs().max() < 1e-8


def test_the_adaptive_divergence_is_the_forward_one_where_all_of_the_gap_is_in_the_head_and_else_the_reverse_one() -> (
    None
):
    # The gap is at the two likeliest tokens alone, and then at the two least likely ones alone.
    teacher = logs(0.4, 0.3, 0.2, 0.1)[None]
    of_head, of_tail = logs(0.3, 0.4, 0.2, 0.1)[None], logs(0.4, 0.3, 0.1, 0.2)[None]
    by = partial(adaptive, teacher=teacher, tail=False, head_mass=0.75)
    torch.testing.assert_close(by(of_head), forward(of_head, teacher, False))
    torch.testing.assert_close(by(of_tail), reverse(of_tail, teacher, False))


@pytest.mark.parametrize("skew", [0.1, 0.5])
def test_the_skewed_divergences_of_disjoint_distributions_are_the_log_of_the_skew(skew: float) -> None:
    student, teacher = logs(1e-30, 1)[None], logs(1, 1e-30)[None]
    for skewed in (skewed_forward, skewed_reverse):
        assert skewed(student, teacher, False, skew=skew).tolist() == pytest.approx([-math.log(skew)])


def plain_skewed(first: Tensor, second: Tensor, skew: float) -> Tensor:
    """KL(first || skew first + (1 - skew) second) of probabilities [N, V], as the equation stands."""
    return (first * (first / (skew * first + (1 - skew) * second)).log()).sum(-1)


def plain_adaptive(teacher: Tensor, student: Tensor, head_mass: float) -> Tensor:
    """AKL of probabilities [N, V], the tokens of each position sorted and summed one by one."""
    found = []
    for p, q in zip(teacher, student, strict=True):
        gaps = (p - q).detach().abs().tolist()
        mass, of_head, of_all = 0.0, 0.0, 0.0
        for place, token in enumerate(p.argsort(descending=True).tolist()):
            mass += float(p[token])
            of_all += gaps[token]
            of_head += gaps[token] if place == 0 or mass <= head_mass else 0.0
        found.append(of_head / of_all * (p * (p / q).log()).sum() + (1 - of_head / of_all) * (q * (q / p).log()).sum())
    return torch.stack(found)


PLAIN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "skewed_forward": lambda student, teacher: plain_skewed(teacher, student, 0.1),
    "skewed_forward 0.9": lambda student, teacher: plain_skewed(teacher, student, 0.9),
    "skewed_reverse": lambda student, teacher: plain_skewed(student, teacher, 0.1),
    "skewed_reverse 0.9": lambda student, teacher: plain_skewed(student, teacher, 0.9),
    "adaptive": lambda student, teacher: plain_adaptive(teacher, student, 0.5),
    "adaptive 0.9": lambda student, teacher: plain_adaptive(teacher, student, 0.9),
}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("seed", range(5))
def test_values_and_gradients_are_those_of_the_equation_written_out(name: str, seed: int) -> None:
    logits, teacher = random_logits(seed), random_logits(seed + 100).log_softmax(-1)

    def ours(flat: Tensor) -> Tensor:
        return DIVERGENCES[name](flat.view_as(logits).log_softmax(-1), teacher, False).sum()

    def plain(flat: Tensor) -> Tensor:
        return PLAIN[name](flat.view_as(logits).softmax(-1), teacher.exp()).sum()

    at = logits.flatten()
    torch.testing.assert_close(ours(at), plain(at), rtol=0, atol=1e-9)
    torch.testing.assert_close(gradient(ours, at), gradient(plain, at), rtol=0, atol=1e-6)
    assert gradient(ours, at).abs().max() > 1e-3


@pytest.mark.parametrize("seed", range(10))
def test_the_adaptive_divergence_lies_between_its_two(seed: int) -> None:
    student, teacher = distributions(seed)
    for count in range(1, 8):
        two = [of(student[:, :count], teacher[:, :count], True) for of in (forward, reverse)]
        found = adaptive(student[:, :count], teacher[:, :count], True)
        assert (found >= torch.minimum(*two) - 1e-9).all()
        assert (found <= torch.maximum(*two) + 1e-9).all()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, forward),
        ({"divergence": "reverse_kl"}, reverse),
        ({"divergence": "jsd", "jsd_beta": 0.2}, partial(jensen_shannon, beta=0.2)),
        ({"divergence": "skewed_forward_kl"}, partial(skewed_forward, skew=0.1)),
        ({"divergence": "skewed_forward_kl", "skew": 0.3}, partial(skewed_forward, skew=0.3)),
        ({"divergence": "skewed_reverse_kl", "skew": 0.3}, partial(skewed_reverse, skew=0.3)),
        ({"divergence": "adaptive_kl"}, partial(adaptive, head_mass=0.5)),
        ({"divergence": "adaptive_kl", "head_mass": 0.8}, partial(adaptive, head_mass=0.8)),
    ],
)
def test_distill_minimizes_the_divergence_that_its_settings_name(
    settings: dict[str, object], expected: Divergence
) -> None:
    student, teacher = (logprobs[:, :5] for logprobs in distributions(11))
    count = len(student)
    zeros, places = torch.zeros(count, dtype=torch.float64), torch.arange(count)
    weights = torch.linspace(0.0, 1.0, count, dtype=torch.float64)
    tokens = LossTokens(
        policy_logprobs=student[:, 0],
        proximal_logprobs=zeros,
        behavior_logprobs=zeros,
        advantages=zeros,
        lags=torch.zeros_like(places),
        weights=weights,
        sequences=places,
        sequence_weights=weights,
        labels=torch.ones(count, dtype=torch.bool),
        pairs=torch.zeros(0, 2, dtype=torch.int64),
        margins=zeros[:0],
        candidate_logprobs=student,
        teacher_logprobs=teacher,
    )
    loss = DistillConfig.model_validate(settings).preset().loss(tokens)
    gaps = expected(student, teacher, True)
    torch.testing.assert_close(loss.total, (weights * gaps).sum())
    torch.testing.assert_close(loss.means["teacher_divergence"].total, gaps.sum())
