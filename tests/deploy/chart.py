"""The settings in values.schema.json: `make docs` writes them (`python -m tests.deploy.chart`), test_chart.py compares them."""

import json
import re
from itertools import pairwise
from typing import Any, get_args

from pydantic import BeforeValidator

from attend.service.settings import Settings
from attend.service.values import size_in_bytes
from tests.deploy.manifests import ROOT

CHART = ROOT / "deploy/chart"
SCHEMA, VALUES = CHART / "values.schema.json", CHART / "values.yaml"
OWN = {
    *("device", "num_threads", "kv_cache_memory", "log_format", "log_file", "expose_docs", "model", "tensor_parallel"),
    *("api_keys_file", "tls_cert", "tls_key", "kv_disk_folder", "kv_disk_bytes", "otel_endpoint", "single", "replicas"),
    *("max_replicas", "host", "port", "grpc_port", "request_timeout_seconds", "drain_seconds"),
}
"""Settings that the chart itself derives from its other values: given under `settings` too, one of the two would lose."""

SIZE = r"^[0-9]+(\.[0-9]+ ?[KMGTkmgt][Ii]?| ?[KMGTkmgt][Ii]?)?[Bb]?$"
"""What `size_in_bytes` takes, for helm's regular expressions, which look at nothing ahead."""


def schema() -> str:
    """values.schema.json with the settings of this version."""
    whole = json.loads(SCHEMA.read_text())
    known = Settings.model_json_schema()["properties"]
    whole["properties"]["settings"]["properties"] = {name: value(name, known[name]) for name in sorted(known.keys() - OWN)}
    return json.dumps(whole, indent=1) + "\n"


def value(name: str, known: dict[str, Any]) -> dict[str, Any]:
    """What the setting says of its value, without its words: type, range, choices; of sizes, with a unit too."""
    [one] = [each for each in known.get("anyOf", [known]) if each.get("type") != "null"]
    kept = {key: one[key] for key in sorted(one) if key not in ("default", "description", "title")}
    if any(isinstance(each, BeforeValidator) and each.func is size_in_bytes for each in metadata(name)):
        return {"anyOf": [kept, {"pattern": SIZE, "type": "string"}]}
    return kept


def metadata(name: str) -> list[Any]:
    """What pydantic keeps of a setting's annotation; of an optional one, of its type too."""
    field = Settings.model_fields[name]
    return [*field.metadata, *(each for part in get_args(field.annotation) for each in getattr(part, "__metadata__", ()))]


def uncommented() -> list[str]:
    """The lines of values.yaml whose value has no comment above it. The members of a group have their own."""
    lines = ["", *VALUES.read_text().splitlines()]
    return [line for before, line in pairwise(lines) if re.match(r" *\w+: *\S", line) and not before.lstrip().startswith("#")]


if __name__ == "__main__":
    SCHEMA.write_text(schema())
