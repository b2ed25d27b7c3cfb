"""The command ``detattn``: ``detattn audit`` and ``detattn explain``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Sequence

import torch

from . import checks_markdown
from .checks import CHECKS
from .engine import audit, select
from .report import STATUSES
from .targets import NAMES, Target, named

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
COULD_NOT_RUN = 2

_EPILOG = "Exit status: 0 every applicable check holds, 1 a promise is violated, 2 the audit could not tell.\n\n"
_EPILOG += "\n".join(f"  {status + ':':<16}{meaning}" for status, meaning in STATUSES.items())


def parser() -> argparse.ArgumentParser:
    """The command line, one sub-command a verb."""
    top = argparse.ArgumentParser(prog="detattn", description="Attention whose bits you can trust.")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="verb")
    a = verbs.add_parser(
        "audit",
        help="check an attention, byte for byte, for every promise",
        description="Checks an attention, byte for byte, for every promise of the contract.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    a.add_argument("--target", default="detattn", help=f"{', '.join(NAMES)}, or module:function (default: detattn)")
    a.add_argument("--backend", help="which backend of detattn (default: the one it chooses itself)")
    a.add_argument("--device", help="cpu, cuda, cuda:1 .. (default: cuda where there is one that the target runs on)")
    a.add_argument("--dtype", default="bfloat16", choices=_DTYPES, help="of the inputs (default: bfloat16)")
    a.add_argument("--checks", help="ids separated by commas (default: all; see --list)")
    a.add_argument("--no-backward", action="store_true", help="compare no gradients")
    a.add_argument("--seed", type=int, default=0, help="of the random inputs (default: 0)")
    a.add_argument("--list", action="store_true", help="print the checks and their controls, run nothing")
    a.add_argument("--json", metavar="FILE", help="also write everything found to FILE (- for standard output alone)")
    a.add_argument("--markdown", action="store_true", help="print markdown tables")
    e = verbs.add_parser("explain", help="which backend serves which call on this machine, and why not the others")
    e.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, cuda:1 ..")
    e.add_argument("--dtype", default="bfloat16", choices=_DTYPES)
    e.add_argument("--head-dim", type=int, default=128)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    Example:
        >>> main(["audit", "--target", "nothing"])
        2
    """
    arguments = parser().parse_args(argv)
    try:
        code = _explain(arguments) if arguments.verb == "explain" else _audit(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return COULD_NOT_RUN
    except Exception:  # Python's own exit status would be 1, which means violated
        traceback.print_exc()
        return COULD_NOT_RUN
    return code


def _fail(error: object) -> int:
    print(f"detattn: {str(error).removeprefix('detattn: ')}", file=sys.stderr)
    return COULD_NOT_RUN


def _bar(done: int, total: int, id: str) -> None:
    """One line on the terminal, rewritten for each check and wiped at the end."""
    width = 24
    full = width * done // max(total, 1)
    line = f"[{'#' * full}{'.' * (width - full)}] {done}/{total} {id}" if done < total else ""
    print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)


def _list(markdown: bool) -> int:
    if markdown:
        print(checks_markdown())
        return 0
    for c in CHECKS.values():
        needs = f"\n    needs    {c.requirements}" if c.requirements else ""
        tensors = "out, lse, gradients" if c.gradients else "out, lse"
        print(f"{c.id}\n    compares {c.text}\n    of       {tensors}\n    control  {c.control}{needs}")
    return 0


def _find(arguments: argparse.Namespace, dtype: torch.dtype) -> tuple[torch.device, Target]:
    """The target, on the device asked for; where none was, on CUDA if it runs there, and the CPU otherwise."""
    sys.path.insert(0, os.getcwd())  # where module:function is mostly looked for
    if arguments.device is None and torch.cuda.is_available():
        device = torch.device("cuda")
        try:
            return device, named(arguments.target, arguments.backend, device, dtype)
        except RuntimeError as refused:
            print(f"detattn: auditing on the CPU, since on cuda: {refused}", file=sys.stderr)
    device = torch.device(arguments.device or "cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("there is no CUDA device; --device cpu audits on the CPU")
    return device, named(arguments.target, arguments.backend, device, dtype)


def _audit(arguments: argparse.Namespace) -> int:
    if arguments.list:
        return _list(arguments.markdown)
    dtype = _DTYPES[arguments.dtype]
    ids = [id.strip() for id in arguments.checks.split(",") if id.strip()] if arguments.checks else None
    try:
        select(ids)
        device, target = _find(arguments, dtype)
    except (ValueError, TypeError, RuntimeError, ImportError, AttributeError) as error:
        return _fail(error)
    report = audit(
        target,
        checks=ids,
        device=device,
        dtype=dtype,
        backward=False if arguments.no_backward else None,
        seed=arguments.seed,
        progress=_bar if sys.stderr.isatty() else None,
    )
    document = json.dumps(report.to_dict(), indent=2)
    if arguments.json == "-":
        print(document)
        return report.exit_code
    print(report.markdown() if arguments.markdown else report)
    if arguments.json:
        try:
            with open(arguments.json, "w") as file:
                file.write(document + "\n")
        except OSError as error:
            return _fail(error)
    return report.exit_code


def _explain(arguments: argparse.Namespace) -> int:
    import detattn

    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        return _fail("there is no CUDA device; --device cpu explains the CPU")
    arch = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    dtype = _DTYPES[arguments.dtype]
    for layout in ("dense", "varlen", "paged"):
        for backward in (False, True) if layout != "paged" else (False,):
            spec = detattn.Spec(
                device.type, arch, dtype, arguments.head_dim, layout, False, False, False, False, backward
            )
            print(detattn.explain(spec))
    return 0
