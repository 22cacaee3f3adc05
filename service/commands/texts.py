"""The verbs that make text in the terminal, without a server or Ray: `generate`, `run` and `chat`."""

import sys
from typing import Annotated, Any

import typer

from attend.model.errors import SettingError
from attend.service.commands.flags import AdapterOption, DeviceOption, DtypeOption, ModelArgument, ModelOption, QuantizeOption
from attend.service.commands.start import given_text, prepare_settings, start_settings
from attend.service.runtime.terminal_lines import print_line
from attend.service.settings import Settings

SystemOption = Annotated[str, typer.Option(help="The system prompt of the chat.", metavar="TEXT")]
TemplateOption = Annotated[
    str | None,
    typer.Option(help="Jinja file of the chat template; default: ATTEND_CHAT_TEMPLATE, or the model's.", metavar="FILE"),
]
EffortOption = Annotated[
    str | None, typer.Option(help="How much to reason, where the chat template knows it: none, low, high ...")
]
# Of a chat: without a flag, what a call to a server gets, by generation_config.json but with ATTEND_GENERATION_CONFIG=none.
MaxTokensOption = Annotated[int | None, typer.Option(help="Maximum number of new tokens; default: what the context leaves.")]
TemperatureOption = Annotated[
    float | None, typer.Option(help="Sampling temperature, 0 to 2: 0 is greedy; default: the model's, or 0.7.")
]
TopKOption = Annotated[int | None, typer.Option(help="Top-k sampling: among the k most likely tokens; default: the model's.")]
TopPOption = Annotated[
    float | None, typer.Option(help="Top-p (nucleus) sampling, above 0 to 1; default: the model's, or 0.95.")
]
MinPOption = Annotated[float | None, typer.Option(help="Min-p sampling, 0 to 1; default: the model's.")]
SeedOption = Annotated[int | None, typer.Option(help="Sampling seed: the same seed gives the same text.")]
StopOption = Annotated[list[str] | None, typer.Option(help="Stop string; may be given up to 4 times.")]


def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(help="Text to continue; without it, that of standard input.", metavar="PROMPT", show_default=False),
    ] = None,
    model: ModelOption = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of new tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="Sampling temperature, 0 to 2: 0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Top-k sampling: among the k most likely tokens; 0 means all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Top-p (nucleus) sampling: cumulative probability, 0 to 1.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Min-p sampling: probability relative to the most likely token's.")] = 0.0,
    seed: SeedOption = None,
    n: Annotated[int, typer.Option(help="Number of answers.")] = 1,
    stop: StopOption = None,
    stop_token_ids: Annotated[str, typer.Option(help="Stop token ids, as 1,2,3.")] = "",
    min_tokens: Annotated[int, typer.Option(help="Minimum number of new tokens.")] = 0,
    include_stop_str_in_output: Annotated[bool, typer.Option(help="Include the stop string in the answer.")] = False,
    ignore_eos: Annotated[bool, typer.Option(help="Ignore the end-of-sequence (EOS) token.")] = False,
    skip_special_tokens: Annotated[bool, typer.Option(help="Leave special tokens out.")] = True,
    prompt_token_ids: Annotated[str, typer.Option(help="The prompt as token ids, as 1,2,3.")] = "",
    echo: Annotated[bool, typer.Option(help="Echo the prompt before the answer.")] = False,
    logprobs: Annotated[int | None, typer.Option(help="With --json: log probabilities, with 0 to 5 alternatives.")] = None,
    return_token_ids: Annotated[bool, typer.Option(help="With --json: the answer's token ids too.")] = False,
    adapter: AdapterOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    show: Annotated[bool, typer.Option("--show", help="Colour each token by its probability.")] = False,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Answer the prompt through the chat template, or continue it as it stands; default: --chat for a model that "
            "was taught to chat, but --raw with --json, --echo and --prompt-token-ids.",
            show_default=False,
        ),
    ] = None,
    system: SystemOption = "",
    chat_template: TemplateOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one completions (or chat) response and nothing else.")] = False,
) -> None:
    """Answer or continue a prompt in the terminal, streamed, without a server or Ray."""
    flags = ("as_json", "show", "chat", "system", "model", "adapter", "chat_template", "device", "dtype", "quantize")
    call = {name: value for name, value in dict(locals()).items() if name not in (*flags, "flags")}
    settings, call["model"] = _settings(model, adapter, chat_template, device=device, dtype=dtype, quantize=quantize)
    call["prompt"] = prompt if prompt_token_ids else given_text(prompt, "prompt")
    _prepare(settings)
    from attend.service.commands import generate as offline

    ids = offline.parse_token_ids("prompt-token-ids", call.pop("prompt_token_ids"))
    call |= {"prompt": ids or call["prompt"], "stop": stop or None}
    call["stop_token_ids"] = offline.parse_token_ids("stop-token-ids", stop_token_ids) or None
    if chat is None and (as_json or echo or ids):
        chat = False
    offline.generate(settings, call, as_json=as_json, show=show, chat=chat, system=system)


def chat(
    model: ModelArgument = None,
    system: SystemOption = "",
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    seed: SeedOption = None,
    stop: StopOption = None,
    reasoning_effort: EffortOption = None,
    chat_template: TemplateOption = None,
    adapter: AdapterOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
) -> None:
    """Chat with a model in the terminal, without a server or Ray. What is piped in is one message, and is answered.

    /help in the chat lists what can be typed beside messages. Ctrl-C stops an answer, Ctrl-D leaves.
    """
    raise typer.Exit(_chat(dict(locals()), None))


def run(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, .gguf file, or hf://ORG/NAME.", metavar="MODEL")],
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="The message; without it, that of standard input, or a chat.", metavar="PROMPT", show_default=False
        ),
    ] = None,
    system: SystemOption = "",
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    seed: SeedOption = None,
    stop: StopOption = None,
    reasoning_effort: EffortOption = None,
    chat_template: TemplateOption = None,
    adapter: AdapterOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
) -> None:
    """Answer one prompt through the model's chat template, or without a prompt chat, as `attend chat` does."""
    given = dict(locals())
    raise typer.Exit(_chat(given, given.pop("prompt")))


def _chat(given: dict[str, Any], message: str | None) -> int:
    """Chat, or answer a message, as flags say. Returns the exit status."""
    own = [given.pop(name) for name in ("model", "adapter", "chat_template")]
    settings, adapter = _settings(*own, **{name: given.pop(name) for name in ("device", "dtype", "quantize")})
    if message is None and not (sys.stdin is not None and sys.stdin.isatty()):
        message = given_text(None, "message")
    if message is not None and not message.strip():
        raise SettingError("the message is empty: give a text")
    _prepare(settings)
    from attend.service.commands.chat import chat as talk

    system = given.pop("system")
    fields = {name: value for name, value in given.items() if value not in (None, [])} | {"model": adapter}
    return talk(settings, fields, system=system, message=message)


def _settings(
    model: str | None, adapter: str | None, chat_template: str | None, **others: str | None
) -> tuple[Settings, str | None]:
    """The settings, and the name of the adapter that the call names."""
    given = adapter if adapter and "=" in adapter else None
    settings = start_settings({"model": model, "adapter": given, "chat_template": chat_template, **others})
    return settings, ",".join(settings.adapters) if given else adapter or None


def _prepare(settings: Settings) -> None:
    """What precedes the import of torch, which takes seconds: a person is told what they are for."""
    prepare_settings(settings)
    if sys.stderr is not None and sys.stderr.isatty():
        print_line(f"Loading {settings.name} ...")
