"""The `attend` command. Each verb imports what it needs when it runs, so that --help is instant."""

import errno
import io
import logging
import os
import resource
import sys
from contextlib import suppress
from importlib.metadata import version as version_of
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

from attend.model.errors import AttendError, CheckpointError
from attend.model.machine import available_memory
from attend.service.commands import texts
from attend.service.commands.bench import FOLDER as BENCHMARKS
from attend.service.commands.flags import (
    SETTINGS,
    DeviceOption,
    DtypeOption,
    JsonOption,
    KeyOption,
    ModelArgument,
    ModelOption,
    PlainCommand,
    PlainGroup,
    QuantizeOption,
    with_options,
    without_values,
)
from attend.service.commands.keys import app as keys_app
from attend.service.commands.mistakes import describe_mistake
from attend.service.commands.start import given_text, interrupt_unwinds, locate_model, prepare_settings, start_settings
from attend.service.runtime.terminal_lines import print_line
from attend.service.values import HUB

PYTHON = sys.version.partition(" ")[0]
HELP = ("-h", "--help")
app = typer.Typer(
    cls=PlainGroup, pretty_exceptions_enable=False, rich_markup_mode=None, context_settings={"help_option_names": HELP}
)
app.add_typer(keys_app, name="keys")


def main() -> None:
    """Run the command line: an error of ours ends with its sentence and status 2, without a traceback; what the system refuses,
    such as memory or a full disk, with a sentence and status 1.
    """
    words = without_values(sys.argv[1:])
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a locale may lack a character of an answer
    try:
        try:
            asked = [*words[1:], "--help"] if words[:1] == ["help"] else words
            status = app(asked, prog_name="attend", standalone_mode=False)
        finally:
            if sys.stdout is not None:  # as where it was closed before the start
                sys.stdout.flush()
        sys.exit(status)
    except TyperException as error:
        print_line(f"attend: {describe_mistake(error, words)}", logging.ERROR)
        sys.exit(2)
    except AttendError as error:
        print_line(f"attend: {error}", logging.ERROR)
        sys.exit(2)
    except (OSError, MemoryError) as error:
        print_line(f"attend: {_refusal(error)}", logging.ERROR)
        _drop_output()
        sys.exit(1)


def _refusal(error: OSError | MemoryError) -> str:
    """What the system refuses, in words."""
    if isinstance(error, MemoryError) or error.errno == errno.ENOMEM:
        most, _ = resource.getrlimit(resource.RLIMIT_AS)
        limit = "" if most == resource.RLIM_INFINITY else f", and this process may take {most / 1e9:.1f} GB (ulimit -v)"
        return (
            f"there is not enough memory: {available_memory() / 1e9:.1f} GB are free{limit}; a smaller model, --quantize int8 "
            "or int4, and as a server a --kv-cache-memory such as 256MiB take less"
        )
    return f"{error.strerror or error}: {error.filename}" if error.filename else str(error.strerror or error)


def _drop_output() -> None:
    """Python writes what is left at its end, and tells of each failure."""
    if sys.stdout is not None:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@app.callback(invoke_without_command=True)
def root_command(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the versions of Attend, torch, Ray and Python.")] = False,
) -> None:
    """Serve, try, check and train decoder-only transformers."""
    if version:
        print(f"attend {version_of('attend-server')}, torch {version_of('torch')}, ray {version_of('ray')}, Python {PYTHON}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command(cls=PlainCommand)
@with_options(SETTINGS)
def serve(
    folder: Annotated[
        str | None,
        typer.Argument(
            help="Checkpoint folder, .gguf file, or hf://ORG/NAME; without it, the shipped default model.",
            metavar="MODEL",
            show_default=False,
        ),
    ] = None,
    *,
    options: dict[str, Any],
) -> None:
    """Serve a checkpoint over HTTP and gRPC until Ctrl-C. Flags win over ATTEND_* variables.

    Each flag has a variable: that of --max-model-len is ATTEND_MAX_MODEL_LEN.
    """
    joined = {name: ",".join(value) if isinstance(value, list) else value for name, value in options.items()}
    settings = start_settings(joined | ({"model": folder} if folder else {}), is_server=True)
    from attend.service.observe import logs, tracing

    logs.check_log_file(settings.log_file)
    tracing.check_endpoint(settings.otel_endpoint)
    prepare_settings(settings)
    if settings.models:
        from attend.service.runtime.single import prepare

        prepare()  # before grpc is imported, which reads its variables then
        from attend.service.runtime.models.run import run
    elif settings.single:  # the other imports grpc, which reads its variables then
        from attend.service.runtime.single import run
    else:
        from attend.service.runtime.supervisor import run
    raise typer.Exit(run(settings))


for verb, command in {"chat": texts.chat, "run": texts.chat, "generate": texts.generate}.items():
    app.command(verb, cls=PlainCommand)(command)


@app.command(cls=PlainCommand)
def explain(
    text: Annotated[
        str | None,
        typer.Argument(help="The prompt to explain; without it, that of standard input.", metavar="TEXT", show_default=False),
    ] = None,
    answer: Annotated[str, typer.Option(help="The answer that follows the prompt.")] = "",
    layer: Annotated[int | None, typer.Option(help="Layer to show, from 0; default: the last one with attention.")] = None,
    head: Annotated[int | None, typer.Option(help="Query head to show, from 0; default: the mean of all.")] = None,
    lens: Annotated[bool, typer.Option("--lens", help="Logit lens: the next token as each layer predicts it.")] = False,
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print what POST /v1/attention answers and nothing else.")] = False,
) -> None:
    """Draw the attention weights of a text, its strongest links, and the model's next-token predictions."""
    settings = start_settings({"model": model, "device": device, "dtype": dtype, "quantize": quantize})
    looked_at = given_text(text, "text")
    prepare_settings(settings)
    from attend.service.commands.explain import show

    show(settings, looked_at, answer=answer, layer=layer, head=head, lens=lens, as_json=json)


@app.command(cls=PlainCommand)
def pull(
    model: Annotated[str, typer.Argument(help="hf://ORG/NAME, hf://ORG/NAME/FILE.gguf, also with @REVISION.", metavar="MODEL")],
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="Folder to copy it into; without it, it stays in the cache of the hub.", metavar="DIR", show_default=False
        ),
    ] = None,
) -> None:
    """Download a checkpoint of the Hugging Face hub, check it, and print where it lies.

    HF_TOKEN opens private and gated ones. A download that broke off goes on. What is there already is not downloaded again.
    """
    settings = start_settings({"model": model})
    from attend.service.commands.pull import pull as fetch

    fetch(settings, folder)


@app.command(cls=PlainCommand)
def train(
    out: Annotated[Path, typer.Option(help="Folder for the run's state and the finished checkpoint.")] = Path("run"),
    tokens: Annotated[int, typer.Option(help="Tokens to train on, over all epochs.")] = 20_000_000,
    context: Annotated[int, typer.Option(help="Tokens in a training sequence.")] = 1024,
    batch: Annotated[int, typer.Option(help="Batch size: sequences in a step.")] = 8,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate; warms up, then falls linearly to zero.")] = 3e-3,
    original: Annotated[bool, typer.Option(help="Sinusoidal positions, post-norm, ReLU, LayerNorm, as in 2017.")] = False,
    root: Annotated[Path | None, typer.Option(help="Folder of Python files; default: the standard library.")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 is one a core.")] = 0,
) -> None:
    """Train a model on this interpreter's standard library; goes on where it stopped."""
    interrupt_unwinds()
    from attend.model.train.command import run_training
    from attend.model.train.trainer import Recipe

    recipe = Recipe(tokens=tokens, context=context, batch=batch, learning_rate=learning_rate)
    run_training(recipe, out, root, original=original, threads=threads)


@app.command(
    cls=PlainCommand,
    hidden=not BENCHMARKS.is_dir(),
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def bench(
    context: typer.Context,
    what: Annotated[
        str | None, typer.Argument(help="A benchmark, then its flags; without it, they are listed.", metavar="NAME")
    ] = None,
) -> None:
    """List the benchmarks of the source tree (loadtest/bench), or run one of them side by side with its peer."""
    from attend.service.commands.bench import list_benchmarks, run

    if what in (None, *HELP):
        print("\n".join(list_benchmarks()))
    else:
        interrupt_unwinds()
        run(what, context.args)


@app.command("inspect", cls=PlainCommand)
def inspect_(
    model: ModelArgument = None,
    json: JsonOption = False,
) -> None:
    """Show what a checkpoint or a .gguf file is and what memory it takes, or why it cannot be served.

    Weights are not loaded; a checkpoint of the hub is downloaded. Ends with status 2 where it cannot be served.
    """
    settings = start_settings({"model": model}, locate=False)
    try:
        settings = locate_model(settings)
        from attend.service.commands.inspect import show
        from attend.service.observe import tracing

        tracing.check_endpoint(settings.otel_endpoint)
        show(settings, as_json=json)
    except CheckpointError as error:
        if not json:
            raise
        place = settings.model if settings.model.startswith(HUB) else str(settings.folder)
        print(dumps({"supported": False, "folder": place, "error": str(error)}))
        raise typer.Exit(2) from error


@app.command(cls=PlainCommand)
def quality(
    model: ModelArgument = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            help="Quantised formats to compare with the model as it is, comma-separated; default: int8,int4, and none where "
            "the checkpoint is quantised."
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            help="UTF-8 file to read; default: Python's standard library, the files that the shipped model never saw."
        ),
    ] = None,
    num_bytes: Annotated[
        int | None,
        typer.Option(
            "--bytes",
            help="Bytes of the text that are read; default: about a minute for each format on two slow cores.",
            metavar="N",
        ),
    ] = None,
    outliers: Annotated[
        float | None,
        typer.Option(
            help="Inject outliers of this factor into the model first, without changing its function.", metavar="FACTOR"
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure what quantised weights cost: bits per byte of a text, KL divergence and agreement with the model as it is.

    Every format is computed as it is served, and all are in memory at the same time.
    """
    settings = start_settings({"model": model})
    interrupt_unwinds()
    prepare_settings(settings)
    from attend.service.commands.quality import show

    show(settings, quantize=quantize, text=text, num_bytes=num_bytes, outliers=outliers, as_json=json)


@app.command(cls=PlainCommand)
def check(
    url: Annotated[
        str,
        typer.Argument(help="Where the server listens for HTTP, as http://localhost:8000.", metavar="URL", show_default=False),
    ],
    grpc: Annotated[
        str | None,
        typer.Option(
            help="Where it listens for gRPC; default: at the URL's host, the port that /version names; none: no gRPC.",
            metavar="HOST:PORT",
        ),
    ] = None,
    key: KeyOption = None,
    json: JsonOption = False,
) -> None:
    """Check a running server from end to end, as its callers use it: HTTP, gRPC and metrics.

    Prints a line for each check. Ends with status 1 if one failed or no server answers, else 0. SSL_CERT_FILE names the
    authorities to trust for https, where they are not this machine's.
    """
    from attend.service.commands.check import show

    raise typer.Exit(show(url, grpc, key, as_json=json))


@app.command(cls=PlainCommand)
def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Checkpoint folder, .gguf file, or hf://ORG/NAME in the cache; without it, ATTEND_MODEL or the shipped model.",
            metavar="MODEL",
            show_default=False,
        ),
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="In place of a model the sizes of one, with random weights: llama-8b, qwen3-4b or S.")
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    json: JsonOption = False,
) -> None:
    """Check within a minute what this machine is, whether a model is computed right on it, how fast, and what is missing.

    Compares kernels with torch on the GPU or CPU, records and replays steps on a GPU, and times decode steps and a prompt of
    random weights beside the measured memory and matrix product. Downloads nothing and reads no weights. The last line is the
    verdict; status 1 where something would not serve as it should.
    """
    settings = start_settings({"model": model, "device": device, "dtype": dtype, "quantize": quantize})
    from attend.service.runtime.single import prepare

    prepare()  # as a server does, before torch is imported
    from attend.service.commands.doctor import show

    raise typer.Exit(show(settings, shape, as_json=json))


if __name__ == "__main__":
    main()
