"""The hook into transformers: equal to eager, and on whole models the same bits however a sequence is run."""

from __future__ import annotations

import pytest
import torch
from common import differing

transformers = pytest.importorskip("transformers")

from hf_models import DECODERS, decoder, encoder, tokens  # noqa: E402
from transformers import AttentionMaskInterface, DynamicCache, StaticCache  # noqa: E402

from detattn.batch_invariant import linear_rows  # noqa: E402
from detattn.integrations.transformers import NAME, register  # noqa: E402

KINDS = pytest.mark.parametrize("kind", DECODERS)
LENGTHS = (5, 9, 17)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return float((a - b).abs().max()) < 1e-4 * float(b.abs().max())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return differing(a, b) == 0


def padded(lengths: tuple[int, ...], side: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids, mask and positions of prompts in one batch; padding holds token 0."""
    width = max(lengths) + 2
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.long)
    for b, n in enumerate(lengths):
        at = slice(width - n, width) if side == "left" else slice(0, n)
        ids[b, at], mask[b, at] = tokens(n, seed=b), 1
    return ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)


@KINDS
def test_forward_is_eager_within_rounding(kind: str) -> None:
    ours, eager = decoder(kind), decoder(kind, "eager")
    ids = tokens(2, 23)
    assert close(ours(ids).logits, eager(ids).logits)
    for side in ("left", "right"):
        ids, mask, positions = padded(LENGTHS, side)
        a, b = (m(ids, attention_mask=mask, position_ids=positions).logits[mask.bool()] for m in (ours, eager))
        assert close(a, b)


@KINDS
def test_row_bits_are_those_of_the_sequence_alone(kind: str) -> None:
    model = decoder(kind, by_row=True)
    with linear_rows():
        alone = [model(tokens(1, n, seed=b)).logits[0] for b, n in enumerate(LENGTHS)]
        for side in ("left", "right"):
            ids, mask, positions = padded(LENGTHS, side)
            logits = model(ids, attention_mask=mask, position_ids=positions).logits
            assert all(same_bits(logits[b][mask[b].bool()], alone[b]) for b in range(len(LENGTHS))), side
        packed = torch.cat([tokens(1, n, seed=b) for b, n in enumerate(LENGTHS)], 1)
        positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
        logits = model(packed, position_ids=positions, use_cache=False).logits[0]
        assert same_bits(logits, torch.cat(alone))


@KINDS
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_cached_bits_are_those_of_one_forward(kind: str, cache: str) -> None:
    model, n = decoder(kind, by_row=True), 17
    ids = tokens(2, n)
    with linear_rows():
        want = model(ids, use_cache=False).logits
        past = DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(model.config, max_cache_len=40)
        got, at = [], 0
        for step in (4, 1, 1, 3, *[1] * 8):
            positions = torch.arange(at, at + step)[None].expand(2, -1)
            got.append(model(ids[:, at : at + step], past_key_values=past, position_ids=positions).logits)
            at += step
            if cache == "static":
                for layer in past.layers:
                    if layer.keys.shape[2] == 40:
                        layer.keys[:, :, at:] = torch.nan
                        layer.values[:, :, at:] = torch.nan
        assert same_bits(torch.cat(got, 1), want)


@KINDS
def test_later_tokens_and_other_documents_move_nothing(kind: str) -> None:
    model = decoder(kind, by_row=True)
    ids, positions = tokens(1, 20), torch.cat([torch.arange(8), torch.arange(12)])[None]
    other = ids.clone()
    other[:, 15] = 3 + (other[:, 15] + 1) % 90
    with linear_rows():
        a, b = model(ids).logits, model(other).logits
        assert same_bits(a[:, :15], b[:, :15])
        assert not same_bits(a[:, 15:], b[:, 15:])
        a, b = (model(x, position_ids=positions, use_cache=False).logits for x in (ids, other))
        assert same_bits(a[:, :8], b[:, :8])
        other = ids.clone()
        other[:, 3] = 3 + (other[:, 3] + 1) % 90
        b = model(other, position_ids=positions, use_cache=False).logits
        assert same_bits(a[:, 8:], b[:, 8:])
        assert not same_bits(a[:, :8], b[:, :8])


def test_cu_seq_lens_are_packed_sequences() -> None:
    model = decoder("llama")
    ids, positions = tokens(1, 20), torch.cat([torch.arange(8), torch.arange(12)])[None]
    cu = torch.tensor([0, 8, 20], dtype=torch.int32)
    a = model(ids, position_ids=positions, use_cache=False).logits
    b = model(ids, position_ids=positions, use_cache=False, cu_seq_lens_q=cu, cu_seq_lens_k=cu).logits
    assert same_bits(a, b)


@KINDS
@pytest.mark.parametrize(
    "how",
    [{}, {"num_beams": 3}, {"do_sample": True}, {"cache_implementation": "static"}],
    ids=["greedy", "beam", "sample", "static"],
)
def test_generate_writes_what_eager_writes(kind: str, how: dict) -> None:
    ids, mask, _ = padded(LENGTHS, "left")
    written = []
    for implementation in ("detattn", "eager"):
        torch.manual_seed(1)
        options = {"max_new_tokens": 8, "do_sample": False, "disable_compile": True, "eos_token_id": None} | how
        written.append(decoder(kind, implementation).generate(ids, attention_mask=mask, pad_token_id=0, **options))
    assert torch.equal(*written)


def test_assisted_generation() -> None:
    ids, draft = tokens(1, 9), decoder("llama", seed=3)
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    model = decoder("llama")
    assert torch.equal(model.generate(ids, assistant_model=draft, **options), model.generate(ids, **options))


@KINDS
def test_gradients_are_those_of_eager(kind: str) -> None:
    ids, mask, positions = padded(LENGTHS, "right")
    labels = ids.masked_fill(mask == 0, -100)
    grads = []
    with torch.enable_grad():
        for implementation in ("detattn", "eager"):
            model = decoder(kind, implementation).train()
            model(ids, attention_mask=mask, position_ids=positions, labels=labels).loss.backward()
            grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    assert ("sinks" in " ".join(grads[0])) == (kind == "gpt_oss")
    for name, g in grads[1].items():
        assert float((grads[0][name] - g).norm()) <= 1e-4 * float(g.norm()) + 1e-7, name


def test_encoder_and_cross_attention() -> None:
    ids, mask, _ = padded(LENGTHS, "right")
    for kind, options in (("bert", {}), ("modernbert", {"local_attention": 8, "global_attn_every_n_layers": 2})):
        a, b = (
            encoder(kind, i, **options)(ids, attention_mask=mask).last_hidden_state[mask.bool()]
            for i in ("detattn", "eager")
        )
        assert close(a, b), kind
    shape = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "d_model": 64, "encoder_layers": 1}
    shape |= {"decoder_layers": 1, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
    a, b = (
        encoder("bart", i, **shape)(ids, attention_mask=mask, decoder_input_ids=tokens(3, 7)).last_hidden_state
        for i in ("detattn", "eager")
    )
    assert close(a, b)


def test_autocast_and_half() -> None:
    ids = tokens(2, 20)
    want = decoder("llama", "eager")(ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        a = decoder("llama")(ids).logits
    b = decoder("llama", dtype=torch.bfloat16)(ids).logits
    assert all(float((x.float() - want).norm() / want.norm()) < 0.05 for x in (a, b))


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_compiled_is_eager_mode(kind: str) -> None:
    model = decoder(kind)
    ids, mask, positions = padded(LENGTHS, "left")
    torch._dynamo.reset()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    for x in ({"attention_mask": mask, "position_ids": positions}, {"position_ids": torch.arange(19)[None]}):
        a = model(ids, use_cache=False, **x).logits
        b = run(ids, use_cache=False, **x).logits
        keep = x.get("attention_mask", torch.ones_like(ids)).bool()
        assert close(b[keep], a[keep])


def test_set_attn_implementation() -> None:
    model = decoder("llama", "eager")
    model.set_attn_implementation(register())
    assert model.config._attn_implementation == NAME
    ids = tokens(1, 9)
    assert same_bits(model(ids).logits, decoder("llama")(ids).logits)


def test_the_mask_function_is_what_keeps_padding_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the padding tests: without the mask function they must fail."""
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, NAME, lambda **_: None)
    ids, mask, _ = padded(LENGTHS, "left")
    a, b = (decoder("llama", i)(ids, attention_mask=mask).logits[mask.bool()] for i in ("detattn", "eager"))
    assert not close(a, b)


def test_what_cannot_be_honoured_raises() -> None:
    model, ids = decoder("llama"), tokens(1, 6)
    with pytest.raises(NotImplementedError, match="2-D padding mask"):
        model(ids, attention_mask=torch.ones(1, 1, 6, 6, dtype=torch.bool))
    with pytest.raises(NotImplementedError, match="head_mask"):
        model(ids, head_mask=torch.ones(4))
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    model(ids)
    with pytest.raises(NotImplementedError, match="dropout"):
        model.train()(ids)
    with pytest.raises((NotImplementedError, ValueError), match="output_attentions"):
        decoder("llama")(ids, output_attentions=True)
