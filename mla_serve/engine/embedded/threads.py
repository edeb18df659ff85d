"""How many CPU threads the engine should compute with."""

from __future__ import annotations

import math
import os
from pathlib import Path

import psutil


def available_threads(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """OMP_NUM_THREADS where it is set, else the physical cores of the host, cut by CPU affinity and by a container's quota.

    `cgroup` is the control group's file (version 2): "QUOTA PERIOD" in microseconds, or "max PERIOD".
    """
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdecimal() and int(asked):
        return int(asked)
    bounds = [psutil.cpu_count(logical=False) or os.cpu_count() or 1]
    if hasattr(os, "sched_getaffinity"):
        bounds.append(len(os.sched_getaffinity(0)))
    try:
        quota, period = cgroup.read_text().split()
        bounds.append(math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        pass  # no such file, or "max": no quota
    return max(1, min(bounds))
