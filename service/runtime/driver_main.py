"""Entry point of the driver process: refuses a version of Ray that it cannot work with."""

import logging
import sys

from attend.model.errors import SettingError
from attend.service.runtime.interfaces import check_interfaces
from attend.service.runtime.terminal_lines import print_line


def main() -> int:
    """Returns the server's exit status. The words are those of `driver.run`."""
    try:
        check_interfaces("ray")
    except SettingError as error:
        print_line(f"attend: {error}", logging.ERROR)
        return 2
    from attend.service.runtime.driver import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
