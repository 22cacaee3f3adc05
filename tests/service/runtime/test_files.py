"""Files of a server: as many as may be open, and none that a cleaner takes away."""

import fcntl
import os
import resource
import subprocess
import sys

import pytest

from tests.service.server import wait_for

RAISED = """
import resource, sys
from attend.service.runtime.files import raise_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))
raise_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize("hard", [64, 300, resource.getrlimit(resource.RLIMIT_NOFILE)[1]])
def test_the_soft_limit_becomes_the_hard_one(hard):
    done = subprocess.run([sys.executable, "-c", RAISED, str(hard)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(min(hard, 1 << 20)), str(hard)]


def test_a_folder_that_is_held_is_locked_against_cleaners_until_the_process_ends(tmp_path):
    """systemd-tmpfiles takes an exclusive lock before it removes anything of a folder, and leaves one alone that it cannot."""
    script = (
        "import sys; from pathlib import Path; from attend.service.runtime.files import hold; hold(Path(sys.argv[1])); input()"
    )
    folder = os.open(tmp_path, os.O_RDONLY)
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE) as holder:

        def is_locked() -> bool:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            fcntl.flock(folder, fcntl.LOCK_UN)
            return False

        assert wait_for(is_locked)
        holder.communicate(b"\n")
        assert not is_locked()
    os.close(folder)
