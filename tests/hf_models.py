"""Tiny random models of transformers, made without a download."""

from __future__ import annotations

import torch
from transformers import AutoModel, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 97
_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
DECODERS = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 6},
    "gemma2": {**_ALTERNATING, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    "gemma3_text": {**_ALTERNATING, "query_pre_attn_scalar": 16},
    "gpt_oss": {**_ALTERNATING, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def decoder(
    kind: str, implementation: str = "detattn", dtype: torch.dtype = torch.float32, seed: int = 0, by_row=False
):
    """A causal language model with large enough weights that attention is not uniform."""
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[kind](**{**_TEXT, **DECODERS[kind]})
    if by_row:
        config._experts_implementation = (
            "eager"  # one expert at a time; grouped products depend on who shares the batch
        )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=dtype)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(std=0.2)
            elif name.endswith("sinks"):
                p.normal_()
    return model.eval()


def encoder(kind: str, implementation: str = "detattn", **options: object):
    torch.manual_seed(0)
    shared = {k: _TEXT[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    config = CONFIG_MAPPING[kind](
        **{**shared, "num_attention_heads": 4, "pad_token_id": 0, "max_position_embeddings": 512, **options}
    )
    model = AutoModel.from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(std=0.2)
    return model.eval()


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(seed))
