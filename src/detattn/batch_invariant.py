"""Makes the linear layers of a model row-invariant as well, so that a whole model can be compared bit by bit.

Inside ``with linear_rows():`` every ``F.linear`` (``nn.Linear`` calls it) and every product with a matrix runs one row
at a time: each row is a product of one and the same shape, whoever shares the batch. It is a tool for proofs and tests,
not for serving: the cost is one call a row. Reductions along the last dimension (norms, softmax) are PyTorch's own; no
difference between rows was seen in them on CPUs, none is promised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["linear_rows"]

_PRODUCTS = (torch.matmul, torch.mm, Tensor.matmul, Tensor.__matmul__)


def _by_row(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = input.reshape(-1, input.shape[-1])
    if rows.shape[0] == 0:
        return F.linear(input, weight, bias)
    # A copy of each row starts at an aligned address: kernels may choose their path by it.
    out = torch.cat([F.linear(row[None].clone(), weight, bias) for row in rows.unbind()])
    return out.reshape(*input.shape[:-1], weight.shape[0])


class linear_rows(TorchFunctionMode):  # noqa: N801
    """A context manager: linear layers compute each row alone.

    Example:
        >>> import torch
        >>> layer, x = torch.nn.Linear(300, 70), torch.randn(37, 300)
        >>> with linear_rows():
        ...     together, alone = layer(x), layer(x[5:6])
        >>> torch.equal(together[5:6], alone)
        True
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            return _by_row(*args, **(kwargs or {}))
        if func in _PRODUCTS and not kwargs and args[0].dim() > 1 and args[1].dim() == 2:
            return _by_row(args[0], args[1].t())
        return func(*args, **(kwargs or {}))
