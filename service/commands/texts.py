"""The verbs that make text in the terminal, without a server or Ray: `generate`, `run` and `chat`."""

import sys
from typing import Annotated, Any

import typer

from attend.model.errors import SettingError
from attend.service.commands.flags import DeviceOption, DtypeOption, ModelArgument, ModelOption, QuantizeOption, with_options
from attend.service.commands.start import given_text, prepare_settings, start_settings
from attend.service.runtime.terminal_lines import print_line
from attend.service.settings import Settings

# Without a flag, what a call to a server gets: the model's own values, but none with ATTEND_GENERATION_CONFIG=none.
SAMPLING: dict[str, tuple[Any, str]] = {
    "max_tokens": (int, "Maximum number of new tokens."),
    "temperature": (float, "Sampling temperature, 0 to 2: 0 is greedy."),
    "top_k": (int, "Top-k sampling: among the k most likely tokens; 0 means all."),
    "top_p": (float, "Top-p (nucleus) sampling, above 0 to 1."),
    "min_p": (float, "Min-p sampling, 0 to 1: probability relative to the most likely token's."),
    "seed": (int, "Sampling seed: the same seed gives the same text."),
    "stop": (list[str], "Stop string; may be given up to 4 times."),
    "reasoning_effort": (str, "How much to reason, where the chat template knows it: none, low, high ..."),
}
OPTIONS = {name: Annotated[kind | None, typer.Option(help=about)] for name, (kind, about) in SAMPLING.items()} | {
    "system": Annotated[str | None, typer.Option(help="The system prompt of the chat.", metavar="TEXT")],
    "chat_template": Annotated[
        str | None,
        typer.Option(help="Jinja file of the chat template; default: ATTEND_CHAT_TEMPLATE, or the model's.", metavar="FILE"),
    ],
    "adapter": Annotated[
        str | None, typer.Option(help="LoRA adapter: NAME=FOLDER, or a NAME of ATTEND_ADAPTER or ATTEND_ADAPTERS_FOLDER.")
    ],
    "device": DeviceOption,
    "dtype": DtypeOption,
    "quantize": QuantizeOption,
}


@with_options(OPTIONS)
def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(help="Text to continue; without it, that of standard input.", metavar="PROMPT", show_default=False),
    ] = None,
    model: ModelOption = None,
    n: Annotated[int, typer.Option(help="Number of answers.")] = 1,
    logprobs: Annotated[int | None, typer.Option(help="With --json: log probabilities, with 0 to 5 alternatives.")] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Answer the prompt through the chat template, or continue it as it stands; default: --chat for a model that "
            "was taught to chat, but --raw with --json.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one completions (or chat) response and nothing else.")] = False,
    *,
    options: dict[str, Any],
) -> None:
    """Answer or continue a prompt in the terminal, streamed, without a server or Ray. Greedy, and 128 tokens, unless told."""
    settings, system, call = _settings(model, options)
    call = {"max_tokens": 128, "temperature": 0.0, "n": n, "logprobs": logprobs} | call
    call["prompt"] = given_text(prompt, "prompt")
    _prepare(settings)
    from attend.service.commands import generate as offline

    offline.generate(settings, call, as_json=as_json, chat=False if chat is None and as_json else chat, system=system)


@with_options(OPTIONS)
def chat(
    model: ModelArgument = None,
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="The message; without it, that of standard input, or a chat.", metavar="PROMPT", show_default=False
        ),
    ] = None,
    *,
    options: dict[str, Any],
) -> None:
    """Chat with a model in the terminal, or answer one prompt, without a server or Ray. `run` and `chat` are the same.

    What is piped in is one message. /help in the chat lists what can be typed beside messages. Ctrl-C stops an answer, Ctrl-D
    leaves.
    """
    settings, system, call = _settings(model, options)
    if prompt is None and not (sys.stdin is not None and sys.stdin.isatty()):
        prompt = given_text(None, "message")
    if prompt is not None and not prompt.strip():
        raise SettingError("the message is empty: give a text")
    _prepare(settings)
    from attend.service.commands.chat import chat as talk

    raise typer.Exit(talk(settings, call, system=system, message=prompt))


def _settings(model: str | None, options: dict[str, Any]) -> tuple[Settings, str, dict[str, Any]]:
    """The settings, the system prompt, and the fields of the call, whose `model` is the name of an adapter or None."""
    adapter, system = options.pop("adapter"), options.pop("system") or ""
    own = adapter if adapter and "=" in adapter else None
    names = ("chat_template", "device", "dtype", "quantize")
    settings = start_settings({"model": model, "adapter": own} | {name: options.pop(name) for name in names})
    fields = {name: value for name, value in options.items() if value not in (None, [])}
    return settings, system, fields | {"model": ",".join(settings.adapters) if own else adapter or None}


def _prepare(settings: Settings) -> None:
    """What precedes the import of torch, which takes seconds: a person is told what they are for."""
    prepare_settings(settings)
    if sys.stderr is not None and sys.stderr.isatty():
        print_line(f"Loading {settings.name} ...")
