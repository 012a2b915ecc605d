"""Who and where this process is.  Names and addresses lie (NAT, pods); the boot id does not."""

import os
from pathlib import Path

from core.messages import HostFacts

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_facts() -> HostFacts:
    """boot_id is empty where the kernel does not tell; then nothing is taken for the same host."""
    try:
        boot_id = _BOOT_ID.read_text().strip()
    except OSError:
        boot_id = ""
    return HostFacts(boot_id, os.getuid(), os.getpid())
