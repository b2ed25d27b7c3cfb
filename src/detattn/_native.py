"""Finds and loads the compiled libraries, and compares their contract with ``contract.py``."""

from __future__ import annotations

from pathlib import Path

import torch

from . import contract

_HERE = Path(__file__).parent


def _load(stem: str) -> str | None:
    """Loads ``stem``'s library; the reason in words where it cannot be had."""
    found = sorted(_HERE.glob(f"{stem}.*so"))
    if not found:
        return f"the compiled library {stem} is not part of this installation (no nvcc when it was built?)"
    torch.ops.load_library(found[0])  # type: ignore[no-untyped-call]
    return None


def _check_contract() -> None:
    built = torch.ops.detattn_C.contract()
    wanted = contract.constants()
    if list(built) != [float(x) for x in wanted.values()]:
        differ = ", ".join(
            f"{n}: built {b}, contract.py {w}"
            for (n, w), b in zip(wanted.items(), built, strict=False)
            if b != float(w)
        )
        raise ImportError(
            f"detattn's compiled library follows another contract than contract.py ({differ}); rebuild it"
        )


CPU_MISSING: str | None = _load("_C")
if CPU_MISSING is None:
    _check_contract()
    CUDA_MISSING: str | None = _load("_C_cuda")
else:
    CUDA_MISSING = CPU_MISSING
