"""`make docs`: writes the tables and the files that follow from the code. tests/test_docs.py compares them."""

import json
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from grpc import StatusCode
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from typer.core import TyperArgument, TyperGroup
from typer.main import get_command

from attend.model.config import ModelConfig
from attend.model.engine.request import OffloadStats
from attend.model.errors import AttendError, Overloaded, Unavailable
from attend.model.net.families.table import FAMILIES
from attend.model.net.features import NATIVE, TRITON, features
from attend.service.access.keys import KeyRing
from attend.service.commands.cli import app
from attend.service.commands.flags import GROUPS, allowed_values
from attend.service.contract.routes import ROUTES
from attend.service.errors import INTERNAL, TABLE
from attend.service.observe import edge, exposition
from attend.service.observe.collectors import BatchNumbers
from attend.service.runtime.models.admission import PoolCollector
from attend.service.runtime.models.entries import Entry, ModelsFile, Plan, ServedModel
from attend.service.runtime.models.pool import Pool
from attend.service.settings import Settings
from tests.fakes import FakeEngine, build_server
from tests.model.checkpoints import KINDS

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"(<!-- begin (\w+): written by `make docs` -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def settings() -> Iterator[list[str]]:
    """Each setting with its default, its values and what it is."""
    yield ["setting", "default", "values", "what"]
    for group, names in GROUPS.items():
        yield [f"**{group}**", "", "", ""]
        for name in names.split():
            field = Settings.model_fields[name]
            default = "" if field.default in (None, "") else str(field.default)
            yield [f"`{name}`", default, allowed_values(name), field.description or ""]


def routes() -> Iterator[list[str]]:
    """Each route, with the methods of gRPC that ask for the same."""
    yield ["route", "gRPC", "what"]
    for route in ROUTES:
        yield [f"`{route.method} {route.documented_path}`", ", ".join(f"`{rpc}`" for rpc in route.rpcs), route.about]


def refusals() -> Iterator[list[str]]:
    """Each way to fail, with its codes."""
    yield ["code", "HTTP", "gRPC", "type", "again", "what"]
    for kind, row in TABLE.items():
        again = "after `Retry-After`" if issubclass(kind, Overloaded | Unavailable) else ""
        yield [f"`{row.code}`", str(row.status), f"`{row.grpc.name}`", f"`{row.kind}`", again, _first(kind)]
    yield [f"`{INTERNAL.code}`", str(INTERNAL.status), f"`{StatusCode.INTERNAL.name}`", f"`{INTERNAL.kind}`", "", _BUG]


_BUG = "A bug of the server. The message has the request's id alone."


def _first(kind: type[AttendError]) -> str:
    return " ".join((kind.__doc__ or "").split()).partition(" `")[0].partition(". ")[0].rstrip(".") + "."


def metrics() -> Iterator[list[str]]:
    """Each metric, with its type, its labels beside `model` and `replica`, and its help."""
    yield ["metric", "type", "labels", "what"]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write("{}")
        file.flush()
        engine = FakeEngine()
        engine.offload = OffloadStats(0, 0, 0, 0, 0, 0, 0)
        server = build_server(engine, keys=KeyRing(file.name))
        server.metrics.has_batches(BatchNumbers)
        own = server.metrics.text()
    pages = [own, exposition.serving_metrics(["RUNNING"], 0), exposition.replica_counts(1, 1)]
    edges = edge.parse_statistics([row for transport in ("http", "grpc") for row in _edge_rows(transport)], "a", 1)
    pages.append(edge.to_exposition(edges | edge.certificate("a", 1.0, True)))
    pages.append(_page_of_models())
    for family in (each for page in pages for each in text_string_to_metric_families(page)):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"model", "replica", "le"}
        yield [f"`{name}`", family.type, ", ".join(f"`{label}`" for label in sorted(labels)), family.documentation]


def _page_of_models() -> str:
    """What a server of several models counts itself."""
    plan = Plan({"a": ServedModel(Entry(name="a"), Settings())}, ModelsFile(models=[Entry(name="a")]), 1)
    registry = CollectorRegistry()
    registry.register(PoolCollector(Pool(plan, None)))  # type: ignore[arg-type]  # nothing is started
    return generate_latest(registry).decode()


def _edge_rows(transport: str) -> list[dict[str, str]]:
    """What HAProxy's statistics say of one transport."""
    zero = dict.fromkeys(("dreq", "act", "scur", "slim", "req_tot", "hrsp_5xx"), "0")
    return [
        zero | {"pxname": f"{transport}_frontend", "svname": "FRONTEND"},
        zero | {"pxname": f"{transport}-a", "svname": "BACKEND"},
    ]


def commands() -> Iterator[list[str]]:
    """Each command with its arguments, and the first paragraph of its help."""
    yield ["command", "what"]
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    yield from _commands(group, "attend")


def _commands(group: TyperGroup, before: str) -> Iterator[list[str]]:
    for name, command in group.commands.items():
        words = f"{before} {name}"
        if isinstance(command, TyperGroup):
            yield from _commands(command, words)
            continue
        arguments = [_argument(each) for each in command.params if isinstance(each, TyperArgument)]
        about = (command.help or "").partition("\n\n")[0]
        yield [f"`{' '.join([words, *arguments])}`", " ".join(about.split())]


def _argument(argument: TyperArgument) -> str:
    name = argument.metavar or str(argument.name).upper()
    return name if argument.required else f"[{name}]"


def families() -> Iterator[list[str]]:
    """The families that are served, by who computes the tiny checkpoints that they are compared by."""
    yield ["computed by", "model_type"]
    known, found = compared(), dict[str, list[str]]()
    for kind in sorted(FAMILIES):
        asked = [features(config) for config in known.get(kind, ())]
        faster = [name for name, has in (("native", NATIVE), ("Triton", TRITON)) if all(needs <= has for needs in asked)]
        found.setdefault(", ".join((*faster, "torch")), []).append(f"`{kind}`")
    yield from ([by, ", ".join(kinds)] for by, kinds in found.items())


def compared() -> dict[str, list[ModelConfig]]:
    """What each tiny checkpoint says of itself, by `model_type`."""
    found: dict[str, list[ModelConfig]] = {}
    for make in KINDS.values():
        with torch.device("meta"):  # no weights are wanted
            raw = json.loads(make().config.to_json_string(use_diff=False))
        found.setdefault(raw["model_type"], []).append(FAMILIES[raw["model_type"]].read(raw))
    return found


TABLES: dict[str, dict[str, Callable[[], Iterator[list[str]]]]] = {
    "service/API.md": {"routes": routes, "refusals": refusals},
    "service/SETTINGS.md": {"settings": settings},
    "service/METRICS.md": {"metrics": metrics},
    "service/COMMANDS.md": {"commands": commands},
    "model/FAMILIES.md": {"families": families},
}
"""By page: the tables between its markers."""


def table(rows: Iterator[list[str]]) -> str:
    """Rows, the head first, as Markdown."""
    head, *others = rows
    escaped = ([cell.replace("|", r"\|") for cell in row] for row in (head, ["---"] * len(head), *others))
    return "".join(f"| {' | '.join(row)} |\n" for row in escaped)


def written(name: str) -> str:
    """A file as it follows from the code."""
    tables = TABLES[name]
    page = (ROOT / name).read_text(encoding="utf-8")
    found = {match[2] for match in MARKED.finditer(page)}
    assert found == tables.keys(), f"{name} has markers for {sorted(found)}, and tables are {sorted(tables)}"
    return MARKED.sub(lambda match: f"{match[1]}{table(tables[match[2]]())}{match[3]}", page)


def main() -> None:
    """Write every file."""
    for name in TABLES:
        (ROOT / name).write_text(written(name), encoding="utf-8")


if __name__ == "__main__":
    main()
