"""The site has every page of the tree, every route and every RPC. `make docs-site` builds it and checks its links."""

import re

from attend.service.contract.routes import ROUTES
from attend.v1 import generation_pb2 as pb
from docs import reference
from tests.test_documents import PAGES

SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"]


def test_every_page_of_the_tree_stands_once_in_the_contents():
    listed = sorted(page for pages in reference.CONTENTS.values() for page in pages)
    assert listed == sorted({str(page)[: -len(".md")] for page in PAGES} - {"README"} | {"build/docs/http", "build/docs/grpc"})
    assert all(f"\n/{page}\n" in reference.toctree() for page in listed)


def test_the_page_of_http_has_every_route_and_what_it_may_answer():
    page = "".join(reference.http())
    parts = dict(re.findall(r"^## (\w+ \S+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert parts.keys() >= {f"{route.method} {route.documented_path}" for route in ROUTES}
    assert all("| 200 |" in part for part in parts.values())
    assert "Body: `ChatRequest`" in parts["POST /v1/chat/completions"]


def test_the_page_of_grpc_has_every_method_and_every_field_with_its_comment():
    page = "".join(reference.grpc())
    for method in SERVICE.methods:
        assert f"| `{method.name}` | [{method.input_type.name}]" in page
    for message in pb.DESCRIPTOR.message_types_by_name.values():
        for field in message.fields:
            assert f"| `{field.name}` | " in page.split(f"\n## {message.name}\n")[1].split("\n## ")[0]
    assert "| `cache_salt` | `string` | 12 | Requests share cached prefixes only within one salt. |" in page
