"""Where the `attend` command begins: imports nothing large, so that Ctrl-C finds its handler from the first moment."""

import os
import signal


def main() -> None:
    """Run the command. Ctrl-C ends it at once with status 130: an exception could be swallowed by whoever is called just then.

    A command that has something to put away sets another handler.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as a shell leaves it to its background jobs
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    from attend.service.commands.cli import main

    main()


if __name__ == "__main__":
    main()
