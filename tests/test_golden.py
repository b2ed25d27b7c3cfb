"""Digests of results on fixed inputs. A change that nobody meant shows here.

The C++ backend has one set for every CPU, the CUDA kernels one for each architecture. The reference backend is made of
PyTorch's operators, whose bits are those of an instruction set.

A red test means that bits moved. If that was meant: raise ``VERSION`` in ``contract.py``, add a line under Numerics in
``CHANGELOG.md``, and accept the new digests with ``EXPECTTEST_ACCEPT=1 python -m pytest tests/test_golden.py``.
"""

from __future__ import annotations

import hashlib
import unittest

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


AVX2 = torch.backends.cpu.get_cpu_capability() == "AVX2"
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


class TestGolden(TestCase):
    maxDiff = None

    def check(self, expected: str, actual: str) -> None:
        self.assertExpectedInline(actual, expected, skip=1)

    def test_cpu_float32(self) -> None:
        self.assertExpectedInline(
            results("cpu", "cpu", torch.float32, True, 1300),
            """\
contract 2
causal 64 out:901fbe4e5e9b lse:50ead9bfb38f dq:0e4369c8749f dk:37af9a9fc6a3 dv:ba70cc3232b9
causal 192 out:092ca2c2b6d5 lse:59c5ee5d5c19 dq:fc1c90c54d3e dk:9b25b51b67de dv:7047f6bb851e
full out:6b537522956a lse:06563342a820 dq:971acfba65cc dk:b2a0f35579d6 dv:63423f672db0
window out:417cb7c3edd7 lse:e6f2f10de65c dq:49432da7a8b0 dk:5e2f381c889f dv:270009d6d348
softcap out:85f569a118a8 lse:c289e1864277 dq:0c91385a0148 dk:4cebaf920c52 dv:5879cc99c79a
mask out:00af27f87585 lse:72419b843188 dq:f2feafbe9d2a dk:298e4e4d49d1 dv:07d38f92360e
sinks out:2465717e18f7 lse:e9c24965fe07
packed out:13052a76b9e6 lse:e428186051d6 dq:038d3f9b6343 dk:35f6f2393237 dv:48626f965f99
""",
        )

    def test_cpu_bfloat16(self) -> None:
        self.assertExpectedInline(
            results("cpu", "cpu", torch.bfloat16, True, 1300),
            """\
contract 2
causal 64 out:5bd82336da45 lse:0e85ba7de4cc dq:0e62fdac52a6 dk:0078a61cf477 dv:e192dee19af7
causal 192 out:a1b5c0500f1d lse:4eaac52e750e dq:92a29ad34c59 dk:63d7426e6b84 dv:816838686337
full out:56b3930a8e60 lse:8dddbc7417ee dq:e172a1ca8037 dk:10e5b4372dc5 dv:546caf99f37d
window out:40b79338b1e6 lse:72f806d46e6f dq:37044def8d69 dk:a9bc504452c3 dv:187906aad6ea
softcap out:81ea7f5a98c4 lse:ccbb5f29b8a0 dq:add6cb04e8ca dk:06d1b0fca4bb dv:0febdad3bb98
mask out:73b80c21098a lse:cf42da2c1018 dq:fb53b66b69cc dk:e8ec0cd80d35 dv:85b7c41a46ae
sinks out:be929a5f0d5b lse:62c415f3072f
packed out:c3539994c432 lse:0f71d35d2fc3 dq:583f322c88d8 dk:2e477fce0f4a dv:6663b820e5ce
""",
        )

    def test_cpu_float16(self) -> None:
        self.assertExpectedInline(
            results("cpu", "cpu", torch.float16, True, 1300),
            """\
contract 2
causal 64 out:e295f485bbbc lse:50ead9bfb38f dq:350bf290177c dk:27e2c11b3b98 dv:0870bdb2e117
causal 192 out:ad2b4cb0fade lse:59c5ee5d5c19 dq:912ad34a3841 dk:01902abfc62d dv:daef73016f92
full out:05307e6a9c17 lse:06563342a820 dq:85be5f96c139 dk:64349e60a748 dv:e507d796c9e5
window out:b4aa4a955c8f lse:e6f2f10de65c dq:8d69294305e4 dk:55bd57155635 dv:44aa13c137ab
softcap out:d939b96f0bc4 lse:c289e1864277 dq:53424984d9b5 dk:f45fef6f5a54 dv:79838da8e7fd
mask out:f84299325ffd lse:72419b843188 dq:ba97afba0fa3 dk:f0387ff3ecb4 dv:22825623225f
sinks out:e6c4ae4b549d lse:e9c24965fe07
packed out:d1fb7109d44f lse:e428186051d6 dq:6187bda57f50 dk:2d5d00ebbe63 dv:ab6a03257624
""",
        )

    def test_cpu_float64(self) -> None:
        self.assertExpectedInline(
            results("cpu", "cpu", torch.float64, True, 1300),
            """\
contract 2
causal 64 out:5ed15650cbad lse:6ca48513e6bb dq:8f00b7af13f2 dk:0ff5b6a038ff dv:d1c5dd779a7f
causal 192 out:a7234785b579 lse:4a17055bcac8 dq:3ac82a624ff7 dk:b8ef1e938afb dv:760a732ecc5e
full out:7ba61d42e53f lse:c400973baa3b dq:6897c3d52e23 dk:cd6903280181 dv:6624b430b489
window out:20586543ba91 lse:d22a2e93bfd2 dq:ee4ad7427dc2 dk:115bf4198528 dv:cff3ef8ced1c
softcap out:be3f223fca0a lse:ae902255e097 dq:ad524f6c7718 dk:719a28480c9c dv:76e9fec3d530
mask out:592eecdbe449 lse:aa90bd9c00fb dq:2f12c605eb45 dk:8e3e01a27888 dv:f5b8c8d0ebc4
sinks out:82be111b24ff lse:0091878e094a
packed out:39d077bc655f lse:c19b6b998fa7 dq:26a5958435db dk:9b2257277cff dv:bb0862284d07
""",
        )

    @unittest.skipUnless(AVX2, "PyTorch's exp has other bits on other instruction sets")
    def test_reference_float32(self) -> None:
        self.assertExpectedInline(
            results("reference", "cpu", torch.float32, True, 1100),
            """\
contract 2
causal 16 out:f51bc56d92a7 lse:910c4a81818d dq:1b452ba919f6 dk:e6b6fe8e0835 dv:d782d40c8939
full out:271615e7b828 lse:86c827b0c4bd dq:9c84f55cf45e dk:fe20fd095202 dv:fd839aafe965
window out:0e7210146f47 lse:706f79f77c76 dq:22194cf99c63 dk:2c42968179da dv:7d8edf1eb6c5
softcap out:437d7d70c0df lse:d0dd2cc47791 dq:7005874519e7 dk:8b114f4dded1 dv:9a8be694713a
mask out:ed4a87180284 lse:246c1801e67d dq:071a200642ea dk:4006e8c3413d dv:78e0446a934c
sinks out:e15c3e3073bf lse:c5195e8ead40
packed out:4aace7b879b7 lse:29666acabf31 dq:c33a68cad642 dk:c52981e94806 dv:2b10df132abd
""",
        )

    @unittest.skipUnless(AVX2, "PyTorch's exp has other bits on other instruction sets")
    def test_reference_bfloat16(self) -> None:
        self.assertExpectedInline(
            results("reference", "cpu", torch.bfloat16, True, 1100),
            """\
contract 2
causal 16 out:00ba2f373230 lse:c29029b69e00 dq:b4f746c77512 dk:f6a0c3312459 dv:942eca17373a
full out:2d594a9985bd lse:174aa65594de dq:0071c198834f dk:b0cc3b347178 dv:7d8b3925c8e0
window out:35f05b70c693 lse:0be65d723e3b dq:7fddeab60290 dk:9d3b064f67e7 dv:fd81a723d1a7
softcap out:ba830dbc084b lse:e4098b97c841 dq:ca60104b9c67 dk:d7d1432227cd dv:c852d6e03c22
mask out:29bb16483b86 lse:e2fcc6451777 dq:c3e2b9ecb026 dk:2e9ce0527b00 dv:f2aeaa0edba8
sinks out:4dd68488a738 lse:5f744b5bda9a
packed out:afffe500c2be lse:191f178ade82 dq:141a56dd86e7 dk:a60449218f87 dv:18bb78797676
""",
        )

    @unittest.skipUnless(HOPPER, "needs a Hopper GPU")
    def test_cuda_sm90_bfloat16(self) -> None:
        self.assertExpectedInline(
            results("cuda", "cuda", torch.bfloat16, True, 1300),
            """\
contract 2
causal 64 out:ecd1f77c3266 lse:b20a04251c7e dq:ffcb92e5d2fa dk:fb93bfbacdce dv:1d6e3d16cebc
causal 192 out:0f5e5be92bc4 lse:7e7fababd902 dq:6fce8256a92a dk:b66227753335 dv:cb0baeeee334
full out:75e7a33480a6 lse:e471cd47288c dq:479aec51f176 dk:5eb2189127cb dv:11a5ee6e291a
window out:496aaea748b2 lse:94529c38c6e0 dq:220da27a5006 dk:0663101d61b0 dv:187906aad6ea
softcap out:06936165c602 lse:7169c7fa5258 dq:57df3e069c5c dk:cc83fa9f17a3 dv:7b96ba8649e0
mask out:4208ab2ad3cc lse:c356ec69b559 dq:9f9e6cb992f9 dk:9f59017d7a52 dv:64bc0599348b
sinks out:0bee97b91e24 lse:46f7f6253d8d
packed out:bec1d3db10b3 lse:4ed9386e0203 dq:8a5322c86993 dk:0ec8b3c6198e dv:aa4926d1019d
""",
        )

    @unittest.skipUnless(HOPPER, "needs a Hopper GPU")
    def test_cuda_sm90_float16(self) -> None:
        self.assertExpectedInline(
            results("cuda", "cuda", torch.float16, True, 1300),
            """\
contract 2
causal 64 out:283640066b24 lse:9c7ce0c2cd98 dq:29f966097e58 dk:b95df7d0b92f dv:41d7ef397dbe
causal 192 out:2e07d482a1f5 lse:8e58c941c0df dq:0de1a9efa090 dk:04681a377a2f dv:a7bdfea63746
full out:cf2c507198fc lse:b045d32d432c dq:9b2b2b0dc9ad dk:601aa489dce7 dv:506377a68697
window out:c45416541fb5 lse:01d3116873c6 dq:868d8e2a44e5 dk:5738105224e3 dv:44a2d1f6f179
softcap out:456d5d3ce4bc lse:658b6836d1bc dq:a5e8aa2956e6 dk:a64f7c91a688 dv:a96e0409f968
mask out:07df705ae261 lse:e94f67df6cf9 dq:bfcd353d8e3a dk:671e3dd23de4 dv:14e260962cad
sinks out:d7040167860c lse:8eaab4bf3589
packed out:526e6b877434 lse:7dc2af55f234 dq:3e605dd0de3f dk:129275877e2e dv:e75d81c44337
""",
        )

    def test_a_moved_bit_moves_the_digest(self) -> None:
        out = values((4, 4), 1).float()
        moved = out.clone()
        raw(moved).view(-1)[5] ^= 1
        assert digest({"out": out}) != digest({"out": moved})
