"""What can be audited: any attention function, and the ones known by name."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Attention = Callable[..., "Tensor | tuple[Tensor, Tensor]"]

FEATURES: dict[str, str] = {
    "grouped": "fewer key heads than query heads",
    "bottom-right": "a causal call with fewer queries than keys, the last query seeing every key",
    "padding": "key_padding_mask [B, Skv], True = keep",
    "window": "window_left and window_right",
    "sinks": "sinks [Hq]",
    "lse": "return_lse",
    "packed": "a packed form with cu_seqlens",
    "bounds": "max_seqlen_q and max_seqlen_k of the packed form",
    "paged": "a packed form with block_table",
    "backward": "gradients",
    "compile": "works under torch.compile",
    "graph": "works under CUDA graph capture",
}
"""What a check may need of a target, beyond ``dense(q, k, v, causal=..., scale=...)``."""


@dataclass(frozen=True)
class Target:
    """An attention function and what it offers.

    ``dense`` is called as ``dense(q, k, v, causal=, scale=)`` with q ``[B, Hq, Sq, D]`` and k, v ``[B, Hkv, Skv, D]``;
    the keywords of a feature (``key_padding_mask``, ``window_left`` and ``window_right``, ``sinks``, ``return_lse``)
    are passed where a check needs them. ``packed`` is called as ``packed(q, k, v, cu_seqlens_q, cu_seqlens_k,
    causal=, scale=)`` with q ``[Tq, Hq, D]``, and against a paged cache with ``cu_seqlens_k=None, block_table=,
    seqused_k=`` and k, v ``[num_pages, page_size, Hkv, D]``. Both return ``out`` or ``(out, lse)``, lse being the
    natural logarithm, ``[B, Hq, Sq]`` or ``[Hq, Tq]``. ``lacks`` names the features not offered, each with the reason
    a report prints.

    Example:
        >>> from detattn.audit import Target, audit
        >>> mine = Target.of(my_attention, lacks={"grouped": "as many key heads as query heads"})  # doctest: +SKIP
        >>> print(audit(mine))  # doctest: +SKIP
    """

    name: str
    dense: Attention
    packed: Attention | None = None
    lacks: Mapping[str, str] = field(default_factory=dict)
    page_sizes: tuple[int, ...] = (16, 64, 256)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.lacks) - set(FEATURES))
        if unknown:
            raise ValueError(f"no feature {', '.join(unknown)}; there are {', '.join(FEATURES)}")

    def offers(self, feature: str) -> bool:
        return feature not in self.lacks

    @classmethod
    def of(
        cls,
        dense: Attention,
        packed: Attention | None = None,
        *,
        name: str | None = None,
        lacks: Mapping[str, str] | None = None,
    ) -> Target:
        """A target whose features are read from the parameter names of its functions, and from nothing else.

        Args:
            dense, packed: as in the class.
            name: what reports call it; the function's own name where None.
            lacks: features it does not offer although a signature cannot show it, such as ``grouped``.

        Raises:
            TypeError: ``dense`` has no parameter ``causal`` or ``scale``.
        """
        has = _parameters(dense)
        for needed in ("causal", "scale"):
            if needed not in has:
                raise TypeError(
                    f"{_name(dense)} has no parameter {needed!r}; the audit calls fn(q, k, v, causal=..., scale=...). "
                    "Wrap it in a function that does."
                )
        found = {
            feature: f"{_name(dense)} has no parameter {parameter}"
            for feature, parameter in (
                ("padding", "key_padding_mask"),
                ("window", "window_left"),
                ("sinks", "sinks"),
                ("lse", "return_lse"),
            )
            if parameter not in has
        }
        if packed is None:
            reason = "no packed form was given"
            found.update(packed=reason, bounds=reason, paged=reason)
        else:
            has = _parameters(packed)
            found.update(
                (feature, f"{_name(packed)} has no parameter {parameter}")
                for feature, parameter in (("bounds", "max_seqlen_k"), ("paged", "block_table"))
                if parameter not in has
            )
        return cls(name or _name(dense), dense, packed, {**found, **(lacks or {})})


def _name(fn: Attention) -> str:
    return str(getattr(fn, "__qualname__", None) or type(fn).__qualname__)


def _parameters(fn: Attention) -> set[str]:
    return set(inspect.signature(fn).parameters)


def _visible(
    q: Tensor, k: Tensor, causal: bool, key_padding_mask: Tensor | None, window_left: int = -1, window_right: int = -1
) -> Tensor:
    """The bool mask ``[Sq, Skv]`` or ``[B, 1, Sq, Skv]`` for attentions that take one, bottom-right aligned."""
    queries, keys = q.shape[2], k.shape[2]
    place = torch.arange(keys - queries, keys, device=q.device)[:, None]
    key = torch.arange(keys, device=q.device)
    mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
    if causal:
        mask &= key <= place
    if window_left >= 0:
        mask &= key >= place - window_left
    if window_right >= 0:
        mask &= key <= place + window_right
    return mask if key_padding_mask is None else mask & key_padding_mask[:, None, None]


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
    window_left: int = -1,
    window_right: int = -1,
) -> Tensor:
    """PyTorch's attention called as its users call it.

    ``is_causal`` is aligned top-left, so, as HuggingFace's wrapper does, it is used for square calls alone; one query
    against a cache needs no mask; anything else takes a bool mask.
    """
    square, one = q.shape[2] == k.shape[2], q.shape[2] == 1
    plain = key_padding_mask is None and window_left < 0 and window_right < 0
    mask = (
        None
        if plain and (not causal or square or one)
        else (_visible(q, k, causal, key_padding_mask, window_left, window_right))
    )
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=causal and mask is None and not one,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


_SDPA_LACKS = {
    "sinks": "SDPA has no sinks",
    "lse": "SDPA does not return lse",
    "packed": "SDPA has no packed form",
    "bounds": "SDPA has no packed form",
    "paged": "SDPA has no paged form",
}


def _sdpa_with(backend: SDPBackend) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        with sdpa_kernel([backend]):
            return _sdpa(q, k, v, **options)

    return attention


def _sdpa_flash(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None) -> Tensor:
    """The flash kernel takes no mask tensor; its own bottom-right alignment is asked for by ``causal_lower_right``."""
    from torch.nn.attention.bias import causal_lower_right

    queries, keys = q.shape[2], k.shape[2]
    aligned = causal and queries != keys and queries > 1
    mask: Any = causal_lower_right(queries, keys) if aligned else None
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=causal and not aligned and queries > 1,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )


_flex_compiled: list[Any] = []


def _flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
    window_left: int = -1,
    window_right: int = -1,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """FlexAttention with the mask as a function; compiled on CUDA, where that is its only fused form."""
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    shift = k.shape[2] - q.shape[2]

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        mask = key >= 0
        if causal:
            mask = mask & (key <= query + shift)
        if window_left >= 0:
            mask = mask & (key >= query + shift - window_left)
        if window_right >= 0:
            mask = mask & (key <= query + shift + window_right)
        return mask if key_padding_mask is None else mask & key_padding_mask[b, key]

    blocks = create_block_mask(
        visible,
        None if key_padding_mask is None else q.shape[0],
        None,
        q.shape[2],
        k.shape[2],
        device=q.device,
    )
    run: Any = flex_attention
    if q.is_cuda:
        if not _flex_compiled:
            _flex_compiled.append(torch.compile(flex_attention, dynamic=True))
        run = _flex_compiled[0]
    out, aux = run(
        q,
        k,
        v,
        block_mask=blocks,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    return (out, aux.lse) if return_lse else out


_FLEX_LACKS = {
    "sinks": "FlexAttention has no sinks argument",
    "packed": "packed documents are a mask of the user's in FlexAttention",
    "bounds": "FlexAttention has no max_seqlen",
    "paged": "FlexAttention's paged form is a class of its own",
    "graph": "its block mask is built with looks at the GPU's memory",
    "compile": "on CUDA it is compiled already, on the CPU its compiled form has no lse",
}


def _detattn(backend: str | None, device: torch.device, dtype: torch.dtype) -> Target:
    """This package, with the features that the chosen backend has on this device."""
    import detattn

    def dense(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
        return detattn.attention(q, k, v, backend=backend, **options)

    def packed(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor | None, **options: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        return detattn.attention_varlen(q, k, v, cu_q, cu_k, backend=backend, **options)

    arch = torch.cuda.get_device_capability(device) if device.type == "cuda" else None

    def refusal(**asked: Any) -> str | None:
        spec = detattn.Spec(
            **{
                "device_type": device.type,
                "arch": arch,
                "dtype": dtype,
                "head_dim": 64,
                "layout": "dense",
                "key_padding_mask": False,
                "sinks": False,
                "window": False,
                "softcap": False,
                "backward": False,
                **asked,
            }
        )
        try:
            chosen = detattn.backends.select(spec, backend)
        except detattn.UnsupportedError as refused:
            return str(refused)
        served.append(chosen.name)
        return None

    served: list[str] = []
    reason = refusal()
    if reason is not None:
        raise RuntimeError(reason)
    asked: dict[str, dict[str, Any]] = {
        "padding": {"key_padding_mask": True},
        "window": {"window": True},
        "sinks": {"sinks": True},
        "packed": {"layout": "varlen"},
        "bounds": {"layout": "varlen"},
        "paged": {"layout": "paged"},
        "backward": {"backward": True},
    }
    lacks = {feature: why for feature, spec in asked.items() if (why := refusal(**spec)) is not None}
    return Target(f"detattn ({served[0]})", dense, packed, lacks, page_sizes=(7, 16, 64, 256))


_CUDA_ONLY = ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient")
NAMES = ("detattn", "sdpa", "sdpa-math", *_CUDA_ONLY, "flex")


def named(name: str, backend: str | None, device: torch.device, dtype: torch.dtype) -> Target:
    """The target of that name, or of ``module:function``.

    Args:
        name: one of ``NAMES``, or ``module:function``; what is found there is a function or a ``Target``.
        backend: a backend of detattn; None for every other target.
        device, dtype: what it will be audited with; they decide the features of detattn's backends.

    Raises:
        ValueError: no such target, or a backend for one that has none.
        RuntimeError: the target does not run on that device.
    """
    if name == "detattn":
        return _detattn(backend, device, dtype)
    if backend is not None:
        raise ValueError(f"--backend chooses among detattn's backends; target {name!r} has none")
    if name in _CUDA_ONLY and device.type != "cuda":
        raise RuntimeError(f"target {name} is a CUDA kernel; the device is {device}")
    no_mask = "the flash kernel takes no mask"
    known: dict[str, Callable[[], Target]] = {
        "sdpa": lambda: Target("sdpa", _sdpa, None, _SDPA_LACKS),
        "sdpa-math": lambda: Target("sdpa-math", _sdpa_with(SDPBackend.MATH), None, _SDPA_LACKS),
        "sdpa-efficient": lambda: Target(
            "sdpa-efficient",
            _sdpa_with(SDPBackend.EFFICIENT_ATTENTION),
            None,
            {**_SDPA_LACKS, "grouped": "the efficient kernel has no grouped heads"},
        ),
        "sdpa-cudnn": lambda: Target("sdpa-cudnn", _sdpa_with(SDPBackend.CUDNN_ATTENTION), None, _SDPA_LACKS),
        "sdpa-flash": lambda: Target(
            "sdpa-flash", _sdpa_flash, None, {**_SDPA_LACKS, "padding": no_mask, "window": no_mask}
        ),
        "flex": lambda: Target(
            "flex",
            _flex,
            None,
            {
                **_FLEX_LACKS,
                **({} if device.type == "cuda" else {"backward": "FlexAttention has no backward on the CPU"}),
            },
        ),
    }
    if name in known:
        return known[name]()
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"no target {name!r}; there are {', '.join(NAMES)}, and module:function")
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found if isinstance(found, Target) else Target.of(found, name=name)
