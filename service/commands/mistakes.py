"""What is said of a command line that is not understood: one line, with what to write in its place."""

import difflib
import re
from collections.abc import Sequence
from typing import Any

LEAVE = "leave it out, "
OF_CALLS = "leave it out, each call says its own"
NO_IMAGES = "leave it out, images are not served"
BY_DEFAULT = "leave it out, it is on by default"
"""The begin of an advice, or a whole one, for flags that have no counterpart."""
THEIR_FLAGS = {
    "--model": "MODEL without a flag: attend {command} {value}",
    "-m": "MODEL without a flag: attend {command} {value}",
    "--hf-repo": "MODEL without a flag: attend {command} hf://{value}",
    "-hf": "MODEL without a flag: attend {command} hf://{value}",
    "-hfr": "MODEL without a flag: attend {command} hf://{value}",
    "--hf-file": "MODEL without a flag: attend {command} hf://ORG/NAME/{value}",
    "-hff": "MODEL without a flag: attend {command} hf://ORG/NAME/{value}",
    "--hf-token": "the variable HF_TOKEN",
    "--download-dir": "the variable HF_HOME",
    "--revision": "hf://ORG/NAME@{value} as MODEL",
    "--tokenizer": LEAVE + "the tokenizer is read beside the weights",
    "--trust-remote-code": LEAVE + "code of a checkpoint is never run",
    "--load-format": LEAVE + "the format is read from the files",
    "--mmproj": NO_IMAGES,
    "-mm": NO_IMAGES,
    "--limit-mm-per-prompt": NO_IMAGES,
    "--alias": "--served-model-name {value}",
    "-a": "--served-model-name {value}",
    "--ctx-size": "--max-model-len {value}",
    "-c": "--max-model-len {value}",
    "--context-length": "--max-model-len {value}",
    "--max-seq-len": "--max-model-len {value}",
    "--max-total-tokens": "--max-model-len {value}",
    "--n-gpu-layers": LEAVE + "a GPU serves where there is one; --device cpu keeps it out",
    "--gpu-layers": LEAVE + "a GPU serves where there is one; --device cpu keeps it out",
    "-ngl": LEAVE + "a GPU serves where there is one; --device cpu keeps it out",
    "--gpu-memory-utilization": "--kv-cache-memory 2GiB, a size in place of a share",
    "--mem-fraction-static": "--kv-cache-memory 2GiB, a size in place of a share",
    "--cache-type-k": "--kv-dtype int8",
    "--cache-type-v": "--kv-dtype int8",
    "-ctk": "--kv-dtype int8",
    "-ctv": "--kv-dtype int8",
    "--kv-cache-dtype": "--kv-dtype int8",
    "--quantization": "--quantize int8 or int4; a checkpoint that is quantised is served as it is",
    "--max-concurrent-requests": "--max-batch-requests {value}",
    "--max-num-seqs": "--max-batch-requests {value}",
    "--max-running-requests": "--max-batch-requests {value}",
    "--n-parallel": "--max-batch-requests {value}",
    "--parallel": "--max-batch-requests {value}",
    "-np": "--max-batch-requests {value}",
    "--max-num-batched-tokens": "--max-batch-tokens {value}",
    "--batch-size": "--max-batch-tokens {value}",
    "-b": "--max-batch-tokens {value}",
    "--ubatch-size": "--max-batch-tokens {value}",
    "-ub": "--max-batch-tokens {value}",
    "--threads": "--num-threads {value}",
    "-t": "--num-threads {value}",
    "--threads-batch": "--num-threads {value}",
    "-tb": "--num-threads {value}",
    "--tensor-parallel-size": "--tensor-parallel {value}",
    "-tp": "--tensor-parallel {value}",
    "--tp": "--tensor-parallel {value}",
    "--data-parallel-size": "--replicas {value}",
    "-dp": "--replicas {value}",
    "--draft": "--draft-tokens {value}",
    "--draft-max": "--draft-tokens {value}",
    "--speculative-config": "--draft-tokens 4: drafts are looked up in the prompt",
    "--enable-prefix-caching": BY_DEFAULT,
    "--no-enable-prefix-caching": "--no-prefix-caching",
    "--enable-chunked-prefill": BY_DEFAULT,
    "--cont-batching": BY_DEFAULT,
    "-cb": BY_DEFAULT,
    "--flash-attn": BY_DEFAULT,
    "-fa": BY_DEFAULT,
    "--enforce-eager": LEAVE + "there is nothing like it",
    "--no-mmap": LEAVE + "there is nothing like it",
    "--mlock": LEAVE + "there is nothing like it",
    "--swap-space": LEAVE + "preempted requests are computed again",
    "--enable-auto-tool-choice": BY_DEFAULT,
    "--tool-call-parser": "--tool-parser auto, or one that attend serve --help lists",
    "--enable-reasoning": BY_DEFAULT,
    "--reasoning-format": "--reasoning-parser auto, or one that attend serve --help lists",
    "--jinja": LEAVE + "chat templates are always used",
    "--chat-template-file": "--chat-template {value}",
    "--guided-decoding-backend": LEAVE + "there is one",
    "--embedding": LEAVE + "/v1/embeddings is there; --pooling says how where the files do not",
    "--embeddings": LEAVE + "/v1/embeddings is there; --pooling says how where the files do not",
    "--reranking": LEAVE + "/v1/rerank is there; --score says how where the files do not",
    "--lora": "--adapter NAME={value}",
    "--lora-modules": "--adapter {value}",
    "--enable-lora": "--adapter NAME=FOLDER alone",
    "--max-loras": "--max-adapters {value}",
    "--api-key": "--api-keys-file keys.json, which `attend keys add NAME --file keys.json` makes",
    "--api-key-file": "--api-keys-file keys.json, which `attend keys add NAME --file keys.json` makes",
    "--ssl-certfile": "--tls-cert {value}",
    "--ssl-cert-file": "--tls-cert {value}",
    "--ssl-keyfile": "--tls-key {value}",
    "--ssl-key-file": "--tls-key {value}",
    "--allowed-origins": "--cors-origins https://HOST",
    "--hostname": "--host {value}",
    "--metrics": LEAVE + "/metrics is always there",
    "--slots": LEAVE + "/metrics tells what runs",
    "--timeout": "--request-timeout-seconds {value}",
    "-to": "--request-timeout-seconds {value}",
    "--no-webui": "--no-expose-docs",
    "--disable-log-requests": LEAVE + "texts are never logged",
    "--disable-log-stats": LEAVE + "there are no such lines",
    "--uvicorn-log-level": "--log-level {value}",
    "--verbose": "--log-level debug",
    "-v": "--log-level debug",
    "-p": "--port {value}",
    "--seed": OF_CALLS,
    "-s": OF_CALLS,
    "--temp": OF_CALLS,
    "--temperature": OF_CALLS,
    "--top-k": OF_CALLS,
    "--top-p": OF_CALLS,
    "--min-p": OF_CALLS,
    "--n-predict": OF_CALLS,
    "--predict": OF_CALLS,
    "-n": OF_CALLS,
    "--max-tokens": OF_CALLS,
}
"""Flags of `vllm serve`, llama-server, TGI and SGLang, and what to use in the place of each."""
THEIR_FLAGS_OF_TEXTS = {
    **{name: advice for name, advice in THEIR_FLAGS.items() if advice.startswith((LEAVE, "MODEL", "the variable", "hf://"))},
    **dict.fromkeys(("--n-predict", "--predict", "-n"), "--max-tokens {value}"),
    **dict.fromkeys(("--prompt", "-p"), "PROMPT without a flag"),
    **dict.fromkeys(("--system-prompt", "-sys"), "--system {value}"),
    **dict.fromkeys(("--reverse-prompt", "-r"), "--stop {value}"),
    **dict.fromkeys(("--file", "-f"), "standard input: attend {command} MODEL < {value}"),
    "--temp": "--temperature {value}",
    "-s": "--seed {value}",
    "--lora": "--adapter NAME={value}",
    "--quantization": THEIR_FLAGS["--quantization"],
}
"""The same of `llama-cli` and others, for commands that make text."""
THEIR_COMMANDS = {
    **dict.fromkeys(("list", "ls"), "hf cache ls, which lists what `attend pull` has downloaded"),
    **dict.fromkeys(("rm", "remove", "delete"), "hf cache rm, which takes away what `attend pull` has downloaded"),
    **dict.fromkeys(("ps", "status"), "attend check http://localhost:8000, which looks at a server that runs"),
    "stop": "Ctrl-C, or kill PID: either lets running streams end",
    **dict.fromkeys(("show", "info"), "attend inspect MODEL"),
    **dict.fromkeys(("server", "start"), "attend serve MODEL"),
    **dict.fromkeys(("download", "get"), "attend pull hf://ORG/NAME"),
    **dict.fromkeys(("complete", "completion"), "attend generate PROMPT"),
    **dict.fromkeys(("create", "convert", "quantize"), "a folder as it is: attend serve FOLDER --quantize int8"),
    "cp": "attend serve MODEL --served-model-name NAME",
    "version": "attend --version",
}
"""Commands of ollama, vllm and others."""


def describe_mistake(error: Any, words: Sequence[str]) -> str:
    """One line for an error of typer's about a command line."""
    context = getattr(error, "ctx", None)
    if context is None:
        return str(error.format_message())
    command = context.info_name
    if (name := getattr(error, "option_name", None)) and "No such option" in error.message:
        return _unknown_flag(context, _flag_of(name, words), words)
    if unknown := re.match("No such command '(.*?)'", error.message):
        return _unknown_command(context, unknown[1])
    message = str(error.format_message()).rstrip(".")
    usage = " ".join(context.get_usage().split()).removeprefix("Usage: ").replace("{", "").replace("}", "")
    advice = ""
    if "extra argument" in message and command in ("generate", "explain"):
        advice = "; the model is named by --model MODEL"
    elif "extra argument" in message and command == "run":
        advice = "; a message of several words stands in quotes"
    return f"{message[:1].lower()}{message[1:]}{advice}: {usage}"


def _flag_of(name: str, words: Sequence[str]) -> str:
    """The flag as it was typed: of -ngl typer names -n, and of -hf, whose -h it knows, -f."""
    if name.startswith("--"):
        return name
    short = (word.partition("=")[0] for word in words if word.startswith("-") and not word.startswith("--"))
    return next((word for word in short if name[1] in word), name)


def _unknown_flag(context: Any, flag: str, words: Sequence[str]) -> str:
    command = context.info_name
    known = sorted(name for param in context.command.get_params(context) for name in (*param.opts, *param.secondary_opts))
    theirs = THEIR_FLAGS if command == "serve" else THEIR_FLAGS_OF_TEXTS
    advice = theirs.get(flag, "").format(command=command, value=_value(flag, words))
    advice = re.sub(r"(hf://[^:\s]+):\S+", r"\1/FILE.gguf", advice)  # llama-server's ORG/NAME:Q4_K_M names no file
    if advice.startswith("--") and advice.split()[0] not in known:
        advice = ""
    if advice:
        return f"there is no {flag}: {advice if advice.startswith(LEAVE) else f'use {advice}'}"
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
    known = context.command.list_commands(context)
    near = difflib.get_close_matches(name, known, 1)
    path = context.command_path
    if path == "attend" and name in THEIR_COMMANDS:
        return f"there is no {path} {name}: use {THEIR_COMMANDS[name]}"
    return f"there is no {path} {name}: " + (f"did you mean {path} {near[0]}?" if near else f"{path} --help lists the commands")
