"""Rollout and trainer of one tiny transformer: do the log-probs of sampled tokens agree?

Sampled rollout with a KV cache in batches of varying size, then the trainer's log-probs in one packed forward. The
linear layers run row by row in both (`detattn.batch_invariant`), so what differs is the attention's doing.

    python examples/rollout_vs_trainer.py [--figure docs/rollout_vs_trainer.png]
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from detattn.batch_invariant import linear_rows
from detattn.integrations.transformers import register

PROMPTS, NEW_TOKENS, BATCHES = 11, 40, (1, 3, 7)


def make_model(implementation: str, device: str, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=dtype)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(std=0.12)
    return model.to(device).eval()


def log_probs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def rollout(model, prompts: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Samples a continuation of each prompt, left-padded in batches; the sequences and the log-probs when sampled."""
    sequences, seen, at = [], [], 0
    for size in BATCHES:
        batch = prompts[at : at + size]
        at += size
        width = max(map(len, batch))
        ids = torch.stack([torch.nn.functional.pad(p, (width - len(p), 0)) for p in batch])
        mask = torch.stack([torch.arange(width, device=p.device) >= width - len(p) for p in batch]).long()
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=0,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_logits=True,
        )
        new = out.sequences[:, width:]
        seen += log_probs(torch.stack(out.logits, 1), new).unbind()
        sequences += [torch.cat([p, n]) for p, n in zip(batch, new, strict=True)]
    return sequences, seen


def trainer(model, prompts: list[torch.Tensor], sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    """The log-probs of the sampled tokens, all sequences packed into one row."""
    positions = torch.cat([torch.arange(len(s), device=s.device) for s in sequences])[None]
    logits = model(torch.cat(sequences)[None], position_ids=positions, use_cache=False).logits[0]
    parts = logits.split([len(s) for s in sequences])
    return [log_probs(x[len(p) - 1 : -1], s[len(p) :]) for x, p, s in zip(parts, prompts, sequences, strict=True)]


def compare(implementation: str, device: str, dtype: torch.dtype) -> torch.Tensor:
    model = make_model(implementation, device, dtype)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 256, (5 + 7 * i,), generator=generator).to(device) for i in range(PROMPTS)]
    with torch.no_grad(), linear_rows():
        sequences, sampled = rollout(model, prompts)
        gap = torch.cat(trainer(model, prompts, sequences)) - torch.cat(sampled)
    ratio = gap.exp()
    print(
        f"{implementation:8} {gap.numel()} tokens, {int((gap != 0).sum())} with another log-prob; largest gap "
        f"{float(gap.abs().max()):.2e}, importance ratio {float(ratio.min()):.9g} to {float(ratio.max()):.9g}"
    )
    return gap.cpu()


def draw(gaps: dict[str, torch.Tensor], path: str) -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("--figure needs matplotlib: pip install matplotlib") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 2.6), layout="constrained")
    for name, gap in gaps.items():
        axes.plot(gap, ".", markersize=3, label=f"{name}: {int((gap != 0).sum())} of {gap.numel()} tokens differ")
    axes.set(xlabel="sampled token", ylabel="log-prob: trainer \u2212 rollout")
    axes.legend(loc="upper right")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype", default=None, choices=("float32", "bfloat16"), help="bfloat16 on a GPU, else float32"
    )
    parser.add_argument("--figure", help="write the gap of every token to this image")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype or ("float32" if args.device == "cpu" else "bfloat16"))
    gaps = {name: compare(name, args.device, dtype) for name in ("sdpa", register())}
    if args.figure:
        draw(gaps, args.figure)


if __name__ == "__main__":
    main()
