"""Bad input gets an error that says what came, what is supported and what to do, before anything is launched."""

from __future__ import annotations

import math

import pytest
import torch
from common import offsets

import detattn
from detattn.backends import names, select


def qkv(device: str, dtype: torch.dtype = torch.bfloat16):
    return (torch.randn(2, h, 5, 16, device=device).to(dtype) for h in (4, 2, 2))


DENSE = {
    "rank": (lambda q, k, v: {"q": q[0]}, ValueError, ["(4, 5, 16)", "[B, Hq, Sq, D]", "attention_varlen"]),
    "dtypes": (lambda q, k, v: {"v": v.float()}, TypeError, ["torch.float32", "one dtype", "autocast"]),
    "integers": (
        lambda q, k, v: {"q": q.int(), "k": k.int(), "v": v.int()},
        TypeError,
        ["torch.int32", "torch.bfloat16", "Cast"],
    ),
    "complex": (
        lambda q, k, v: {"q": q.cfloat(), "k": k.cfloat(), "v": v.cfloat()},
        TypeError,
        ["torch.complex64", "torch.float32"],
    ),
    "heads": (lambda q, k, v: {"q": q[:, :3]}, ValueError, ["3 query heads and 2 key heads", "multiple", "transpose"]),
    "no key heads": (lambda q, k, v: {"k": k[:, :0], "v": v[:, :0]}, ValueError, ["4 query heads and 0 key heads"]),
    "batch": (lambda q, k, v: {"q": q[:1]}, ValueError, ["(1, 4, 5, 16)", "one batch size"]),
    "k and v": (lambda q, k, v: {"v": v[:, :, :3]}, ValueError, ["(2, 2, 3, 16)", "k and v of one shape"]),
    "head dims": (lambda q, k, v: {"q": q[..., :8]}, ValueError, ["(2, 4, 5, 8)", "one head dim"]),
    "wide head dim": (
        lambda q, k, v: dict(zip("qkv", (t.repeat(1, 1, 1, 17) for t in (q, k, v)), strict=True)),
        ValueError,
        ["head dim is 272", "1..256"],
    ),
    "no head dim": (
        lambda q, k, v: dict(zip("qkv", (t[..., :0] for t in (q, k, v)), strict=True)),
        ValueError,
        ["head dim is 0"],
    ),
    "integer mask": (
        lambda q, k, v: {"key_padding_mask": torch.ones(2, 5, device=q.device)},
        ValueError,
        ["torch.float32", "bool [B, Skv] = (2, 5)", "mask.bool()"],
    ),
    "mask shape": (
        lambda q, k, v: {"key_padding_mask": torch.ones(2, 6, dtype=torch.bool, device=q.device)},
        ValueError,
        ["(2, 6)", "(2, 5)"],
    ),
    "4-D mask": (
        lambda q, k, v: {"key_padding_mask": torch.ones(2, 1, 5, 5, dtype=torch.bool, device=q.device)},
        ValueError,
        ["(2, 1, 5, 5)", "additive masks"],
    ),
    "mask device": (
        lambda q, k, v: {"key_padding_mask": torch.ones(2, 5, dtype=torch.bool, device="meta")},
        ValueError,
        ["key_padding_mask is on meta", "one device"],
    ),
    "devices": (lambda q, k, v: {"k": k.to("meta")}, ValueError, ["meta", "one device"]),
    "sinks": (lambda q, k, v: {"sinks": torch.zeros(3, device=q.device)}, ValueError, ["(3,)", "[4]"]),
    "integer sinks": (lambda q, k, v: {"sinks": torch.zeros(4, device=q.device).int()}, ValueError, ["torch.int32"]),
    "scale 0": (lambda q, k, v: {"scale": 0.0}, ValueError, ["scale is 0.0", "above 0", "Fold"]),
    "scale < 0": (lambda q, k, v: {"scale": -1.0}, ValueError, ["scale is -1.0"]),
    "scale NaN": (lambda q, k, v: {"scale": math.nan}, ValueError, ["scale is nan"]),
    "scale inf": (lambda q, k, v: {"scale": math.inf}, ValueError, ["scale is inf"]),
    "scale tensor": (
        lambda q, k, v: {"scale": torch.tensor(0.5)},
        TypeError,
        ["scale came as a tensor", "float(scale)"],
    ),
    "scale of another kind": (lambda q, k, v: {"scale": "a"}, TypeError, ["scale came as 'a'", "a number"]),
    "fractional window": (lambda q, k, v: {"window_left": 2.5}, TypeError, ["window_left came as 2.5", "an int"]),
    "softcap < 0": (lambda q, k, v: {"softcap": -1.0}, ValueError, ["softcap is -1.0", "0 (none)"]),
    "softcap NaN": (lambda q, k, v: {"softcap": math.nan}, ValueError, ["softcap is nan"]),
    "window_left": (lambda q, k, v: {"window_left": -2}, ValueError, ["window_left is -2", "-1 (unbounded)"]),
    "window_right": (lambda q, k, v: {"window_right": -9}, ValueError, ["window_right is -9"]),
    "backend": (lambda q, k, v: {"backend": "fast"}, ValueError, ["no backend named 'fast'", "cuda, cpu, reference"]),
}


@pytest.mark.parametrize(("change", "kind", "parts"), DENSE.values(), ids=DENSE)
def test_dense(device: str, change, kind, parts) -> None:
    q, k, v = qkv(device)
    args = {"q": q, "k": k, "v": v} | change(q, k, v)
    for grad in (False, True):
        floating = args["q"].dtype.is_floating_point
        leaves = {n: t.detach().requires_grad_(grad and floating) if n in "qkv" else t for n, t in args.items()}
        with pytest.raises(kind) as caught:
            detattn.attention(leaves.pop("q"), leaves.pop("k"), leaves.pop("v"), **leaves)
        assert all(p in str(caught.value) for p in ["detattn: ", *parts]), str(caught.value)
    op_args = dict(args)
    if not isinstance(args.get("scale"), (torch.Tensor, str)) and args.get("window_left") != 2.5:
        with pytest.raises(kind) as caught:
            torch.ops.detattn.attention(**op_args)
        assert all(p in str(caught.value) for p in parts)


def test_lists_are_not_tensors(device: str) -> None:
    q, k, v = qkv(device)
    with pytest.raises(TypeError, match="q came as list"):
        detattn.attention(q.tolist(), k, v)
    args = varlen_args(device)
    with pytest.raises(TypeError, match="cu_seqlens_q came as list"):
        detattn.attention_varlen(**(args | {"cu_seqlens_q": [0, 4, 9]}))


def cu(device: str, *values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


VARLEN = {
    "rank": (
        lambda d, a: {"q": a["q"][None]},
        ValueError,
        ["(1, 9, 4, 16)", "without block_table", "detattn.attention"],
    ),
    "int64 offsets": (lambda d, a: {"cu_seqlens_q": a["cu_seqlens_q"].long()}, TypeError, ["torch.int64", ".int()"]),
    "offsets rank": (lambda d, a: {"cu_seqlens_q": a["cu_seqlens_q"][None]}, TypeError, ["(1, 3)", "1 dimension"]),
    "no offsets": (lambda d, a: {"cu_seqlens_q": a["cu_seqlens_q"][:0]}, ValueError, ["cu_seqlens_q is empty"]),
    "batch": (lambda d, a: {"cu_seqlens_k": cu(d, 0, 9)}, ValueError, ["holds 2 offsets", "batch + 1 = 3"]),
    "neither": (lambda d, a: {"cu_seqlens_k": None}, ValueError, ["neither cu_seqlens_k nor block_table"]),
    "used": (lambda d, a: {"seqused_k": cu(d, 1)}, ValueError, ["holds 1 lengths", "one a sequence, 2"]),
    "heads": (lambda d, a: {"q": a["q"][:, :3]}, ValueError, ["3 query heads and 2 key heads"]),
    "k and v": (lambda d, a: {"k": a["k"][:4]}, ValueError, ["k and v of one shape"]),
}
VARLEN_CONTENTS = {
    "falling": (lambda d, a: {"cu_seqlens_q": cu(d, 0, 7, 3)}, ValueError, ["falls from 7 to 3 at sequence 1"]),
    "beyond": (lambda d, a: {"cu_seqlens_k": cu(d, 0, 4, 10)}, ValueError, ["runs from 0 to 10", "0..9"]),
    "negative": (lambda d, a: {"cu_seqlens_k": cu(d, -1, 4, 9)}, ValueError, ["runs from -1"]),
    "too many used": (lambda d, a: {"seqused_k": cu(d, 5, 5)}, ValueError, ["seqused_k[0] is 5", "0..4"]),
    "max_seqlen_q": (lambda d, a: {"max_seqlen_q": 4}, ValueError, ["max_seqlen_q is 4", "5 or more, the longest"]),
    "max_seqlen_k": (lambda d, a: {"max_seqlen_k": 2}, ValueError, ["max_seqlen_k is 2", "None is always right"]),
}


def varlen_args(device: str) -> dict:
    q, k, v = (torch.randn(9, h, 16, device=device).bfloat16() for h in (4, 2, 2))
    return {"q": q, "k": k, "v": v, "cu_seqlens_q": offsets([4, 5], device), "cu_seqlens_k": offsets([4, 5], device)}


@pytest.mark.parametrize(("change", "kind", "parts"), VARLEN.values(), ids=VARLEN)
def test_varlen(device: str, change, kind, parts) -> None:
    args = varlen_args(device)
    args |= change(device, args)
    with pytest.raises(kind) as caught:
        detattn.attention_varlen(**args)
    assert all(p in str(caught.value) for p in ["detattn: ", *parts]), str(caught.value)


@pytest.mark.parametrize(("change", "kind", "parts"), VARLEN_CONTENTS.values(), ids=VARLEN_CONTENTS)
def test_varlen_contents(device: str, change, kind, parts) -> None:
    args = varlen_args(device) | {"check_indices": device != "cpu"}
    args |= change(device, args)
    with pytest.raises(kind) as caught:
        detattn.attention_varlen(**args)
    assert all(p in str(caught.value) for p in parts), str(caught.value)


PAGED = {
    "no lengths": (lambda d, a: {"seqused_k": None}, ValueError, ["without seqused_k"]),
    "both": (lambda d, a: {"cu_seqlens_k": cu(d, 0, 4, 8)}, ValueError, ["both came"]),
    "packed k": (lambda d, a: {"k": a["k"][0], "v": a["v"][0]}, ValueError, ["[num_pages, page_size, Hkv, D]"]),
    "rows": (lambda d, a: {"block_table": a["block_table"][:1]}, ValueError, ["has 1 rows"]),
    "no page size": (lambda d, a: {"k": a["k"][:, :0], "v": a["v"][:, :0]}, ValueError, ["page size is 0"]),
}
PAGED_CONTENTS = {
    "page beyond": (
        lambda d, a: {"block_table": a["block_table"] + 5},
        ValueError,
        ["block_table[0, 1] is 6", "0..5"],
    ),
    "negative page": (lambda d, a: {"block_table": a["block_table"] - 1}, ValueError, ["block_table[0, 0] is -1"]),
    "no room": (lambda d, a: {"seqused_k": cu(d, 9, 3)}, ValueError, ["seqused_k[0] is 9", "0..8"]),
}


@pytest.mark.parametrize(("change", "kind", "parts"), (PAGED | PAGED_CONTENTS).values(), ids=PAGED | PAGED_CONTENTS)
def test_paged(device: str, change, kind, parts) -> None:
    args = {
        "check_indices": device != "cpu",
        "q": torch.randn(2, 4, 16, device=device).bfloat16(),
        "k": torch.randn(6, 4, 2, 16, device=device).bfloat16(),
        "v": torch.randn(6, 4, 2, 16, device=device).bfloat16(),
        "cu_seqlens_q": offsets([1, 1], device),
        "block_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device=device),
        "seqused_k": cu(device, 8, 5),
    }
    detattn.attention_varlen(**args)
    args |= change(device, args)
    with pytest.raises(kind) as caught:
        detattn.attention_varlen(**args)
    assert all(p in str(caught.value) for p in ["detattn: ", *parts]), str(caught.value)


def test_gradient_through_a_paged_cache(device: str) -> None:
    like = {"device": device, "dtype": torch.bfloat16}
    q, k = torch.randn(1, 4, 16, requires_grad=True, **like), torch.randn(2, 4, 2, 16, **like)
    table, used = cu(device, 0, 1)[None], cu(device, 8)
    out = detattn.attention_varlen(q, k, k, cu(device, 0, 1), block_table=table, seqused_k=used)
    with pytest.raises(detattn.UnsupportedError, match="no backward through a paged cache"):
        out.sum().backward()


def test_bad_gradients_are_refused(device: str) -> None:
    q, k, v = qkv(device)
    out, lse = torch.ops.detattn.attention(q, k, v)
    rest = (None, None, True, None, -1, -1, 0.0, None)
    with pytest.raises(ValueError, match="dout is"):
        torch.ops.detattn.attention_backward(out[:, :2], None, q, k, v, out, lse, *rest)
    with pytest.raises(TypeError, match=r"dout is torch\.float32"):
        torch.ops.detattn.attention_backward(out.float(), None, q, k, v, out, lse, *rest)
    with pytest.raises(RuntimeError, match="must have the shape and dtype of lse"):
        torch.ops.detattn.attention_backward(out, None, q, k, v, out, lse[:, :1], *rest)


def test_raw_ops_keep_memory_safe(device: str) -> None:
    """The layer below repeats what memory safety needs, for callers that skip the public functions."""
    q, k, v = qkv(device)
    raw = torch.ops.detattn_C.forward
    tail = (True, 1.0, -1, -1, 0.0)
    none = (None,) * 6
    for args in (
        (q, k[:1], v[:1], *none),
        (q, k, v[:, :, :3], *none),
        (q, k.float(), v, *none),
        (q[:, :3], k, v, *none),
        (q, k, v, torch.ones(2, 4, dtype=torch.bool, device=device), *none[1:]),
        (q, k, v, None, torch.zeros(4, device=device).double(), *none[2:]),
        (q[0], k[0], v[0], None, None, cu(device, 0, 5), None, None, None),
        (q[0], k[0], v[0], None, None, cu(device, 0, 5), cu(device, 0, 2, 3), None, None),
    ):
        with pytest.raises(RuntimeError, match="detattn::attention"):
            raw(*args, *tail)


def test_an_unserved_device_gives_every_reason() -> None:
    x = torch.empty(1, 2, 4, 8, device="meta")
    spec = detattn.Spec("xpu", None, torch.bfloat16, 64, "dense", False, False, False, False, False)
    with pytest.raises(detattn.UnsupportedError) as caught:
        select(spec)
    assert all(n in str(caught.value) for n in names())
    assert "serves cpu tensors, not xpu" in str(caught.value)
    assert detattn.attention(x, x, x).shape == x.shape


def test_a_named_backend_says_why_not() -> None:
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    with pytest.raises(detattn.UnsupportedError, match="backend 'cuda' does not serve this call"):
        detattn.attention(q, k, v, backend="cuda")


def test_explain() -> None:
    spec = detattn.Spec("cpu", None, torch.float32, 64, "paged", False, True, True, False, True)
    text = detattn.explain(spec)
    assert "paged attention on cpu, torch.float32, head dim 64 with sinks, window, backward" in text
    assert "no backward through a paged cache" in text and "chosen" not in text
    dense = detattn.explain(spec._replace(layout="dense"))
    assert [line.split()[:2] for line in dense.splitlines()[1:]] == [
        ["cuda", "no:"],
        ["cpu", "chosen"],
        ["reference", "supports"],
    ]
