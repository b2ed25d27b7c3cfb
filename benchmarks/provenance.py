"""Where a number comes from: machine, versions, commit, contract."""

from __future__ import annotations

import datetime
import platform
import subprocess
from pathlib import Path

import torch

import detattn
from detattn import contract


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def provenance() -> dict[str, object]:
    """What a results file says about itself."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    facts: dict[str, object] = {
        "date": datetime.date.today().isoformat(),
        "detattn": detattn.__version__,
        "commit": commit.stdout.strip() or "unknown",
        "contract_version": contract.VERSION,
        "torch": torch.__version__,
        "cpu": _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cuda"] = torch.version.cuda
        facts["cudnn"] = torch.backends.cudnn.version()
        smi = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.max.sm", "--format=csv,noheader"]
        facts["driver, clock now, highest"] = subprocess.run(
            smi, capture_output=True, text=True, check=False
        ).stdout.strip()
    return facts
