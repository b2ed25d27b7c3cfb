"""Bytes of two tensors compared: how many elements differ, by how much, and where first."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INT64_MAX = 2**63 - 1


@dataclass(frozen=True)
class Difference:
    """What two tensors of one shape and dtype differ in.

    ``max_ulp`` counts representable numbers between the two, over the pairs without a NaN; it is None where every
    differing pair has one. Zeros of different sign differ in bytes and are 0 ulp apart.
    """

    count: int
    of: int
    max_ulp: int | None
    index: tuple[int, ...]
    expected: float
    got: float

    def __str__(self) -> str:
        ulp = "NaN" if self.max_ulp is None else f"max {self.max_ulp} ulp"
        where = ", ".join(map(str, self.index))
        return f"{self.count} of {self.of} differ, {ulp}, first [{where}] {self.expected!r} -> {self.got!r}"


def bytes_of(t: Tensor) -> Tensor:
    """The elements of ``t`` as integers of the same width, bit for bit."""
    return t.detach().contiguous().view(_INTEGER[t.element_size()])


def _ordered(t: Tensor) -> Tensor:
    """Integers in the order of the numbers: neighbouring floats are neighbouring integers, both zeros are 0."""
    width = 8 * t.element_size()
    raw = bytes_of(t).to(torch.int64)
    magnitude = raw & (2 ** (width - 1) - 1)
    return torch.where(raw < 0, -magnitude, magnitude)


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """Representable numbers between each pair, int64, saturated at 2**63 - 1; -1 where either is NaN.

    Example:
        >>> import torch
        >>> ulp_distance(torch.tensor([1.0, 0.0]), torch.tensor([1.0 + 2**-23, -0.0])).tolist()
        [1, 0]
    """
    x, y = _ordered(a), _ordered(b)
    distance = torch.maximum(x, y) - torch.minimum(x, y)
    distance = torch.where(distance < 0, _INT64_MAX, distance)
    return torch.where(a.isnan() | b.isnan(), -1, distance)


def compare(expected: Tensor, got: Tensor) -> Difference | None:
    """How the bytes differ, None where they are equal. NaNs are compared as the bytes they are.

    Args:
        expected, got: floating-point tensors of one shape, dtype and device.

    Raises:
        ValueError: shapes, dtypes or devices differ, so there are no bytes to compare one by one.

    Example:
        >>> import torch
        >>> print(compare(torch.zeros(2, 2), torch.tensor([[0.0, 0.0], [0.0, 1.5]])))
        1 of 4 differ, max 1069547520 ulp, first [1, 1] 0.0 -> 1.5
    """
    if expected.shape != got.shape or expected.dtype != got.dtype or expected.device != got.device:
        raise ValueError(
            f"cannot compare {tuple(expected.shape)} {expected.dtype} on {expected.device} "
            f"with {tuple(got.shape)} {got.dtype} on {got.device}"
        )
    differs = bytes_of(expected) != bytes_of(got)
    count = int(differs.sum())
    if count == 0:
        return None
    index = tuple(int(i) for i in differs.nonzero()[0])
    furthest = int(ulp_distance(expected[differs], got[differs]).max())
    return Difference(
        count,
        expected.numel(),
        None if furthest < 0 else furthest,
        index,
        float(expected[index]),
        float(got[index]),
    )
