"""Sums over pieces of work by which their cost can be fitted to what they held, without a line for each of them."""

from pydantic import model_validator

from protocol.model import WireModel


class CostSums(WireModel):
    """Normal equations of a fit. Of each piece of work there are k counts of what it held, and the CPU seconds that it
    took: `products` are the sums of count times count, [k][k], and `seconds` those of count times seconds, [k].
    """

    products: tuple[tuple[float, ...], ...]
    seconds: tuple[float, ...]

    @model_validator(mode="after")
    def _check_square(self) -> "CostSums":
        if any(len(row) != len(self.seconds) for row in (*self.products, self.products)):
            raise ValueError(f"expected products of {len(self.seconds)} counts with each other, as there are seconds")
        return self

    def __add__(self, other: "CostSums") -> "CostSums":
        return self._with(other, 1.0)

    def __sub__(self, other: "CostSums") -> "CostSums":
        return self._with(other, -1.0)

    def _with(self, other: "CostSums", sign: float) -> "CostSums":
        return CostSums(
            products=tuple(
                tuple(a + sign * b for a, b in zip(*rows, strict=True))
                for rows in zip(self.products, other.products, strict=True)
            ),
            seconds=tuple(a + sign * b for a, b in zip(self.seconds, other.seconds, strict=True)),
        )
