"""The compiled backends: CPU everywhere, CUDA on Hopper. Both speak through the same pair of raw ops."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _native, contract
from .base import Options, Sequences, Spec

_NO_SEQUENCES = Sequences(None, None, None, None)  # type: ignore[arg-type]


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of lse and of everything accumulated: fp64 for fp64, fp32 for the rest."""
    return torch.float64 if dtype is torch.float64 else torch.float32


class NativeBackend:
    """Calls ``detattn_C::forward`` and ``detattn_C::backward``; the device of q picks the library."""

    def __init__(self, name: str, device_type: str, dtypes: tuple[torch.dtype, ...], missing: str | None) -> None:
        self.name = name
        self._device_type = device_type
        self._dtypes = dtypes
        self._missing = missing
        if missing is None:
            # The callables inside the OpOverloads: one Python frame less a call.
            self._forward = torch.ops.detattn_C.forward.default._op
            self._backward = torch.ops.detattn_C.backward.default._op

    def supports(self, spec: Spec) -> str | None:
        if self._missing is not None:
            return self._missing
        if spec.device_type != self._device_type:
            return f"serves {self._device_type} tensors, not {spec.device_type}"
        if spec.dtype not in self._dtypes:
            return f"has no {spec.dtype}; it has {', '.join(str(d) for d in self._dtypes)}"
        if not 1 <= spec.head_dim <= contract.MAX_HEAD_DIM:
            return f"serves head dims 1..{contract.MAX_HEAD_DIM}, not {spec.head_dim}"
        if spec.layout == "paged" and spec.backward:
            return "has no backward through a paged cache"
        return None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None,
        sinks: Tensor | None,
        seqs: Sequences | None,
        options: Options,
    ) -> tuple[Tensor, Tensor]:
        if sinks is not None:
            sinks = sinks.to(accumulator_dtype(q.dtype))
        result: tuple[Tensor, Tensor] = self._forward(
            q, k, v, key_padding_mask, sinks, *(seqs or _NO_SEQUENCES), *options
        )
        return result

    def backward(
        self,
        dout: Tensor | None,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        key_padding_mask: Tensor | None,
        sinks: Tensor | None,
        seqs: Sequences | None,
        options: Options,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        sinks_acc = None if sinks is None else sinks.to(accumulator_dtype(q.dtype))
        cu_q, cu_k, used, _ = _NO_SEQUENCES if seqs is None else seqs
        dq, dk, dv, dsinks = self._backward(
            dout, dlse, q, k, v, out, lse, key_padding_mask, sinks_acc, cu_q, cu_k, used, *options
        )
        return dq, dk, dv, dsinks if sinks is None else dsinks.to(sinks.dtype)


class CudaBackend(NativeBackend):
    """The Hopper kernels: compute capability 9.0, bf16 and fp16."""

    def __init__(self) -> None:
        super().__init__("cuda", "cuda", (torch.bfloat16, torch.float16), _native.CUDA_MISSING)

    def supports(self, spec: Spec) -> str | None:
        reason = super().supports(spec)
        if reason is not None:
            return reason
        if spec.arch != (9, 0):
            return f"needs compute capability 9.0 (Hopper), this device has {spec.arch}"
        if spec.head_dim % 8:
            return f"serves head dims that are multiples of 8, not {spec.head_dim}"
        return None


class CpuBackend(NativeBackend):
    """The C++ kernels: every dtype, every head dim up to 256, any CPU."""

    def __init__(self) -> None:
        dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        super().__init__("cpu", "cpu", dtypes, _native.CPU_MISSING)
