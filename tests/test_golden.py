"""Digests of results on fixed inputs. A change that nobody meant shows here, on any machine.

A red test means that bits moved. If that was meant: raise ``VERSION`` in ``contract.py``, add a line under Numerics in
``CHANGELOG.md``, and accept the new digests with ``EXPECTTEST_ACCEPT=1 python -m pytest tests/test_golden.py``.
"""

from __future__ import annotations

import hashlib

import torch
from common import attention, offsets, pack, raw, run, varlen
from expecttest import TestCase

from detattn import contract


def values(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Numbers in about [-2, 2], the same on every machine and in every version of PyTorch: integer arithmetic alone."""
    count = 1
    for n in shape:
        count *= n
    x = torch.arange(count, dtype=torch.int64) * 2654435761 + seed * 40503 + 12345
    for shift in (13, 7, 17):
        x = (x ^ (x >> shift)) & 0xFFFFFFFF
        x = (x * 1597334677) & 0xFFFFFFFF
    parts = [(x >> s) & 0xFF for s in (0, 8, 16, 24)]
    return ((sum(parts) - 510).double() / 256).reshape(shape)


def digest(named: dict[str, torch.Tensor]) -> str:
    return " ".join(f"{n}:{hashlib.sha256(raw(t).cpu().numpy().tobytes()).hexdigest()[:12]}" for n, t in named.items())


def results(backend: str, device: str, dtype: torch.dtype, grad: bool, length: int) -> str:
    def make(*shape: int, seed: int) -> torch.Tensor:
        return values(shape, seed).to(dtype).to(device)

    lines = [f"contract {contract.VERSION}"]
    wide = {torch.float64: torch.float64}.get(dtype, torch.float32)

    def call(name: str, q, k, v, function=attention, **options) -> None:
        dout, dlse = make(*q.shape, seed=7), values((1,), 8)
        lse_shape = q.shape[:3] if q.dim() == 4 else (q.shape[1], q.shape[0])
        dlse = values(tuple(lse_shape), 8).to(wide).to(device)
        got = run(function, q, k, v, grad=grad, dout=dout, dlse=dlse, backend=backend, **options)
        lines.append(f"{name} {digest(got)}")

    for dim in (64, 192) if backend != "reference" else (16,):
        q, k, v = make(2, 4, 40, dim, seed=1), make(2, 2, length, dim, seed=2), make(2, 2, length, dim, seed=3)
        call(f"causal {dim}", q, k, v)
    call("full", q, k, v, causal=False)
    call("window", q, k, v, window_left=70)
    call("softcap", q, k, v, softcap=5.0)
    mask = (values((2, length), 4) > -0.5).to(device)
    call("mask", q, k, v, key_padding_mask=mask)
    sinks = make(4, seed=5).to(wide)
    out, lse = attention(q, k, v, sinks=sinks, backend=backend)
    lines.append(f"sinks {digest({'out': out, 'lse': lse})}")
    rows = [pack(t[0]).contiguous() for t in (q, k, v)]
    cu_q, cu_k = offsets([10, 30], device), offsets([50, length - 50], device)
    call("packed", *rows, function=lambda q, k, v, **o: varlen(q, k, v, cu_q, cu_k, **o))
    return "\n".join(lines) + "\n"


class TestGolden(TestCase):
    maxDiff = None

    def check(self, expected: str, actual: str) -> None:
        self.assertExpectedInline(actual, expected, skip=1)

    def test_cpu_float32(self) -> None:
        self.assertExpectedInline(
            results("cpu", "cpu", torch.float32, True, 600),
            """\
contract 1
causal 64 out:fb00d6c9f7e6 lse:0e45e3c1abd0 dq:ea3bc6db0107 dk:3870628e7228 dv:e64587509717
causal 192 out:7c788fed2b1e lse:08946f0c09e3 dq:111e2c842050 dk:2004abb4ecdd dv:2a5259426fe9
full out:b9be1eccf223 lse:c7f77f13c5b3 dq:e43781c20077 dk:4512b9ec4628 dv:ce333d97d50e
window out:354a39541ef7 lse:9788505d180b dq:6148eafa1b96 dk:c09ddf170e0b dv:7e1e0987ae2f
softcap out:bba34da8676a lse:88ac51c4398e dq:c173a6aa0314 dk:bbc1dd951eb8 dv:e488849d6050
mask out:1315c53caea1 lse:1c05dcb7254a dq:0a13cdee4685 dk:21f72fd72337 dv:7cc898dde816
sinks out:9f9eb3e67e76 lse:4329557aa991
packed out:1a4a32c7427a lse:fa0624ab6314 dq:132926e672a8 dk:af04dc3cf07f dv:b01b93019a9b
""",
        )

    def test_cpu_bfloat16(self) -> None:
        self.assertExpectedInline(
            results("cpu", "cpu", torch.bfloat16, True, 600),
            """\
contract 1
causal 64 out:96735ece3475 lse:136185572b00 dq:7cfc710ccd40 dk:579515340dc2 dv:2323a70bf6bc
causal 192 out:448032d29d78 lse:6cd87459864e dq:b282e2ed742b dk:5fa49d455db2 dv:d760035c69ce
full out:941cd689156a lse:a410a70bd35a dq:5bfe665a6af5 dk:f30fd0460d3f dv:d5a210847732
window out:00a0131e83bd lse:738466049858 dq:a16519302987 dk:d2483b431203 dv:b206be62573a
softcap out:cc41ff1f1728 lse:8de328d484a4 dq:eabf5e8ee12d dk:1c1b19208e66 dv:bf6667491e3b
mask out:593a7925d1d9 lse:b0cd4ab1bece dq:a89596f5ec9b dk:a15d046813b9 dv:2674224aa072
sinks out:08a8004812e7 lse:d92520f0e2be
packed out:d4145636fa4d lse:a5973116f763 dq:b873dd58c6d5 dk:58fdcc2d8dac dv:f15b037614fc
""",
        )

    def test_cpu_float16(self) -> None:
        self.assertExpectedInline(
            results("cpu", "cpu", torch.float16, True, 600),
            """\
contract 1
causal 64 out:3c25dc6ae8ad lse:0e45e3c1abd0 dq:740815dda7e9 dk:a9cd0f71d382 dv:92a179faa001
causal 192 out:2f49df7b63e4 lse:08946f0c09e3 dq:8e5c90645921 dk:5ebc4a7c39f7 dv:670ae722e8ee
full out:13f2385534d5 lse:c7f77f13c5b3 dq:3c9e550be42d dk:310f68c00a89 dv:39451dcda760
window out:eed6dc1c6f5b lse:9788505d180b dq:fec6f80cafc9 dk:487a7371b615 dv:c7c88e29167f
softcap out:c3dcc969594b lse:88ac51c4398e dq:c79994cc546b dk:1ac7fe42564a dv:eefedcd12d90
mask out:877b8d8d8efb lse:1c05dcb7254a dq:5356ac29e0cd dk:f81cda333320 dv:e260f2096a7d
sinks out:0007e2ce09fd lse:4329557aa991
packed out:8d91cd3b430e lse:fa0624ab6314 dq:2ab1691a4a0b dk:7e9ab2c2c38c dv:b786f7686238
""",
        )

    def test_cpu_float64(self) -> None:
        self.assertExpectedInline(
            results("cpu", "cpu", torch.float64, True, 600),
            """\
contract 1
causal 64 out:64011f432a46 lse:76a72817d675 dq:9c9f7340ede3 dk:90759f18798a dv:9fd2188ac7a3
causal 192 out:940aa79e15d9 lse:94bbf66736f7 dq:3ad97bd1bd44 dk:d468bda02fb8 dv:151878b26e04
full out:64f186f48ee2 lse:1920ed129687 dq:84c3239f9e4c dk:e38f6f44ab4d dv:1d90699611fe
window out:6cb7bd4f814c lse:d48d3d8154da dq:c8c4770d9be7 dk:a8a813995e5a dv:8357d1f6504e
softcap out:30a3a2e4dd28 lse:7864c78d4103 dq:f8d86717b9c1 dk:f13e235112cc dv:f7e9d18b6118
mask out:06b34c3ddc66 lse:ff7e0c212e57 dq:d82485b52296 dk:9da04a71c5df dv:d5a886aeacc6
sinks out:2f8ffba0961e lse:24f5af2e469d
packed out:9616df89febf lse:95e209efd4fb dq:2a80b98fe919 dk:f7bcfa7213f5 dv:811825a7e5bf
""",
        )

    def test_reference_float32(self) -> None:
        self.assertExpectedInline(
            results("reference", "cpu", torch.float32, True, 140),
            """\
contract 1
causal 16 out:7340eb9e8eb7 lse:4d7f4992de9d dq:e992e1c8463f dk:75be8bf68d91 dv:b3e34183a879
full out:bdbfb935f4bd lse:9874772d3821 dq:f3b83035aa7c dk:97839c2ebf58 dv:6b2fdf0309a1
window out:f57936865b73 lse:de7a858fcf8f dq:1109e2309053 dk:f57ead163628 dv:d39ff67c9a4d
softcap out:4ac8e7d335f3 lse:f415f5ba021e dq:0e318fa35d4f dk:3cd3463b731e dv:8f0984d4d6f0
mask out:b1b7955415cf lse:84a2c611012f dq:08b8c553ab10 dk:0b5a026bebca dv:65b05e429111
sinks out:91a1bde3b65e lse:b16a89ab6282
packed out:9a20771d9dee lse:10b0e8535109 dq:05d1b060b337 dk:2f99091a80df dv:2c9915d7e5e6
""",
        )

    def test_reference_bfloat16(self) -> None:
        self.assertExpectedInline(
            results("reference", "cpu", torch.bfloat16, True, 140),
            """\
contract 1
causal 16 out:017d1036be62 lse:cb64ba798b7e dq:3617a93d2791 dk:acc4e8c08be7 dv:f0cd0dbf2133
full out:7c40e92f2acc lse:754b0b19f1b3 dq:5c87c4ecb9d0 dk:7cab5fd513c4 dv:ac44716d1bce
window out:288c37947a5c lse:e193ab3f63db dq:03d8c180d545 dk:8ae996cc5496 dv:6c39e91ca72b
softcap out:761a557681ee lse:ecf1c8a948a9 dq:b30e024bb686 dk:57aa8eae10ab dv:ec54b8c612a1
mask out:4e4c3690bab8 lse:68eb2c682942 dq:1bca78c789a5 dk:8944c0d96440 dv:f80b054a2919
sinks out:ddb6c7cca863 lse:c74e2b636f56
packed out:11ae3c16ccc0 lse:2bef25269f36 dq:a420a8417188 dk:d5b1276a892a dv:88bc96fabc2e
""",
        )

    def test_a_moved_bit_moves_the_digest(self) -> None:
        out = values((4, 4), 1).float()
        moved = out.clone()
        raw(moved).view(-1)[5] ^= 1
        assert digest({"out": out}) != digest({"out": moved})
