"""What a command does before large imports: settings, the check of `model`, standard input."""

import signal
import sys
from collections.abc import Mapping
from typing import Any

from attend.model.errors import SettingError
from attend.model.net.native.build import provide
from attend.service.runtime.model_path import check_model, resolve_model
from attend.service.runtime.terminal_lines import print_line, set_line_style
from attend.service.settings import Settings, read_settings, unknown_variables
from attend.service.tested_versions import untested_packages

MAX_TEXT = 16 << 20
"""Bytes of standard input; no context is as long."""


def start_settings(arguments: Mapping[str, Any], *, locate: bool = True, is_server: bool = False) -> Settings:
    """The settings of a command; tells which variables nobody reads. Raises SettingError, and with `locate` CheckpointError.

    A server writes all its lines in its `log_format`.
    """
    settings = read_settings(arguments)
    if is_server:
        set_line_style(settings.log_format)
    for name in unknown_variables():
        print_line(f"attend: {name} is not a setting, and is ignored")
    return locate_model(settings, is_server=is_server) if locate else settings


def locate_model(settings: Settings, *, is_server: bool = False) -> Settings:
    """The settings with the model that `model` means, whose files have been looked at. Raises CheckpointError."""
    settings = resolve_model(settings, lambda line: print_line(f"attend: {line}"))
    check_model(settings, is_server=is_server)
    return settings


def prepare_settings(settings: Settings) -> Settings:
    """The same settings, before a command loads a model or starts Ray: tells which packages were not tested, and has the native
    decoder built where this machine has none and it may serve.
    """
    for line in untested_packages():
        print_line(f"attend: {line}")
    if settings.backend in ("auto", "native") and settings.device != "cuda":
        provide(lambda line: print_line(f"attend: {line}"))
    return settings


def given_text(text: str | None, name: str) -> str:
    """The text of the command line, or without one that of standard input, if that is not a terminal. Raises SettingError.

    One line break at its end is left out: `echo` writes it.
    """
    if text is not None:
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):  # as Python keeps other bytes
            raise SettingError(f"the {name} on the command line is not UTF-8")
        return text
    piped = sys.stdin is not None and not sys.stdin.isatty()
    read = sys.stdin.buffer.read(MAX_TEXT + 1).removesuffix(b"\n") if piped else b""
    if not read:
        raise SettingError(f"there is no {name}: give it as an argument, or on standard input")
    if len(read) > MAX_TEXT:
        raise SettingError(f"the {name} on standard input has more than {MAX_TEXT} bytes")
    try:
        return read.decode()
    except UnicodeDecodeError as error:
        raise SettingError(f"the {name} on standard input is not UTF-8: {error.reason} at byte {error.start}") from error


def interrupt_unwinds() -> None:
    """Ctrl-C raises KeyboardInterrupt again, for a command that has something to put away: see `main.py`."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
