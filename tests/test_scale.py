"""What only a GPU run meets: reruns beside a busy stream, many sequences, far strides, sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from common import attention, differing, error, offsets, pack, paged, raw, run, upstream, varlen
from conftest import serves
from oracle import dense as oracle
from test_serving import Bits, inputs
from torch import Tensor

NAN = float("nan")


@pytest.fixture(autouse=True)
def gpu(device: str) -> None:
    if device != "cuda":
        pytest.skip("needs a GPU")


def busy(stream: torch.cuda.Stream, x: Tensor, times: int = 20) -> None:
    with torch.cuda.stream(stream):
        for _ in range(times):
            torch.mm(x, x)


@pytest.mark.parametrize("keys", [300, 5000])
@pytest.mark.parametrize("queries", [1, 200])
def test_500_reruns_beside_a_busy_stream(device: str, queries: int, keys: int) -> None:
    q, k, v = inputs(device, 3, 8, 2, queries, keys, 128)
    want, bits = attention(q, k, v), Bits(device)
    x, side = torch.randn(2048, 2048, device=device), torch.cuda.Stream()
    for i in range(500):
        if i % 25 == 0:
            busy(side, x)
        # Memory that the next allocations reuse holds NaN.
        torch.full((1 << 20,), NAN, device=device)
        out, lse = attention(q, k, v)
        bits.compare((want[0], out), (want[1], lse))
    assert bits.count() == 0
    raw(out).view(-1)[7] ^= 1
    bits.compare((want[0], out))
    assert bits.count() == 1


def test_every_length_to_130_in_one_call(device: str) -> None:
    lengths = [*range(131), *range(130, -1, -1)]
    for head_dim in (64, 96, 128, 192, 256):
        q, k, v = (pack(t[0]).contiguous() for t in inputs(device, 1, 4, 2, sum(lengths), sum(lengths), head_dim))
        cu = offsets(lengths, device)
        for options in ({}, {"causal": False}, {"window_left": 20, "window_right": 3, "causal": False}):
            got, bits = varlen(q, k, v, cu, cu, **options), Bits(device)
            start = 0
            for i, n in enumerate(lengths):
                at = slice(start, start + n)
                start += n
                one = [pack(t[at])[None] for t in (q, k, v)]
                alone = attention(*one, **options)
                bits.compare((pack(alone[0][0]), got[0][at]), (alone[1][0], got[1][:, at]))
                if i in (1, 2, 63, 64, 65, 127, 128, 129, 130):
                    want = oracle(*(t.cpu().double() for t in one), **options)
                    assert error(alone[0], want[0]) < 0.01 and error(alone[1], want[1]) < 1e-3, (n, head_dim)
            assert bits.count() == 0, (head_dim, options)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_70_000_sequences(device: str, kind: str) -> None:
    batch, n = 70_000, 16 if kind == "prefill" else 1
    q = inputs(device, 1, 2, 1, batch * n, 1, 64)[0]
    k, v = inputs(device, 1, 2, 1, 1, batch * 16, 64, seed=1)[1:]
    q, k, v = (pack(t[0]).contiguous() for t in (q, k, v))
    cu_q, cu_k = (torch.arange(batch + 1, dtype=torch.int32, device=device) * m for m in (n, 16))
    got = varlen(q, k, v, cu_q, cu_k)
    dense = attention(*(t.view(batch, -1, *t.shape[1:]).transpose(1, 2) for t in (q, k, v)))
    assert differing(pack(dense[0].transpose(0, 1).flatten(1, 2)), got[0]) == 0
    assert differing(dense[1].transpose(0, 1).flatten(1, 2), got[1]) == 0
    for b in (0, 12_345, batch - 1):
        alone = attention(*(pack(t[b * m : (b + 1) * m])[None] for t, m in ((q, n), (k, 16), (v, 16))))
        assert differing(alone[0][0], pack(got[0][b * n : (b + 1) * n])) == 0


def test_more_heads_than_a_grid_dimension_holds(device: str) -> None:
    for queries in (1, 130):
        q, k, v = inputs(device, 2100, 32, 32, queries, 130, 8)
        got = attention(q, k, v)
        alone = attention(q[-1:], k[-1:], v[-1:])
        assert differing(got[0][-1:], alone[0]) == 0 and differing(got[1][-1:], alone[1]) == 0


def test_strides_past_31_bits(device: str) -> None:
    """Rows of k and v more than 2^31 elements apart from the first; heads and batches too."""
    q, k, v = inputs(device, 2, 2, 2, 200, 600, 64)
    want = attention(q, k, v)
    room = torch.empty(2 * (1 << 31) + (1 << 27), dtype=torch.bfloat16, device=device)
    row = (1 << 31) // 590 // 8 * 8
    for strides in ((64, 128, row, 1), (1 << 31, 64 * 600, 64, 1), (64 * 600, (1 << 31) + 64, 64, 1)):
        far = torch.as_strided(room, k.shape, strides)
        for queries in (200, 1):
            mine = q[:, :, -queries:]
            far.copy_(k)
            got = attention(mine, far, v)
            assert differing(want[0][:, :, -queries:], got[0]) == 0, strides
            far.copy_(v)
            got = attention(mine, k, far)
            assert differing(want[0][:, :, -queries:], got[0]) == 0, strides
            assert differing(want[1][:, :, -queries:], got[1]) == 0, strides


def test_streams_and_threads_of_their_own(device: str) -> None:
    """Calls on several streams at once share no workspace."""
    cases = [inputs(device, 2, 8, 2, n, 3000, 128, seed=n) for n in (1, 3, 150)]
    want = [attention(*c) for c in cases]
    streams, bits = [torch.cuda.Stream() for _ in range(6)], Bits(device)
    torch.cuda.synchronize()
    got = []
    for i in range(60):
        with torch.cuda.stream(streams[i % 6]):
            got.append((i % 3, attention(*cases[i % 3])))
    torch.cuda.synchronize()
    for i, result in got:
        bits.compare(*zip(want[i], result, strict=True))
    assert bits.count() == 0


def test_a_thread_that_has_made_no_call(device: str) -> None:
    """Such a thread has no current context, autograd's own included; the allocator's cache may not help it to one."""
    q, k, v = inputs(device, 1, 2, 2, 20, 20, 64)
    options = {"causal": True, "scale": 0.125, "window_left": -1, "window_right": -1, "softcap": 0.0}
    want = torch.ops.detattn.attention(q, k, v, **options)
    want += torch.ops.detattn.attention_backward(q, None, q, k, v, *want, None, None, *options.values(), "cuda")
    torch.cuda.synchronize()
    got: list[Tensor] = []

    def work() -> None:
        got.extend(torch.ops.detattn.attention(q, k, v, **options))
        got.extend(torch.ops.detattn.attention_backward(q, None, q, k, v, *got, None, None, *options.values(), "cuda"))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(got) == len(want)
    assert all(differing(a, b) == 0 for a, b in zip(want, got, strict=True) if a.numel())


def test_no_call_waits_for_the_gpu(device: str) -> None:
    q, k, v = inputs(device, 2, 8, 2, 70, 2000, 128)
    cu_q, cu_k = offsets([69, 1], device), offsets([1500, 500], device)
    rows = [pack(t[0]).contiguous() for t in (q, k, v)]
    mask = torch.ones(2, 2000, dtype=torch.bool, device=device)
    attention(q, k, v)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention(q, k, v)
        attention(q[:, :, :1], k, v, key_padding_mask=mask)
        varlen(*rows, cu_q, cu_k)
        with pytest.raises(RuntimeError, match="synchroniz"):
            varlen(*rows, cu_q, cu_k, check_indices=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_sanitizer() -> None:
    program = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if program is None:
        pytest.skip("compute-sanitizer is not installed")
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    cases = str(Path(__file__).parent / "sanitizer_cases.py")
    command = [program, "--tool", "memcheck", "--error-exitcode", "9", "--kernel-name", "kns=detattn"]
    command += [sys.executable, cases]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0 and "all cases ran" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


def test_lengths_that_change_between_calls_leave_no_trace(device: str) -> None:
    """A long call, then short ones that reuse its memory."""
    long = inputs(device, 4, 8, 2, 1, 9000, 128)
    short = inputs(device, 4, 8, 2, 1, 1100, 128, seed=1)
    want = run(attention, *short, grad=False)
    for _ in range(20):
        attention(*long)
        got = run(attention, *short, grad=False)
        assert differing(want["out"], got["out"]) == 0 and differing(want["lse"], got["lse"]) == 0


def test_the_last_pages_of_a_pool_past_31_bits(device: str) -> None:
    part = [t[0] for t in inputs(device, 1, 4, 2, 3, 900, 128)]
    pages = (1 << 31) // (64 * 2 * 128) + 40
    pools = [torch.full((pages, 64, 2, 128), NAN, dtype=torch.bfloat16, device=device) for _ in range(2)]
    order = list(range(pages - 15, pages))
    for pool, t in zip(pools, part[1:], strict=True):
        pool[order] = paged(t, 64, list(range(15)))[:15]
    table = torch.tensor([order], dtype=torch.int32, device=device)
    used = torch.tensor([900], dtype=torch.int32, device=device)
    got = varlen(pack(part[0]), *pools, offsets([3], device), block_table=table, seqused_k=used)
    want = attention(*(t[None] for t in part))
    assert differing(pack(want[0][0]), got[0]) == 0 and differing(want[1][0], got[1]) == 0


def test_gradients_of_8300_single_tokens(device: str) -> None:
    if not serves("cuda", device, torch.bfloat16, backward=True):
        pytest.skip("no backward on this device")
    x = inputs(device, 8300, 16, 16, 1, 1, 128)
    got = run(attention, *x, dlse=torch.zeros(8300, 16, 1, device=device))
    assert differing(got["dv"], upstream(got["out"], 1)) == 0
    assert got["dq"].abs().max() < 1e-5 and got["dk"].abs().max() < 1e-5


def test_gradients_of_80_000_sequences(device: str) -> None:
    if not serves("cuda", device, torch.bfloat16, backward=True):
        pytest.skip("no backward on this device")
    n = 80_000
    q, k, v = (pack(t[0]).contiguous() for t in inputs(device, 1, 2, 1, n * 16, n * 16, 64))
    cu = torch.arange(n + 1, dtype=torch.int32, device=device) * 16
    got = run(varlen, q, k, v, cu_q=cu, cu_k=cu)
    dout, dlse = upstream(got["out"], 1), upstream(got["lse"], 2)
    for b in (0, 40_000, n - 1):
        at = slice(b * 16, b * 16 + 16)
        up = {"dout": pack(dout[at])[None], "dlse": dlse[:, at][None]}
        alone = run(attention, *(pack(t[at])[None] for t in (q, k, v)), **up)
        assert all(differing(pack(alone[m][0]), got[m][at]) == 0 for m in ("dq", "dk", "dv"))


def test_an_upstream_gradient_whose_rows_pass_31_bits(device: str) -> None:
    if not serves("cuda", device, torch.bfloat16, backward=True):
        pytest.skip("no backward on this device")
    rows, stride = 230_000, 9728
    x = [pack(t[0]).contiguous() for t in inputs(device, 1, 1, 1, rows, rows, 96)]
    cu = torch.arange(rows // 1000 + 1, dtype=torch.int32, device=device) * 1000
    room = torch.empty(rows * stride, dtype=torch.bfloat16, device=device)
    far = room.as_strided((rows, 1, 96), (stride, 96, 1))
    near = upstream(x[0], 1)
    far.copy_(near)
    dlse = torch.zeros(1, rows, device=device)
    want = run(varlen, *x, cu_q=cu, cu_k=cu, dout=near, dlse=dlse)
    got = run(varlen, *x, cu_q=cu, cu_k=cu, dout=far, dlse=dlse)
    assert all(differing(want[m], got[m]) == 0 for m in ("dq", "dk", "dv"))


def test_memory_of_the_backward_is_linear(device: str) -> None:
    if not serves("cuda", device, torch.bfloat16, backward=True):
        pytest.skip("no backward on this device")
    peaks = []
    for length in (4096, 16_384, 65_536):
        x = [t.requires_grad_() for t in inputs(device, 1, 2, 1, length, length, 128)]
        out, _ = attention(*x)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(out, x, torch.ones_like(out))
        peaks.append(torch.cuda.max_memory_allocated() - before)
    fp32_dq = 2 * 65_536 * 128 * 4
    assert peaks[2] <= 4.5 * peaks[1] <= 4.5 * 4.5 * peaks[0]
    assert peaks[2] <= 2 * fp32_dq + 3 * (2 * 65_536 * 128 * 2)  # two fp32 dQ, and the gradients themselves
