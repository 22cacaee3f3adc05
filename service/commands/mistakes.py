"""What is said of a command line that is not understood: one line, with what to write in its place."""

import difflib
import re
from collections.abc import Sequence
from typing import Any

MODEL_FLAGS = ("-m", "--model", "-hf", "--hf-repo")
"""Flags of other servers for what stands without one here."""


def describe_mistake(error: Any, words: Sequence[str]) -> str:
    """One line for an error of typer's about a command line."""
    context = getattr(error, "ctx", None)
    if context is None:
        return str(error.format_message())
    path = context.command_path
    if (name := getattr(error, "option_name", None)) and "No such option" in error.message:
        # of -ngl typer names -n, and of -hf, whose -h it knows, -f
        flag = next((word for word in words if word.startswith("-") and name.strip("-") in word), name).partition("=")[0]
        if flag in MODEL_FLAGS:
            return f"there is no {flag}: the model stands without a flag, {path} MODEL, or {path} hf://ORG/NAME"
        known = [name for param in context.command.get_params(context) for name in (*param.opts, *param.secondary_opts)]
        near = difflib.get_close_matches(flag, known, 1) if flag.startswith("--") else []
        return f"there is no {flag}: " + (f"did you mean {near[0]}?" if near else f"{path} --help lists the flags")
    if unknown := re.match("No such command '(.*?)'", error.message):
        near = difflib.get_close_matches(unknown[1], context.command.list_commands(context), 1)
        advice = f"did you mean {path} {near[0]}?" if near else f"{path} --help lists the commands"
        return f"there is no {path} {unknown[1]}: {advice}"
    message = str(error.format_message()).rstrip(".")
    usage = " ".join(context.get_usage().split()).removeprefix("Usage: ").replace("{", "").replace("}", "")
    return f"{message[:1].lower()}{message[1:]}: {usage}"
