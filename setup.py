"""Builds the compiled libraries: the CPU one everywhere, the CUDA one wherever nvcc is found.

Kernels include no torch header, so nvcc and the per-instruction-set C++ units are compiled here directly, with any
PyTorch installed (a CPU-only one too); only ``csrc/bindings.cpp`` sees PyTorch, through its stable ABI.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import setup
from torch.utils import cpp_extension

ROOT = Path(__file__).parent.resolve()
CSRC = ROOT / "csrc"
TORCH_2_11 = "-DTORCH_TARGET_VERSION=0x020b000000000000"
# Contraction off and no fast-math: a fused multiply-add is written where one is meant, so the bits are the source's.
CXX = ["-O3", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra"]
CXX += os.environ.get("DETATTN_CXXFLAGS", "").split()
NVCC = ["-O3", "-std=c++20", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-fmad=false", "-Xptxas", "-v"]
ISA = {
    "baseline": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"],
}


def load_contract():
    spec = importlib.util.spec_from_file_location("_detattn_contract", ROOT / "src/detattn/contract.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def cuda_home() -> Path | None:
    """The toolkit's folder. PyTorch's own search gives up when PyTorch was built without CUDA."""
    if os.environ.get("CUDA_HOME"):
        return Path(os.environ["CUDA_HOME"])
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    # A wrapper script may stand on the path, so nvcc is asked where it lives.
    dry = subprocess.run(
        [nvcc, "--dryrun", "-c", "-x", "cu", os.devnull, "-o", os.devnull], capture_output=True, text=True
    )
    top = re.search(r"^#\$ TOP=(.*)$", dry.stderr, re.MULTILINE)
    return Path(top.group(1).strip()).resolve() if top else None


def newest(*folders: Path) -> float:
    return max(f.stat().st_mtime for folder in folders for f in folder.iterdir() if f.is_file())


class Build(cpp_extension.BuildExtension):
    """Compiles the units that need flags of their own, then lets PyTorch's builder link them with the bindings."""

    def build_extension(self, ext) -> None:
        temp = Path(self.build_temp).resolve() / ext.name
        temp.mkdir(parents=True, exist_ok=True)
        checks = "\n".join(
            f'static_assert(detattn::{name} == {value!r}, "contract.h and contract.py differ: {name}");'
            for name, value in load_contract().constants().items()
        )
        generated = temp / "contract_check.inc"
        if not generated.exists() or generated.read_text() != checks:
            generated.write_text(checks)
        ext.include_dirs.append(str(temp))
        stamp = newest(CSRC, CSRC / "cpu") if ext.name == "detattn._C" else newest(CSRC, CSRC / "cuda")
        stamp = max(stamp, Path(__file__).stat().st_mtime)

        def compile_unit(unit: tuple[Path, list[str]]) -> str:
            source, command = unit
            target = temp / (source.stem + ".o")
            log = target.with_suffix(".log")
            if not target.exists() or target.stat().st_mtime < stamp:
                done = subprocess.run([*command, "-c", str(source), "-o", str(target)], capture_output=True, text=True)
                log.write_text(done.stdout + done.stderr)
                if done.returncode:
                    raise RuntimeError(f"{source.name} does not compile:\n{done.stdout}{done.stderr}")
            return str(target)

        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
            ext.extra_objects.extend(pool.map(compile_unit, ext.units))
        shared, self.build_temp = self.build_temp, str(temp)  # both libraries compile the bindings, each its own way
        super().build_extension(ext)
        self.build_temp = shared


def extension(name: str, units: list[tuple[Path, list[str]]], **kwargs):
    ext = cpp_extension.CppExtension(
        name,
        ["csrc/bindings.cpp"],
        include_dirs=[str(CSRC), *kwargs.pop("include_dirs", [])],
        extra_compile_args={"cxx": [*CXX, "-Wno-unused-parameter", TORCH_2_11, *kwargs.pop("defines", [])]},
        extra_link_args=["-Wl,--exclude-libs,ALL", "-s"] if sys.platform == "linux" else [],
        py_limited_api=True,
        **kwargs,
    )
    ext.units = units
    ext.depends = [str(p) for p in sorted(CSRC.rglob("*.*"))]
    return ext


def cpu_extension():
    isas = list(ISA) if platform.machine().lower() in ("x86_64", "amd64") else ["baseline"]
    cxx = os.environ.get("CXX", "c++")
    units = [(CSRC / "cpu" / "attention.cpp", [cxx, *CXX, f"-I{CSRC}"])]
    units += [(CSRC / "cpu" / f"isa_{isa}.cpp", [cxx, *CXX, f"-I{CSRC}", *ISA[isa]]) for isa in isas]
    return extension("detattn._C", units)


def cuda_extension():
    home = cuda_home()
    sources = sorted((CSRC / "cuda").glob("*.cu"))
    if home is None or not sources:
        print("detattn: nvcc was not found, so only the CPU library is built", file=sys.stderr)
        return None
    arch = ["-gencode=arch=compute_90a,code=sm_90a"]
    units = [(s, [str(home / "bin" / "nvcc"), *NVCC, *arch, f"-I{CSRC}"]) for s in sources]
    return extension(
        "detattn._C_cuda",
        units,
        defines=["-DDETATTN_CUDA", "-DUSE_CUDA"],
        include_dirs=[str(home / "include")],
        library_dirs=[str(home / "lib64"), str(home / "lib")],
        libraries=["cudart_static", "rt", "dl", "pthread"],
    )


setup(
    ext_modules=[e for e in (cpu_extension(), cuda_extension()) if e is not None],
    cmdclass={"build_ext": Build.with_options(use_ninja=True)},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
