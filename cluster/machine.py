"""What this machine lets the process use."""

import os
from pathlib import Path

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(cpu_max: Path = CPU_MAX) -> int:
    """Cores by affinity and by the container's quota (cgroup v2), at least 1."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, _, period = cpu_max.read_text(encoding="ascii").partition(" ")
    except OSError:
        return cores  # no cgroup v2: no quota that we could see
    if quota != "max":
        cores = min(cores, int(quota) // int(period))
    return max(1, cores)
