"""The boundaries of the house: what may stand where, in sources and in built libraries."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CSRC = sorted(p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".h", ".cpp", ".cu", ".cuh"})
PYTHON = sorted((ROOT / "src" / "detattn").rglob("*.py"))


def code(path: Path) -> str:
    """A source without its comments."""
    text = path.read_text()
    if path.suffix == ".py":
        return re.sub(r"#.*", "", text)
    return re.sub(r"//.*|/\*.*?\*/", "", text, flags=re.DOTALL if "/*" in text else 0)


def offenders(paths: list[Path], pattern: str, allowed: set[str] = frozenset()) -> list[str]:  # type: ignore[assignment]
    return [p.name for p in paths if p.name not in allowed and re.search(pattern, code(p))]


BANS = {
    "torch headers outside the bindings": (CSRC, r"#include\s*[<\"](torch|ATen|c10)/", {"bindings.cpp"}),
    "asm outside the instruction wrappers": (
        [p for p in CSRC if p.suffix in {".cu", ".cuh"}],
        r"\basm\b",
        {"ptx.cuh", "wgmma.cuh"},
    ),
    "floating-point atomics": (
        CSRC,
        r"atomicAdd\s*\(\s*\(?\s*(float|double|__half|__nv_bfloat)|red(\.\w+)*\.add\.(f|bf)",
        set(),
    ),
    "reductions into memory": (CSRC, r"cp\.reduce|\.reduce\.async|red\.global", {"ptx.cuh"}),
    "additions whose order nobody proves": (CSRC, r"bulk_add_in_turn", {"ptx.cuh", "bwd_sm90.cuh"}),
    "fast-math": ([*CSRC, ROOT / "setup.py"], r"fast.?math|Ofast|--use_fast", set()),
    "process exits in kernels": (CSRC, r"\b(exit|abort|printf)\s*\(", set()),
    "the environment on the numeric path": (
        [p for p in PYTHON if p.parent.name != "audit"],
        r"os\.environ|getenv",
        set(),
    ),
    "the environment in kernels": (CSRC, r"getenv", set()),
    "autotuning": (PYTHON, r"triton\.autotune|autotune\(", set()),
    "managed memory": (CSRC, r"cudaMallocManaged", set()),
    "optional packages at the top level": (PYTHON, r"^(import|from) (triton|transformers)\b", set()),
}


@pytest.mark.parametrize(("paths", "pattern", "allowed"), BANS.values(), ids=BANS)
def test_banned(paths: list[Path], pattern: str, allowed: set[str]) -> None:
    assert paths
    assert offenders(paths, pattern, allowed) == []


PLANTS = {
    "torch headers outside the bindings": "#include <torch/extension.h>",
    "asm outside the instruction wrappers": 'asm volatile("nop;");',
    "floating-point atomics": "atomicAdd((float*)p, x);",
    "reductions into memory": "cp.reduce.async.bulk",
    "additions whose order nobody proves": "ptx::bulk_add_in_turn(sum, dq, bytes);",
    "fast-math": "-ffast-math",
    "process exits in kernels": "exit(1);",
    "the environment on the numeric path": "os.environ['X']",
    "the environment in kernels": 'getenv("X")',
    "autotuning": "@triton.autotune(configs)",
    "managed memory": "cudaMallocManaged(&p, n);",
    "optional packages at the top level": "import triton",
}


@pytest.mark.parametrize("ban", BANS)
def test_the_bans_find_what_they_ban(ban: str, tmp_path: Path) -> None:
    paths, pattern, _ = BANS[ban]
    planted = tmp_path / f"planted{paths[0].suffix}"
    planted.write_text(PLANTS[ban] + "\n")
    assert offenders([planted], pattern) == [planted.name]


def test_asm_in_the_cpu_code_only_sets_the_float_mode() -> None:
    found = {p.name for p in CSRC if p.suffix in {".h", ".cpp"} and re.search(r"\basm\b", code(p))}
    assert found <= {"attention.cpp"}


@pytest.mark.parametrize("path", [*CSRC, *PYTHON], ids=lambda p: str(p.relative_to(ROOT)))
def test_files_stay_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 540


def test_the_audit_needs_nothing_but_torch() -> None:
    bad = [
        p.name
        for p in (ROOT / "src" / "detattn" / "audit").rglob("*.py")
        if re.search(r"^(from|import) (?!\.|__future__|torch\b|detattn\b)(\w+)", p.read_text(), re.MULTILINE)
        and any(
            m not in sys.stdlib_module_names
            for m in re.findall(
                r"^(?:from|import) (?!\.|__future__|torch\b|detattn\b)(\w+)", p.read_text(), re.MULTILINE
            )
        )
    ]
    assert bad == []


def test_importing_needs_no_gpu_and_no_optional_package() -> None:
    script = (
        "import sys; sys.modules['triton'] = sys.modules['transformers'] = None; "
        "import detattn, detattn.audit, detattn.harness, torch; "
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm here")
def test_built_libraries_use_the_stable_abi_alone() -> None:
    libraries = sorted((ROOT / "src" / "detattn").glob("*.so"))
    assert libraries
    for library in libraries:
        dump = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
        symbols = [line.split()[-1] for line in dump.stdout.splitlines()]
        foreign = [s for s in symbols if re.match(r"_ZN?K?(2at|3c10|5torch)", s) or s.startswith("Py")]
        assert foreign == [], (library.name, foreign)


def test_no_spills_in_the_kernels() -> None:
    """ptxas reports what the last build spilled to local memory."""
    logs = sorted((ROOT / "build").rglob("detattn._C_cuda/*.log"))
    if not logs:
        pytest.skip("no CUDA library was built here")
    spilled = [
        (log.name, line.strip())
        for log in logs
        for line in log.read_text().splitlines()
        if "spill" in line and "0 bytes spill stores, 0 bytes spill loads" not in line
    ]
    assert spilled == []


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")
@pytest.mark.parametrize("source", sorted((ROOT / "csrc" / "cuda").glob("*.cu")), ids=lambda p: p.name)
def test_cuda_sources_are_valid_for_other_architectures(source: Path, tmp_path: Path) -> None:
    """The language, not the instructions: the front end takes them for sm_80; machine code is made for sm_90a alone."""
    command = ["nvcc", "-std=c++20", "-ptx", "-arch=compute_80", "-Xcicc", "-O0", f"-I{ROOT / 'csrc'}", str(source)]
    done = subprocess.run([*command, "-o", str(tmp_path / "out.ptx")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
