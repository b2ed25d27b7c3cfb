"""Every kernel path once, small: ``compute-sanitizer --tool memcheck python tests/sanitizer_cases.py``."""

from __future__ import annotations

import torch

import detattn


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def dense(head_dim: int, heads: int, queries: int, keys: int) -> list[torch.Tensor]:
    sizes = ((heads, queries), (1, keys), (1, keys))
    return [torch.randn(1, h, n, head_dim, device="cuda").bfloat16() for h, n in sizes]


def rows(x: torch.Tensor) -> torch.Tensor:
    return x[0].transpose(0, 1).contiguous()


def main() -> None:
    torch.manual_seed(0)
    for head_dim in (64, 128, 256):
        q, k, v = dense(head_dim, 2, 200, 333)
        detattn.attention(q, k, v)
        detattn.attention(q, k, v, causal=False, window_left=90, window_right=10, sinks=torch.zeros(2, device="cuda"))
        keep = torch.ones(1, 333, dtype=torch.bool, device="cuda")
        keep[0, :20] = keep[0, 100] = False
        detattn.attention(q, k, v, key_padding_mask=keep)
        detattn.attention(q[:, :, :1], k, v, key_padding_mask=keep)
        for queries, keys in ((3, 1100), (1, 2100), (1, 9300)):
            detattn.attention(*dense(head_dim, 2, queries, keys))
        q, k, v = map(rows, dense(head_dim, 2, 200, 1400))
        detattn.attention_varlen(q, k, v, ints(0, 1, 70, 200), ints(0, 1300, 1350, 1400))
        for size in (16, 64):
            cache = torch.randn(90, size, 1, head_dim, device="cuda").bfloat16()
            table = torch.arange(90, dtype=torch.int32, device="cuda").view(3, 30)
            used = ints(min(1300, 30 * size), 30, 0)
            detattn.attention_varlen(q[:3], cache, cache, ints(0, 1, 2, 3), block_table=table, seqused_k=used)
            detattn.attention_varlen(q, cache, cache, ints(0, 100, 101, 200), block_table=table, seqused_k=used)
        leaves = [t.requires_grad_() for t in dense(head_dim, 2, 200, 333)]
        out, lse = detattn.attention(*leaves, return_lse=True)
        torch.autograd.grad([out, lse], leaves, [torch.randn_like(out), torch.randn_like(lse)])
        packed = [t.detach().requires_grad_() for t in (q, k, v)]
        out = detattn.attention_varlen(*packed, ints(0, 1, 70, 200), ints(0, 1300, 1350, 1400), window_left=100)
        torch.autograd.grad(out, packed, torch.ones((), device="cuda").bfloat16().expand_as(out))
    torch.cuda.synchronize()
    print("all cases ran")


if __name__ == "__main__":
    main()
