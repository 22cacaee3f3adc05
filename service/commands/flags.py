"""Flags: those that several commands have, and the settings as flags of `serve`, one for each field of Settings."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any

import typer
from pydantic_core import PydanticUndefined
from typer.core import TyperCommand, TyperGroup

from attend.service.settings import Settings

GROUPS = {
    "Model": "model served_model_name device dtype backend quantize pooling score adapter adapters_folder max_adapters",
    "Chat and sampling": "generation_config chat_template tool_parser reasoning_parser special_tokens_in_content "
    "json_whitespace",
    "Memory and speed": "max_model_len max_batch_requests max_batch_tokens block_size kv_cache_memory kv_dtype prefix_caching "
    "state_cache_share kv_disk_folder kv_disk_bytes draft_tokens deterministic kernel_check num_threads",
    "Limits": "max_queued_requests max_queued_tokens request_timeout_seconds deadline_default_ms linger_seconds drain_seconds",
    "Files and batches": "batch_folder batch_bytes batch_key_bytes batch_file_bytes batch_key_files batch_lines "
    "batch_concurrency batch_retention_hours",
    "Requests": "strict_fields max_tokens_beyond_context",
    "Network, TLS and keys": "host port grpc_port tls_cert tls_key api_keys_file trusted_proxies tenant_header "
    "allowed_hosts cors_origins expose_docs",
    "Processes": "single models replicas max_replicas tensor_parallel prefix_routing",
    "Logs, metrics and traces": "metrics_compat otel_endpoint log_level log_format log_file",
}
"""The settings by what they are about, as `attend serve --help` and the documents show them."""
REPEATED = ("adapter",)
"""Settings whose flag may stand several times; their values are joined by commas."""
ModelOption = Annotated[
    str | None,
    typer.Option(help="Checkpoint folder, .gguf file, or hf://ORG/NAME; default: ATTEND_MODEL, or the shipped model."),
]
ModelArgument = Annotated[
    str | None,
    typer.Argument(
        help="Checkpoint folder, .gguf file, or hf://ORG/NAME; without it, ATTEND_MODEL or the shipped model.",
        metavar="MODEL",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
KeyOption = Annotated[
    str | None, typer.Option(help="API key, where the server asks for one.", envvar="ATTEND_API_KEY", metavar="KEY")
]
DeviceOption = Annotated[str | None, typer.Option(help="auto, cpu or cuda; default: ATTEND_DEVICE, or auto.")]
DtypeOption = Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16; default: ATTEND_DTYPE, or auto.")]
QuantizeOption = Annotated[str | None, typer.Option(help="none, int8 or int4; default: ATTEND_QUANTIZE, or none.")]


def with_options(options: Mapping[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add an option to a command for each of these annotations; it gets their values as `options`, None without one."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [each for each in inspect.signature(command).parameters.values() if each.name != "options"]

        def run(**values: Any) -> None:
            command(**{each.name: values.pop(each.name) for each in own}, options=values)

        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [each.replace(kind=keyword) for each in own]
        parameters += [inspect.Parameter(name, keyword, annotation=kind, default=None) for name, kind in options.items()]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__doc__, run.__name__ = command.__doc__, command.__name__
        return run

    return decorate


class PlainGroup(TyperGroup):
    """Commands whose help has the whole first sentence of each."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a row for each command."""
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        rows = [
            (name, " ".join((found.help or "").split()).partition(". ")[0].rstrip("."))
            for name, found in commands.items()
            if found is not None and not found.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class PlainCommand(TyperCommand):
    """A command whose help has its flags by group, each with VALUE where it takes one."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section of flags for each group."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if (row := param.get_help_record(ctx)) is not None:
                is_argument = param.param_type_name == "argument"
                usual = "Arguments" if is_argument else "Options"
                name = re.sub(r" ?<[^>]+>", "" if is_argument else " VALUE", row[0])
                groups.setdefault(getattr(param, "rich_help_panel", None) or usual, []).append((name, row[1]))
        for name, rows in groups.items():
            with formatter.section(name):
                formatter.write_dl(rows)


def _option(name: str, group: str) -> Any:
    """The flag of a setting as typer reads it. A value is text: Settings reads it as it reads the variable, and both complain
    in the same words.
    """
    field, flag = Settings.model_fields[name], _flag_name(name)
    default = "" if field.default in (None, "", PydanticUndefined) else f" (default {field.default})"
    about = f"{field.description}; {allowed_values(name)}{default}"
    shown: dict[str, Any] = {"help": about, "show_default": False, "rich_help_panel": group}
    if field.annotation is bool:
        return Annotated[bool | None, typer.Option(f"--{flag}/--no-{flag}", metavar=" ", **shown)]
    kind = list[str] | None if name in REPEATED else str | None
    return Annotated[kind, typer.Option(f"--{flag}", metavar="VALUE", **shown)]


def _flag_name(name: str) -> str:
    return name.replace("_", "-")


@cache
def _schema() -> dict[str, Any]:
    return Settings.model_json_schema()


def allowed_values(name: str) -> str:
    """What a setting may be, for help and documentation: `1 to 65535`, `auto, cpu or cuda`."""
    schema = _schema()["properties"][name]
    schema = next((part for part in schema.get("anyOf", ()) if part["type"] != "null"), schema)
    if "enum" in schema:
        *others, last = (str(one) or "empty" for one in schema["enum"])
        return f"{', '.join(others)} or {last}"
    if schema["type"] not in ("integer", "number"):
        return {"boolean": "true or false"}.get(schema["type"], "text")
    above = schema.get("exclusiveMinimum")
    low = f"above {above:g}" if above is not None else f"{schema['minimum']:g}"
    high = schema.get("maximum")
    return f"{low} or more" if high is None else f"{low} to {high:.10g}"


SETTINGS = {name: _option(name, group) for group, names in GROUPS.items() for name in names.split()}
"""The settings as options of `attend serve`."""


def without_values(words: Sequence[str]) -> list[str]:
    """`--single true` and `--single=false` as `--single` and `--no-single`: what other commands take is understood here too."""
    switches = {f"--{_flag_name(name)}" for name, field in Settings.model_fields.items() if field.annotation is bool}
    found: list[str] = []
    for word in words:
        flag, equals, value = word.partition("=") if word.startswith("--") else (found[-1] if found else "", " ", word)
        if equals and flag in switches and value.lower() in ("true", "false"):
            found = found if equals == "=" else found[:-1]
            found.append(flag if value.lower() == "true" else f"--no-{flag[2:]}")
        else:
            found.append(word)
    return found
