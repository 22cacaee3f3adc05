"""`python -m attend.model.net.native`: build the native decoder, and say what came of it. No compiler is no error."""

import subprocess
import sys

from attend.model.net.native.library import build, find_compiler


def main() -> int:
    """Always 0: nothing needs it."""
    compiler = find_compiler()
    if compiler is None:
        print("no C++ compiler: the torch path will serve", file=sys.stderr)
        return 0
    try:
        print(f"native decoder: {build(compiler).name}")
    except (subprocess.CalledProcessError, OSError) as error:
        words = getattr(error, "stderr", error)
        print(f"the native decoder cannot be built, the torch path will serve: {words}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
