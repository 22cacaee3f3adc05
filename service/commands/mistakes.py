"""What is said of a command line that is not understood: one line, with what to write in its place."""

import difflib
import re
from collections.abc import Sequence
from typing import Any

GPU = "leave it out, a GPU serves where there is one; --device cpu keeps it out"
BY_DEFAULT = "leave it out, it is on by default"
THEIR_FLAGS = {
    **dict.fromkeys(("-m", "--model"), "MODEL without a flag: attend {command} {value}"),
    **dict.fromkeys(("-hf", "--hf-repo"), "MODEL without a flag: attend {command} hf://{value}"),
    **dict.fromkeys(("-a", "--alias"), "--served-model-name {value}"),
    **dict.fromkeys(("-c", "--ctx-size", "--context-length"), "--max-model-len {value}"),
    **dict.fromkeys(("-ngl", "--n-gpu-layers"), GPU),
    **dict.fromkeys(("--gpu-memory-utilization", "--mem-fraction-static"), "--kv-cache-memory 2GiB, a size, not a share"),
    **dict.fromkeys(("--cache-type-k", "--kv-cache-dtype"), "--kv-dtype int8"),
    "--quantization": "--quantize int8 or int4; a checkpoint that is quantised is served as it is",
    **dict.fromkeys(("-np", "--parallel", "--max-num-seqs"), "--max-batch-requests {value}"),
    **dict.fromkeys(("-b", "--max-num-batched-tokens"), "--max-batch-tokens {value}"),
    **dict.fromkeys(("-t", "--threads"), "--num-threads {value}"),
    **dict.fromkeys(("-tp", "--tensor-parallel-size"), "--tensor-parallel {value}"),
    **dict.fromkeys(("-dp", "--data-parallel-size"), "--replicas {value}"),
    **dict.fromkeys(("-fa", "--flash-attn", "--enable-prefix-caching", "--enable-auto-tool-choice"), BY_DEFAULT),
    "--tool-call-parser": "--tool-parser auto, or one that attend serve --help lists",
    "--chat-template-file": "--chat-template {value}",
    **dict.fromkeys(("--lora", "--lora-modules"), "--adapter NAME={value}"),
    "--api-key": "--api-keys-file keys.json, which `attend keys add NAME --file keys.json` makes",
    "--ssl-certfile": "--tls-cert {value}",
    "--ssl-keyfile": "--tls-key {value}",
    **dict.fromkeys(("-n", "--n-predict"), "--max-tokens {value}"),
    "--temp": "--temperature {value}",
    "-p": "--port {value}",
}
"""Flags of `vllm serve`, llama-server and others, and what to use in the place of each."""


def describe_mistake(error: Any, words: Sequence[str]) -> str:
    """One line for an error of typer's about a command line."""
    context = getattr(error, "ctx", None)
    if context is None:
        return str(error.format_message())
    if (name := getattr(error, "option_name", None)) and "No such option" in error.message:
        return _unknown_flag(context, _flag_of(name, words), words)
    if unknown := re.match("No such command '(.*?)'", error.message):
        return _unknown_command(context, unknown[1])
    message = str(error.format_message()).rstrip(".")
    usage = " ".join(context.get_usage().split()).removeprefix("Usage: ").replace("{", "").replace("}", "")
    return f"{message[:1].lower()}{message[1:]}: {usage}"


def _flag_of(name: str, words: Sequence[str]) -> str:
    """The flag as it was typed: of -ngl typer names -n, and of -hf, whose -h it knows, -f."""
    if name.startswith("--"):
        return name
    short = (word.partition("=")[0] for word in words if word.startswith("-") and not word.startswith("--"))
    return next((word for word in short if name[1] in word), name)


def _unknown_flag(context: Any, flag: str, words: Sequence[str]) -> str:
    known = sorted(name for param in context.command.get_params(context) for name in (*param.opts, *param.secondary_opts))
    advice = THEIR_FLAGS.get(flag, "").format(command=context.info_name, value=_value(flag, words))
    if advice.startswith("--") and advice.split()[0] not in known:
        advice = ""
    if advice:
        return f"there is no {flag}: {advice if advice.startswith('leave') else f'use {advice}'}"
    near = difflib.get_close_matches(flag, [name for name in known if name.startswith("--")], 1)
    return f"there is no {flag}: " + (f"did you mean {near[0]}?" if near else f"{context.command_path} --help lists the flags")


def _value(flag: str, words: Sequence[str]) -> str:
    """What was given to a flag: `--flag VALUE` or `--flag=VALUE`."""
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == flag:
            following = "" if equals or at + 1 == len(words) or words[at + 1].startswith("-") else words[at + 1]
            return value or following or "VALUE"
    return "VALUE"


def _unknown_command(context: Any, name: str) -> str:
    near, path = difflib.get_close_matches(name, context.command.list_commands(context), 1), context.command_path
    return f"there is no {path} {name}: " + (f"did you mean {path} {near[0]}?" if near else f"{path} --help lists the commands")
