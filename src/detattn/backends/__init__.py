"""The registry: which backend serves a call, and why the others do not."""

from __future__ import annotations

from functools import lru_cache

from .base import Backend, Layout, Options, Sequences, Spec, UnsupportedError
from .native import CpuBackend, CudaBackend
from .reference import ReferenceBackend

__all__ = ["Backend", "Layout", "Options", "Sequences", "Spec", "UnsupportedError", "explain", "names", "select"]

_AUTOMATIC: tuple[Backend, ...] = (CudaBackend(), CpuBackend())
_BY_NAME: dict[str, Backend] = {b.name: b for b in (*_AUTOMATIC, ReferenceBackend())}


def names() -> tuple[str, ...]:
    """Every backend's name; ``reference`` serves only when asked for by name."""
    return tuple(_BY_NAME)


def _reasons(spec: Spec) -> list[tuple[str, str | None]]:
    return [(b.name, b.supports(spec)) for b in _BY_NAME.values()]


@lru_cache(maxsize=4096)
def select(spec: Spec, name: str | None = None) -> Backend:
    """The backend that serves ``spec``: the named one, or the first automatic one that supports it.

    Raises:
        ValueError: ``name`` is no backend.
        UnsupportedError: the named backend, or every automatic one, cannot; the message gives each reason.
    """
    if name is not None:
        if name not in _BY_NAME:
            raise ValueError(f"detattn: no backend named {name!r}; there are {', '.join(_BY_NAME)}")
        reason = _BY_NAME[name].supports(spec)
        if reason is None:
            return _BY_NAME[name]
        raise UnsupportedError(f"detattn: backend {name!r} does not serve this call: {reason}")
    for backend in _AUTOMATIC:
        if backend.supports(spec) is None:
            return backend
    lines = "\n".join(f"  {n}: {reason or 'serves it when asked for by name'}" for n, reason in _reasons(spec))
    raise UnsupportedError(
        f'detattn: no backend serves {describe(spec)}\n{lines}\n(backend="reference" is slow and serves any device)'
    )


def describe(spec: Spec) -> str:
    """One line that names what the spec asks for."""
    extras = [n for n in ("key_padding_mask", "sinks", "window", "softcap", "backward") if getattr(spec, n)]
    arch = "" if spec.arch is None else f" sm_{spec.arch[0]}{spec.arch[1]}"
    with_ = f" with {', '.join(extras)}" if extras else ""
    return f"{spec.layout} attention on {spec.device_type}{arch}, {spec.dtype}, head dim {spec.head_dim}{with_}"


def explain(spec: Spec) -> str:
    """Every backend's answer to ``spec``, one a line, the chosen one marked.

    Example:
        >>> import torch, detattn
        >>> spec = detattn.Spec("cpu", None, torch.float32, 64, "dense", False, False, False, False, True)
        >>> print(detattn.explain(spec))  # doctest: +ELLIPSIS
        dense attention on cpu, torch.float32, head dim 64 with backward
        ...
    """
    chosen = next((b.name for b in _AUTOMATIC if b.supports(spec) is None), None)
    lines = [describe(spec)]
    for name, reason in _reasons(spec):
        verdict = "chosen" if name == chosen else "supports it" if reason is None else f"no: {reason}"
        lines.append(f"  {name:10} {verdict}")
    return "\n".join(lines)
