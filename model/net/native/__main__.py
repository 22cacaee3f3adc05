"""`python -P -m attend.model.net.native`: build the native decoder, and say what came of it. No compiler is no error."""

import os
import subprocess
import sys

from attend.model.net.native.build import build_library, find_compiler, private_folder
from attend.model.net.native.library import library_path


def main() -> int:
    """Build it beside its source, or in the user's cache where that cannot be written to. Always 0: nothing needs it."""
    compiler = find_compiler()
    if compiler is None:
        print("no C++ compiler: the torch path will serve", file=sys.stderr)
        return 0
    try:
        beside = library_path().parent
        print(f"native decoder: {build_library(compiler, beside if os.access(beside, os.W_OK) else private_folder())}")
    except (subprocess.CalledProcessError, OSError) as error:
        words = getattr(error, "stderr", error)
        print(f"the native decoder cannot be built, the torch path will serve: {words}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
