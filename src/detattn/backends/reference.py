"""The contract in readable PyTorch: the block order of the compiled kernels, on any device, slowly.

Sums are explicit chains or fixed trees over elementwise products, never a matmul: PyTorch's matmul picks its order by
shape, so its rows move with their neighbours. Section numbers are those of ``docs/numerics.md``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import contract
from .base import Options, Sequences, Spec

_INF = math.inf
_LOG2E = math.log2(math.e)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class ReferenceBackend:
    """Serves every device and dtype, when asked for by name."""

    name = "reference"

    def supports(self, spec: Spec) -> str | None:
        if spec.dtype not in _DTYPES:
            return f"has no {spec.dtype}; it has {', '.join(str(d) for d in _DTYPES)}"
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
        out = q.new_zeros(q.shape)
        lse_shape = q.shape[:3] if seqs is None else (q.shape[1], q.shape[0])
        lse = q.new_full(lse_shape, -_INF, dtype=_accumulator(q.dtype))
        for s in _sequences(q, k, v, key_padding_mask, seqs):
            s.of(out)[...], s.of_lse(lse)[...] = _forward(s, sinks, options, q.dtype)
        return out, lse

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
        dq, dk, dv = q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
        dsinks = lse.new_zeros(0 if sinks is None else q.shape[1])
        for s in _sequences(q, k, v, key_padding_mask, seqs):
            upstream = torch.zeros_like(s.q) if dout is None else s.of(dout).to(lse.dtype)
            shift = _tree_sum(upstream * s.of(out).to(lse.dtype))
            if dlse is not None:
                shift = shift - s.of_lse(dlse)
            # A row whose upstream gradients are zero adds nothing, whatever it holds: padded queries may be NaN.
            idle = (upstream == 0).all(-1)
            if dlse is not None:
                idle = idle & (s.of_lse(dlse) == 0)
            shift = shift.masked_fill(idle, 0.0)
            row_lse = s.of_lse(lse).masked_fill(idle, 0.0)
            s = s._replace(q=s.q.masked_fill(idle[..., None], 0.0))
            s.of(dq)[...], s.of_keys(dk)[...], s.of_keys(dv)[...] = _backward(
                s, upstream, shift, row_lse, options, q.dtype
            )
            if sinks is not None:
                dsinks += _sink_gradient(sinks.to(lse.dtype), row_lse, shift)
        return dq, dk, dv, dsinks if sinks is None else dsinks.to(sinks.dtype)


def forward_fp32(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The golden path: q, k and v upcast to fp32, autocast off, no matmul (so no TF32), ``out`` and ``lse`` in fp32.

    Shapes and options as in ``detattn.attention``. The dtype of the inputs changes nothing but their values.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 5, 8, dtype=torch.bfloat16) for _ in range(3))
        >>> forward_fp32(q, k, v)[0].dtype
        torch.float32
    """
    resolved = Options(
        causal, 1 / math.sqrt(q.shape[-1]) if scale is None else scale, window_left, window_right, softcap
    )
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        return ReferenceBackend().forward(q.float(), k.float(), v.float(), key_padding_mask, sinks, None, resolved)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


class _Sequence(NamedTuple):
    """One sequence alone, in the accumulator dtype: q ``[Hq, Sq, D]``, k and v ``[Hkv, Skv, D]``, keep ``[Skv]`` bool.

    ``entry`` is its place in a dense batch, or ``rows`` and ``keys`` its slices of the packed tensors.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    keep: Tensor
    entry: int | None
    rows: slice
    keys: slice

    def of(self, t: Tensor) -> Tensor:
        """Its rows of a tensor in the layout of q, as ``[Hq, Sq, D]``."""
        return t[self.entry] if self.entry is not None else t[self.rows].transpose(0, 1)

    def of_keys(self, t: Tensor) -> Tensor:
        """Its rows of a tensor in the layout of k, as ``[Hkv, Skv, D]``."""
        return t[self.entry] if self.entry is not None else t[self.keys].transpose(0, 1)

    def of_lse(self, t: Tensor) -> Tensor:
        """Its rows of a tensor in the layout of lse, as ``[Hq, Sq]``."""
        return t[self.entry] if self.entry is not None else t[:, self.rows]


def _sequences(
    q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, seqs: Sequences | None
) -> Iterator[_Sequence]:
    dtype = _accumulator(q.dtype)
    if seqs is None:
        for b in range(q.shape[0]):
            keep = k.new_ones(k.shape[2], dtype=torch.bool) if key_padding_mask is None else key_padding_mask[b]
            yield _Sequence(q[b].to(dtype), k[b].to(dtype), v[b].to(dtype), keep, b, slice(0), slice(0))
        return
    cu_q = seqs.cu_seqlens_q.tolist()
    cu_k = None if seqs.cu_seqlens_k is None else seqs.cu_seqlens_k.tolist()
    used = None if seqs.seqused_k is None else seqs.seqused_k.tolist()
    for b in range(len(cu_q) - 1):
        rows = slice(cu_q[b], cu_q[b + 1])
        if seqs.block_table is not None:
            assert used is not None
            keys = slice(0)
            k_rows, v_rows = (_pages(t, seqs.block_table[b], used[b]) for t in (k, v))
        else:
            assert cu_k is not None
            keys = slice(cu_k[b], cu_k[b + 1] if used is None else cu_k[b] + used[b])
            k_rows, v_rows = k[keys], v[keys]
        keep = k.new_ones(k_rows.shape[0], dtype=torch.bool)
        q_seq, k_seq, v_seq = (t.transpose(0, 1).to(dtype) for t in (q[rows], k_rows, v_rows))
        yield _Sequence(q_seq, k_seq, v_seq, keep, None, rows, keys)


def _pages(cache: Tensor, table: Tensor, length: int) -> Tensor:
    page_size = cache.shape[1]
    used = table[: -(-length // page_size)].long()
    return cache[used].flatten(0, 1)[:length]


def _exp2(x: Tensor) -> Tensor:
    # torch.exp2 rounds the tail of a tensor unlike its vectorised part on the CPU; torch.exp does not.
    return torch.exp(x * math.log(2))


def _tree_sum(x: Tensor, width: int | None = None) -> Tensor:
    """The sum over the last dimension as a halving tree over ``width`` terms, zeros behind the given ones."""
    width = 1 << max((width or x.shape[-1]) - 1, 0).bit_length()
    x = torch.nn.functional.pad(x, (0, width - x.shape[-1]))
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x[..., 0]


def _dots(a: Tensor, b: Tensor) -> Tensor:
    """``a [H, n, D]`` with ``b [H, m, D]``: every dot product ``[H, n, m]``, a chain over d ascending."""
    total = a.new_zeros(a.shape[0], a.shape[1], b.shape[1])
    for d in range(a.shape[2]):
        total = total + a[:, :, d, None] * b[:, None, :, d]
    return total


def _accumulate(total: Tensor, weights: Tensor, seen: Tensor, values: Tensor) -> Tensor:
    """``total [H, n, D]`` plus ``weights [H, n, m]`` times ``values [H, m, D]``, a chain over m ascending.

    Terms that are not ``seen [n, m]`` are left out, not multiplied by zero: a masked value may be NaN.
    """
    for j in range(weights.shape[2]):
        step = total + weights[:, :, j, None] * values[:, j, None, :]
        total = torch.where(seen[:, j, None], step, total)
    return total


class _Block(NamedTuple):
    """A block of keys and the rows that see some of it; ``seen [rows, keys]``."""

    chunk: int
    rows: slice
    keys: slice
    seen: Tensor


def _blocks(s: _Sequence, options: Options) -> Iterator[_Block]:
    """The blocks of a sequence in order, anchored at its first valid key. Blocks that nobody sees are left out."""
    valid = s.keep.nonzero()
    if valid.numel() == 0:
        return
    anchor, size = int(valid[0]), contract.block_keys(s.q.shape[2])
    aligned = torch.arange(s.q.shape[1], device=s.q.device)[:, None] + s.k.shape[1] - s.q.shape[1]
    for chunk, (begin, end) in enumerate(contract.chunks(int(valid[-1]) + 1 - anchor)):
        for first in range(anchor + begin, anchor + end, size):
            key = torch.arange(first, min(first + size, anchor + end), device=s.q.device)
            seen = s.keep[key].expand(s.q.shape[1], -1)
            right = 0 if options.causal else options.window_right
            if right >= 0:
                seen = seen & (key <= aligned + right)
            if options.window_left >= 0:
                seen = seen & (key >= aligned - options.window_left)
            rows = seen.any(1).nonzero()
            if rows.numel():
                of = slice(int(rows[0]), int(rows[-1]) + 1)
                yield _Block(chunk, of, slice(first, first + key.shape[0]), seen[of])


def _scores(q: Tensor, k: Tensor, options: Options) -> tuple[Tensor, Tensor | None]:
    """Scores, and with a softcap their tanh; what ``_unit`` still multiplies them by is the scale."""
    s = _dots(q, k)
    if options.softcap == 0.0:
        return s, None
    t = torch.tanh(s * (options.scale / options.softcap))
    return t * options.softcap, t


def _unit(options: Options) -> float:
    return options.scale if options.softcap == 0.0 else 1.0


def _forward(s: _Sequence, sinks: Tensor | None, options: Options, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    heads, rows, dim = s.q.shape
    group = heads // max(s.k.shape[0], 1)
    k, v = s.k.repeat_interleave(group, 0), s.v.repeat_interleave(group, 0)
    kappa = s.q.new_tensor(_unit(options) * _LOG2E)

    def fresh() -> tuple[Tensor, Tensor, Tensor]:
        return s.q.new_full((heads, rows), -_INF), s.q.new_zeros(heads, rows), s.q.new_zeros(heads, rows, dim)

    total, state, chunk = fresh(), fresh(), 0
    for block in _blocks(s, options):
        if block.chunk != chunk:
            total, state, chunk = _merge(total, state, kappa), fresh(), block.chunk
        m, l, o = (t[:, block.rows] for t in state)
        x, _ = _scores(s.q[:, block.rows], k[:, block.keys], options)
        x = torch.where(block.seen, x, -_INF)
        top = torch.maximum(m, x.amax(-1))
        moves = (m == -_INF) | ((top - m) * kappa > contract.LAZY_THRESHOLD)
        new = torch.where(moves, top, m)
        reference = torch.where(new == -_INF, 0.0, new)
        a = torch.where(moves, _exp2((m - reference) * kappa), 1.0)
        p = _exp2(x * kappa - (reference * kappa)[..., None])
        state[0][:, block.rows] = new
        state[1][:, block.rows] = l * a + _tree_sum(p, contract.block_keys(dim))
        state[2][:, block.rows] = _accumulate(o * a[..., None], p.to(dtype).to(p.dtype), block.seen, v[:, block.keys])
    m, l, o = _merge(total, state, kappa)
    return _finish(m * _unit(options), l, o, sinks, dtype)


def _merge(
    total: tuple[Tensor, Tensor, Tensor], chunk: tuple[Tensor, Tensor, Tensor], kappa: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Total and chunk, left to right; a row that saw nothing of the chunk keeps its bits."""
    m = torch.maximum(total[0], chunk[0])
    reference = torch.where(m == -_INF, 0.0, m)
    a, b = (_exp2((x - reference) * kappa) for x in (total[0], chunk[0]))
    nothing = chunk[1] == 0
    l = torch.where(nothing, total[1], total[1] * a + chunk[1] * b)
    o = torch.where(nothing[..., None], total[2], total[2] * a[..., None] + chunk[2] * b[..., None])
    return torch.where(nothing, total[0], m), l, o


def _finish(logit: Tensor, l: Tensor, o: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``out`` and ``lse`` from a row's totals; the sink is one more term of the sum."""
    sink = torch.full_like(logit, -_INF) if sinks is None else sinks.to(logit.dtype)[:, None].expand_as(logit)
    logit = torch.where(l == 0, -_INF, logit)
    m = torch.maximum(logit, sink)
    reference = torch.where(m == -_INF, 0.0, m)
    a = torch.exp(logit - reference)
    l = l * a + torch.exp(sink - reference)
    factor = torch.where(l == 0, 0.0, a * (1 / l))
    out = torch.where(factor[..., None] == 0, 0.0, o * factor[..., None]) + 0.0
    return out.to(dtype), reference + torch.log(l)


def _backward(
    s: _Sequence, dout: Tensor, shift: Tensor, lse: Tensor, options: Options, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    heads, heads_kv = s.q.shape[0], s.k.shape[0]
    group = heads // max(heads_kv, 1)
    k, v = s.k.repeat_interleave(group, 0), s.v.repeat_interleave(group, 0)
    unit = _unit(options)
    dq, dk, dv = torch.zeros_like(s.q), torch.zeros_like(s.k), torch.zeros_like(s.v)
    for _, rows, keys, seen in _blocks(s, options):
        x, tanh = _scores(s.q[:, rows], k[:, keys], options)
        p = _exp2(x * s.q.new_tensor(unit * _LOG2E) - (lse[:, rows] * _LOG2E)[..., None])
        ds = p * (_dots(dout[:, rows], v[:, keys]) - shift[:, rows, None])
        if tanh is not None:
            ds = ds * (1 - tanh * tanh)
        p, ds = (t.to(dtype).to(t.dtype) for t in (p, ds))
        dq[:, rows] = _accumulate(dq[:, rows], ds, seen, k[:, keys])
        for g in range(group):
            of = slice(g, None, group)
            dk[:, keys] = _accumulate(dk[:, keys], ds[of].transpose(1, 2), seen.T, s.q[of, rows])
            dv[:, keys] = _accumulate(dv[:, keys], p[of].transpose(1, 2), seen.T, dout[of, rows])
    scale = s.q.new_tensor(options.scale)
    return (dq * scale + 0.0).to(dtype), (dk * scale + 0.0).to(dtype), (dv + 0.0).to(dtype)


def _sink_gradient(sinks: Tensor, lse: Tensor, shift: Tensor) -> Tensor:
    """One sequence's part, its rows ascending: the sink's weight pulls down every other one."""
    terms = torch.where(sinks[:, None] == -_INF, 0.0, -torch.exp(sinks[:, None] - lse) * shift)
    total = torch.zeros_like(sinks)
    for i in range(terms.shape[1]):
        total = total + terms[:, i]
    return total
