"""`make load`: a minute of both kinds of users against a server of its own.

python -m loadtest.load -u 20 --prompts long HttpStreamUser
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.faults.target import running
from loadtest.options import add_options
from loadtest.server import Address, StartError

OUT = Path(__file__).parent / "out"
OBJECTIVES = ["--max-ttft-p95-ms", "1000", "--max-itl-p95-ms", "100"]
DEFAULTS = ["--loop", "open", "-u", "10", "-t", "60s", "--stop-timeout", "30"]


def locust(address: Address, out: Path, arguments: Sequence[str], **more: Any) -> int:
    """Run locust without its page; returns its exit code, 3 for a missed objective."""
    command = [sys.executable, "-m", "locust", "-f", str(Path(__file__).parent / "locustfile.py"), "--headless"]
    command += ["--host", address.http, "--grpc-host", address.grpc, "--only-summary", "--report", str(out), *OBJECTIVES]
    return subprocess.run([*command, *arguments], cwd=Path(__file__).parents[1], check=False, **more).returncode


def check(arguments: Sequence[str]) -> None:
    """Ends the process with 2 where an option is wrong, before a server is started; --help shows them.

    locust prints its own help before it has read the locustfile, so that the options of a locustfile are never in it.
    """
    epilog = f"Before yours: {' '.join([*OBJECTIVES, *DEFAULTS])}. Other options go to locust: locust --help."
    parser = argparse.ArgumentParser(prog="python -m loadtest.load", description=__doc__, epilog=epilog, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_options(parser)
    parser.parse_known_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """The exit code of locust, or 1 where no server came up."""
    check(arguments)
    OUT.mkdir(exist_ok=True)
    try:
        with running() as target:
            return locust(target.address, OUT, ["--html", str(OUT / "locust.html"), *DEFAULTS, *arguments])
    except StartError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
