"""The attention implementation ``detattn`` for HuggingFace transformers 5: an attention function and a mask function.

Importing this module registers both. Without a mask function of the same name transformers hands every attention
function ``None``: padding, and the unwritten slots of a static cache, would then be attended in silence.

What the mask function returns is no mask but a *plan*, a 4-D int32 tensor: transformers passes 4-D masks on untouched,
also through its second round of mask preparation in ``generate``, and the dtype tells a plan from a user's mask. What
must be known without reading a GPU's memory is in the plan's shape:

- dim 1: 1, plus 1 for a sliding window, plus 2 where attention is bidirectional;
- dim 2: 1, the queries are the last rows of the keys; 2, they end before (a static cache's unwritten slots follow);
  3, packed sequences;
- dim 3: the number of keys in use, then for each key whether it is valid, unless all are; of packed sequences, their
  offsets.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..api import attention, attention_varlen

try:
    from transformers import AttentionInterface, AttentionMaskInterface
except ImportError as error:
    raise ImportError(
        "detattn.integrations.transformers needs HuggingFace transformers 5.17 or later: "
        "pip install 'transformers>=5.17'"
    ) from error

__all__ = ["NAME", "register"]

NAME = "detattn"
_WINDOW, _BIDIRECTIONAL = 1, 2
_AT_END, _FLOATING, _PACKED = 1, 2, 3
_REFUSED = ("position_bias", "attention_bias", "alibi", "head_mask", "block_mask", "score_mod", "mask_mod")


def register() -> str:
    """Registers attention and mask function under the name ``detattn``, which it returns. May be called again.

    Example:
        >>> from detattn.integrations.transformers import register
        >>> register()
        'detattn'
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_plan)
    return NAME


def _refuse(came: str, advice: str) -> NotImplementedError:
    return NotImplementedError(f"detattn: {came} is not supported by the attention implementation 'detattn'. {advice}")


class _Pattern:
    """What a mask function of transformers means, read from how it was composed."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.causal = self.window = False
        self.segments: Tensor | None = None
        self._read(function)

    def _read(self, function: Callable[..., Any]) -> None:
        name = function.__qualname__
        held = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        if name == "causal_mask_function":
            self.causal = True
        elif name == "and_masks.<locals>.and_mask":
            for part in held["mask_functions"].cell_contents:
                self._read(part)
        elif name in (
            "sliding_window_overlay.<locals>.inner_mask",
            "sliding_window_bidirectional_overlay.<locals>.inner_mask",
        ):
            self.window = True
        elif name == "packed_sequence_mask_function.<locals>.inner_mask":
            self.segments = held["packed_sequence_mask"].cell_contents
        elif name == "remap_positions_for_packed_sequence.<locals>.inner_mask":
            self._read(held["mask_function"].cell_contents)
        elif name != "bidirectional_mask_function":
            raise _refuse(
                f"the mask pattern {name!r} (chunked, blockwise or custom)",
                "Causal, bidirectional, sliding-window, padded and packed masks are; else use 'eager' or 'sdpa'.",
            )


def _traced_starts(
    function: Callable[..., Any], batch: int, length: int, config: Any, device: torch.device | str
) -> Tensor:
    """Where sequences start in a packed mask function. Compiled code cannot look into a closure, so it is asked whether
    each token sees the one before, and whether none sees the one after."""
    if function.__name__ == "or_mask" or getattr(config, "attention_chunk_size", None) is not None:
        raise _refuse("a chunked or blockwise mask pattern", "Use 'eager' or 'sdpa' for this model.")
    rows = torch.arange(batch, device=device)[:, None]
    head, later = torch.zeros_like(rows), torch.arange(1, length, device=device)[None]
    ahead = function(rows, head, later - 1, later)
    torch._assert_async(~ahead.any(), "detattn: a blockwise mask pattern is not supported; use 'eager' or 'sdpa'")
    return torch.nn.functional.pad(~function(rows, head, later, later - 1).expand(batch, -1), (1, 0), value=True)


def _offsets(starts: Tensor) -> Tensor:
    """cu_seqlens of the rows where a sequence starts. Compiled code cannot size a tensor by its values, so there empty
    sequences at the end fill it up."""
    flat = starts.reshape(-1)
    rows = flat.shape[0]
    if torch.compiler.is_compiling():
        index = torch.arange(rows, dtype=torch.int32, device=flat.device)
        first = torch.where(flat, index, rows).sort().values
    else:
        first = flat.nonzero()[:, 0].to(torch.int32)
    return torch.nn.functional.pad(first, (0, 1), value=rows).to(torch.int32)


def _starts(ids: Tensor, step: int) -> Tensor:
    """Where ids stop advancing by ``step``; the first column always starts a sequence."""
    return torch.nn.functional.pad(ids.diff(dim=-1) != step, (1, 0), value=True)


def attention_plan(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **more: Any,
) -> Tensor | None:
    """The mask function: a plan, or None for plain causal attention of the last rows."""
    if use_vmap:
        raise _refuse(
            "a custom mask function (or_mask_function, and_mask_function)", "Use 'eager' or 'sdpa' for this call."
        )
    assert mask_function is not None
    starts: Tensor | None = None
    if torch.compiler.is_compiling():
        causal, window = "allow_is_bidirectional_skip" not in more, "local_size" in more
        if (
            causal
            and attention_mask is None
            and isinstance(q_offset, int)
            and q_offset == 0
            and q_length == kv_length > 1
        ):
            starts = _traced_starts(mask_function, batch_size, q_length, more.get("config"), device)
    else:
        pattern = _Pattern(mask_function)
        causal, window = pattern.causal, pattern.window
        starts = None if pattern.segments is None else _starts(pattern.segments, 0)
    traits = 1 + _WINDOW * window + _BIDIRECTIONAL * (not causal)
    if starts is not None:
        offsets = _offsets(starts)
        return offsets.expand(1, traits, _PACKED, offsets.shape[0])
    used = q_offset - kv_offset + q_length
    at_end = not causal or (not isinstance(used, Tensor) and used == kv_length)
    if attention_mask is None and at_end and traits == 1:
        return None
    if isinstance(used, int) or not causal:
        count = torch.full((1, 1), kv_length if not causal else int(used), dtype=torch.int32, device=device)
    else:
        count = used.to(torch.int32).reshape(1, 1)
    if attention_mask is None and at_end:
        return count[:, None, None].expand(1, traits, _AT_END, 1)
    keys = torch.arange(kv_length, dtype=torch.int32, device=device)[None] < count
    if attention_mask is not None:
        missing = kv_length + kv_offset - attention_mask.shape[-1]
        given = torch.nn.functional.pad(attention_mask, (0, missing)) if missing > 0 else attention_mask
        keys = keys & given[:, kv_offset : kv_offset + kv_length].bool()
    keys = keys.expand(batch_size, kv_length)
    plan = torch.cat([count.expand(batch_size, 1), keys.to(torch.int32)], dim=-1)
    return plan[:, None, None].expand(batch_size, traits, _AT_END if at_end else _FLOATING, kv_length + 1)


_last: tuple[weakref.ref[Tensor], int, Tensor | None] | None = None


def _packed_positions(position_ids: Tensor, batch: int) -> Tensor | None:
    """cu_seqlens where positions restart inside a row, else None. All layers of a forward ask about the same tensor."""
    global _last
    if torch.compiler.is_compiling():
        return _offsets(_starts(position_ids.expand(batch, -1), 1))
    if _last is not None and _last[0]() is position_ids and _last[1] == position_ids._version:
        return _last[2]
    starts = _starts(position_ids.expand(batch, -1), 1)
    offsets = _offsets(starts) if bool(starts[:, 1:].any()) else None
    _last = (weakref.ref(position_ids), position_ids._version, offsets)
    return offsets


def _varlen(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, options: dict[str, Any]) -> Tensor:
    rq, rk, rv = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    out = attention_varlen(rq, rk, rv, cu_q.to(torch.int32), cu_k.to(torch.int32), **options)
    assert isinstance(out, Tensor)
    return out.reshape(q.shape[0], q.shape[2], *out.shape[1:])


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function: q ``[B, Hq, L, D]``, k and v ``[B, Hkv, S, D]`` in, ``[B, L, Hq, D]`` out."""
    if dropout and module.training:
        raise _refuse(
            f"attention dropout ({dropout}) in training", "Set attention_dropout=0.0 in the config, or model.eval()."
        )
    if kwargs.get("output_attentions"):
        raise _refuse("output_attentions=True", "The probabilities are never formed; use 'eager' to look at them.")
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise _refuse(f"{name} (a bias or a mask of each score)", "Use 'eager' for this model.")
    if value.shape[-1] != key.shape[-1]:
        raise _refuse(f"head dims {key.shape[-1]} of keys and {value.shape[-1]} of values", "Use 'eager' or 'sdpa'.")
    plan = attention_mask
    if plan is not None and (plan.dtype is not torch.int32 or plan.dim() != 4):
        raise _refuse(
            f"an attention mask {tuple(plan.shape)} of {plan.dtype}",
            "Pass a 2-D padding mask [batch, keys], or packed sequences by position_ids or cu_seq_lens_q/k.",
        )
    traits = 0 if plan is None else plan.shape[1] - 1
    if plan is not None:
        causal = not traits & _BIDIRECTIONAL
    else:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if traits & _WINDOW and sliding_window is None:
        raise _refuse(
            f"a sliding-window mask whose width {type(module).__name__} does not pass on", "Use 'eager' or 'sdpa'."
        )
    options: dict[str, Any] = {"causal": causal, "scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux}
    if sliding_window is not None:
        # transformers counts the query itself.
        options["window_left"] = sliding_window - 1
        options["window_right"] = -1 if causal else sliding_window - 1
    length, keys = query.shape[2], key.shape[2]

    cu_q, cu_k = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if cu_q is not None and cu_k is not None:
        if plan is not None and plan.shape[2] != _PACKED:
            raise _refuse(
                "a padding mask beside cu_seq_lens_q", "Packed sequences have no padding; pass one of the two."
            )
        return _varlen(query, key, value, cu_q, cu_k, options), None
    if plan is not None and plan.shape[2] == _PACKED:
        offsets = plan[0, 0, 0].contiguous()
        return _varlen(query, key, value, offsets, offsets, options), None
    positions = kwargs.get("position_ids")
    unmasked = plan is None or plan.shape[3] == 1
    if unmasked and causal and positions is not None and positions.dim() == 2 and length == keys > 1:
        # A model that shows its positions to the attention function but not to the mask (gpt-oss).
        restarts = _packed_positions(positions, query.shape[0])
        if restarts is not None:
            return _varlen(query, key, value, restarts, restarts, options), None
    if plan is None or unmasked:
        return _dense(query, key, value, options), None

    if plan.shape[3] != keys + 1:
        raise ValueError(
            f"detattn: the mask was made for {plan.shape[3] - 1} keys, {keys} came; pass a mask of the keys' length"
        )
    valid = plan[:, 0, 0, 1:].bool()
    if plan.shape[2] == _FLOATING:
        if query.device.type == "cpu" and not torch.compiler.is_compiling():
            used = int(plan[0, 0, 0, 0])
            key, value, valid = key[:, :, :used], value[:, :, :used], valid[:, :used]
        elif length > 1 or (sliding_window is not None and sliding_window < keys):
            # The last key in use moves to the end, where causal attention and windows are aligned; the slots that
            # nobody wrote come first, as padding.
            index = (torch.arange(keys, device=key.device) + plan[0, 0, 0, 0]) % keys
            key, value, valid = key[:, :, index], value[:, :, index], valid[:, index]
    return _dense(query, key, value, options, key_padding_mask=valid), None


def _dense(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], key_padding_mask: Tensor | None = None) -> Tensor:
    out = attention(q, k, v, key_padding_mask=key_padding_mask, **options)
    assert isinstance(out, Tensor)
    return out.transpose(1, 2)


register()
