"""The contract has one home: contract.py, contract.h and the compiled libraries cannot disagree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from detattn import contract

ROOT = Path(__file__).parent.parent


def test_compiled_constants() -> None:
    assert list(torch.ops.detattn_C.contract()) == [float(x) for x in contract.constants().values()]


def test_header_constants() -> None:
    text = (ROOT / "csrc" / "contract.h").read_text()
    for name, value in contract.constants().items():
        if name.startswith("kChunks."):
            continue
        found = re.search(rf"constexpr \w+ {name} = ([\d.]+)f?;", text)
        assert found is not None and float(found[1]) == value, name
    steps = re.search(r"kChunks = \{\{(.*)\}\};", text)
    assert steps is not None
    pairs = re.findall(r"\{(\w+), (\d+)\}", steps[1])
    wanted = [
        ("kUnbounded" if end == contract.UNBOUNDED else str(end), str(keys)) for end, keys in contract.CHUNK_SCHEDULE
    ]
    assert pairs == wanted


@pytest.mark.parametrize("keys", [0, 1, 127, 128, 1023, 1024, 1025, 32767, 32768, 32769, 34_816, 100_000])
def test_chunks_tile_the_keys(keys: int) -> None:
    parts = list(contract.chunks(keys))
    assert [b for b, _ in parts[1:]] == [e for _, e in parts[:-1]]
    assert (parts[0][0], parts[-1][1]) == (0, keys) if keys else parts == []


def test_chunk_boundaries_do_not_move_with_the_length() -> None:
    long = {b for b, _ in contract.chunks(100_000)}
    for keys in (1, 600, 9000, 40_000):
        assert {b for b, _ in contract.chunks(keys)} <= long


def test_chunks_hold_whole_blocks() -> None:
    for head_dim in (64, 128, 129, 256):
        block = contract.block_keys(head_dim)
        assert all(b % block == 0 for b, _ in contract.chunks(100_000))


def test_promises_have_distinct_ids() -> None:
    assert len({p.id for p in contract.PROMISES}) == len(contract.PROMISES)
    assert contract.promise("decode").scope == "forward"
    with pytest.raises(KeyError, match="known: rerun"):
        contract.promise("nothing")
