"""Fixtures: the device, the backends that run on it, and memory that shows what nobody wrote."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import detattn


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", choices=("cpu", "cuda"), help="the device that the tests run on")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        on = {"cpu": ("cpu", "reference"), "cuda": ("cuda",)}
        metafunc.parametrize("backend", on[metafunc.config.getoption("--device")])


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.config.getoption("--device")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    return name


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fresh outputs and workspaces hold NaN, so an element that a kernel does not write fails the test."""
    from detattn import _native

    ops = [torch.ops.detattn_C.poison_cpu] + ([torch.ops.detattn_C.poison_cuda] if _native.CUDA_MISSING is None else [])
    before = [op(True) for op in ops]
    yield
    for op, value in zip(ops, before, strict=True):
        op(value)


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts back the number of threads that a test changes."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def serves(backend: str, device: str, dtype: torch.dtype, head_dim: int = 64, backward: bool = False) -> bool:
    """Whether a backend takes such a dense call; tests of what it cannot do are skipped by it."""
    arch = torch.cuda.get_device_capability() if device == "cuda" else None
    spec = detattn.Spec(device, arch, dtype, head_dim, "dense", False, False, False, False, backward)
    return detattn.backends._BY_NAME[backend].supports(spec) is None
