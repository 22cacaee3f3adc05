"""What a server needs of its process: open files, torch's allocator, folders that stay, and short names of them for sockets."""

import fcntl
import os
import resource
from pathlib import Path

MAX_FILES = 1 << 20
"""Where the hard limit is higher, or none: programs that close all that could be open would take seconds."""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variable of torch's allocators, and its older name."""


def raise_limit() -> None:
    """Let this process and those that it starts have as many files open as the hard limit allows. A connection is a file, and
    the soft limit is often 1024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def hold(folder: Path) -> None:
    """Keep systemd-tmpfiles from a folder under /tmp while this process runs: it removes what nobody has touched for days, but
    nothing in a folder that is locked (tmpfiles.d(5)).
    """
    fcntl.flock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_SH)


def socket_folder(folder: Path, most: int) -> Path:
    """A folder under a name of at most `most` bytes: that of a socket in it has 107. A longer one gets another while this
    process runs, for all processes of this user.
    """
    if len(os.fsencode(folder)) <= most:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    return Path(f"/proc/{os.getpid()}/fd/{os.open(folder, os.O_PATH | os.O_DIRECTORY)}")


def allocator() -> dict[str, str]:
    """On a GPU memory grows where it lies: chunks of prompts of any size leave no holes that none of the next ones fits in.
    Nothing where the user has set one of the variables.
    """
    return {} if any(name in os.environ for name in ALLOCATOR) else {ALLOCATOR[0]: "expandable_segments:True"}
