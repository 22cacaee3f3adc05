"""What the site has beside the pages of the tree: its contents, and the pages made of the code. `make docs-site`."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

from tests.service.http_api.described import document

ROOT = Path(__file__).parents[1]
BUILT = ROOT / "build/docs"
PROTO = "attend/v1/generation.proto"
CONTENTS = {
    "Guides": ["TUTORIAL", "service/README", "model/README", "deploy/README", "loadtest/README", "CONTRIBUTING"],
    "The service": [
        *(
            "service/API",
            "build/docs/http",
            "build/docs/grpc",
            "service/CLIENTS",
            "docs/client",
            "service/CHECKPOINTS",
        ),
        *(
            "service/SETTINGS",
            "service/COMMANDS",
            "service/ACCESS",
            "service/OPERATION",
            "service/METRICS",
            "service/DECISIONS",
        ),
    ],
    "The model": [
        *(
            "model/FAMILIES",
            "model/FORMATS",
            "model/TEXT",
            "model/ENGINE",
            "model/BACKENDS",
            "model/net/triton/GPU",
            "model/DECISIONS",
        ),
        "model/default/README",
    ],
    "Deployment": [
        "deploy/AIRGAP",
        "deploy/chart/README",
        "deploy/monitoring/README",
        "deploy/UPGRADING",
        "deploy/DECISIONS",
        "SECURITY",
    ],
    "Results": [
        *("loadtest/RESULTS", "loadtest/results/engine", "loadtest/results/servers", "loadtest/results/faults"),
        *("loadtest/results/soak", "loadtest/results/quality", "loadtest/results/gpu"),
    ],
    "The project": [
        *("GLOSSARY", "CHANGELOG", "attend/README", "tests/simulation/README"),
        *("tests/clients/README", "tests/release/README"),
    ],
}
"""The pages by heading, without .md, in the order of the site."""


def toctree() -> str:
    """The contents, as the first page's directives."""
    trees = (
        "\n```{{toctree}}\n:hidden:\n:titlesonly:\n:caption: {}\n\n{}\n```\n".format(
            head, "\n".join(f"/{page}" for page in pages)
        )
        for head, pages in CONTENTS.items()
    )
    return "".join(trees)


def http() -> Iterator[str]:
    """Every operation of /openapi.json: what it is, what it takes, and what it may answer."""
    yield "# HTTP routes\n\nMade of /openapi.json, which a server gives too. Every field: `/docs` of a running server.\n"
    for path, methods in document()["paths"].items():
        for method, found in methods.items():
            yield f"\n## {method.upper()} {path}\n\n{found.get('description') or found['summary']}\n"
            for each in found.get("parameters", ()):
                if "name" in each:
                    yield f"\n- `{each['name']}` ({each['in']}): {each.get('description', '')}"
            body = found.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            if body:
                yield f"\nBody: {_schema_name(body)}\n"
            yield "\n| status | what | schema |\n| --- | --- | --- |\n"
            for status, answer in found["responses"].items():
                shapes = ", ".join(_schema_name(each.get("schema", {})) for each in answer.get("content", {}).values())
                yield f"| {status} | {' '.join(answer['description'].split())} | {shapes} |\n"


def _schema_name(schema: dict[str, object]) -> str:
    """The name of a schema, or of those that it has the choice of."""
    if isinstance(name := schema.get("$ref"), str):
        return f"`{name.rpartition('/')[2]}`"
    parts = [each for key in ("anyOf", "oneOf") for each in schema.get(key, ())]  # type: ignore[attr-defined]
    return " or ".join(filter(None, map(_schema_name, parts))) or f"{schema.get('type', '')}"


def grpc() -> Iterator[str]:
    """The service, its methods and its messages, with the comments of the proto."""
    file = _proto_with_comments()
    said = {tuple(each.path): " ".join(each.leading_comments.split()) for each in file.source_code_info.location}
    yield f"# gRPC\n\nMade of `protos/{PROTO}`. What the calls do: [service/API.md](../../service/API.md#grpc).\n"
    for number, service in enumerate(file.service):
        yield f"\n## {file.package}.{service.name}\n\n| method | request | answer | what |\n| --- | --- | --- | --- |\n"
        for index, method in enumerate(service.method):
            stream = "stream of " if method.server_streaming else ""
            asked, answered = (f"[{name}](#{name.lower()})" for name in (_short(method.input_type), _short(method.output_type)))
            yield f"| `{method.name}` | {asked} | {stream}{answered} | {said.get((6, number, 2, index), '')} |\n"
    for number, message in enumerate(file.message_type):
        yield f"\n## {message.name}\n\n{said.get((4, number), '')}\n"
        if message.field:
            yield "\n| field | type | number | what |\n| --- | --- | --- | --- |\n"
        for index, field in enumerate(message.field):
            about = said.get((4, number, 2, index), "").replace("|", r"\|")
            yield f"| `{field.name}` | {_type(field)} | {field.number} | {about} |\n"


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _type(field: descriptor_pb2.FieldDescriptorProto) -> str:
    kinds = descriptor_pb2.FieldDescriptorProto
    name = _short(field.type_name) if field.type_name else kinds.Type.Name(field.type).removeprefix("TYPE_").lower()
    before = "repeated " if field.label == kinds.LABEL_REPEATED else "optional " if field.proto3_optional else ""
    return f"{before}`{name}`"


def _proto_with_comments() -> descriptor_pb2.FileDescriptorProto:
    """The proto with its comments."""
    with tempfile.NamedTemporaryFile() as out:
        flags = ["protoc", f"-I{ROOT}/protos", "--include_source_info", f"--descriptor_set_out={out.name}", PROTO]
        assert protoc.main(flags) == 0
        return descriptor_pb2.FileDescriptorSet.FromString(Path(out.name).read_bytes()).file[0]


def main() -> None:
    """Write the pages that are made of the code, below build/, which git ignores."""
    BUILT.mkdir(parents=True, exist_ok=True)
    for name, lines in (("http", http()), ("grpc", grpc())):
        (BUILT / f"{name}.md").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
