import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from learner.algorithms import ratios
from tests.learner.algorithms.differences import gradient, logs

Divergence = Callable[[Tensor, Tensor, bool], Tensor]


def forward(student: Tensor, teacher: Tensor, tail: bool) -> Tensor:
    return ratios.forward_kl(student_logprobs=student, teacher_logprobs=teacher, tail=tail)


def reverse(student: Tensor, teacher: Tensor, tail: bool) -> Tensor:
    return ratios.reverse_kl(student_logprobs=student, teacher_logprobs=teacher, tail=tail)


def jensen_shannon(student: Tensor, teacher: Tensor, tail: bool, beta: float = 0.5) -> Tensor:
    return ratios.jensen_shannon(student_logprobs=student, teacher_logprobs=teacher, beta=beta, tail=tail)


DIVERGENCES: dict[str, Divergence] = {
    "forward": forward,
    "reverse": reverse,
    "jensen_shannon": jensen_shannon,
    "jensen_shannon 0.1": partial(jensen_shannon, beta=0.1),
}
every_divergence = pytest.mark.parametrize("name", DIVERGENCES)


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


@every_divergence
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


@every_divergence
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
