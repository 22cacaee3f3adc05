"""The proto's own checks: what is well made and only added to passes, and every way to break a caller is told."""

import shutil
from pathlib import Path

import pytest

from tests import check_protos
from tests.check_protos import BASE, PROTO, ROOT


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A copy of all that the checks read."""
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    (tmp_path / BASE).parent.mkdir(parents=True)
    for name in ("buf.yaml", BASE):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def change(root: Path, old: str, new: str) -> None:
    """One edit of the proto."""
    text = (root / "protos" / PROTO).read_text(encoding="utf-8")
    assert old in text
    (root / "protos" / PROTO).write_text(text.replace(old, new, 1), encoding="utf-8")


def test_the_proto_passes_its_checks(root):
    assert check_protos.main(root) == 0


BROKEN = {
    "removed field": ("  int64 num_cached_tokens = 2;\n", "", "num_cached_tokens"),
    "removed field, its number and name reserved": (
        "  int64 num_cached_tokens = 2;\n", '  reserved 2;\n  reserved "num_cached_tokens";\n', "num_cached_tokens",
    ),
    "changed number": ("string cache_salt = 12;", "string cache_salt = 99;", "cache_salt"),
    "swapped numbers": (
        "double queue_ms = 1;\n  double prefill_ms = 2;", "double queue_ms = 2;\n  double prefill_ms = 1;", "prefill_ms",
    ),
    "changed type": ("optional double temperature = 6;", "optional float temperature = 6;", "type"),
    "changed type of the same bytes": ("int64 index = 1;", "uint64 index = 1;", "type"),
    "presence dropped": ("optional int64 max_tokens = 5;", "int64 max_tokens = 5;", "cardinality"),
    "renamed field": ("string request_id = 1;", "string id = 1;", "request_id"),
    "field moved out of its oneof": ("    int64 stop_token_id = 3;\n  }", "  }\n  int64 stop_token_id = 3;", "oneof"),
    "removed enum value": ("  FINISH_REASON_ABORT = 4;\n", "", 'value "4" on enum "FinishReason" was deleted'),
    "renamed enum value": ("FINISH_REASON_ABORT = 4;", "FINISH_REASON_ABORTED = 4;", "FINISH_REASON_ABORT"),
    "removed method": ("  rpc Detokenize(DetokenizeRequest) returns (DetokenizeResponse);\n", "", "Detokenize"),
    "method that no longer streams": ("returns (stream GenerateResponse)", "returns (GenerateResponse)", "stream"),
    "renamed package": ("package attend.v1;", "package attend.v2;", "attend.v1"),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "told"), BROKEN.values(), ids=BROKEN)
def test_a_change_that_breaks_a_caller_is_told(root, old, new, told):
    change(root, old, new)
    (complaint,) = check_protos.breaking(root)
    assert told in complaint.partition("\n")[2]
    assert "tests.wire.record --base" in complaint
    assert check_protos.main(root) > 0


BADLY_MADE = {
    "enum value without its prefix": ("FINISH_REASON_ABORT = 4;", "ABORT = 4;", "FINISH_REASON_"),
    "enum without a zero of its own": ("FINISH_REASON_UNSPECIFIED = 0;", "FINISH_REASON_NONE = 0;", "_UNSPECIFIED"),
    "field in capitals": ("string request_id = 1;", "string requestId = 1;", "request_id"),
    "message in small letters": ("message TokenIds {", "message tokens {}\n\nmessage TokenIds {", "Tokens"),
    "method in small letters": ("rpc Tokenize(", "rpc tokenize(", "PascalCase"),
    "service without its suffix": ("service GenerationService", "service Generation", "Service"),
    "package in another folder": ("package attend.v1;", "package attend.v2;", "attend/v2"),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "told"), BADLY_MADE.values(), ids=BADLY_MADE)
def test_a_badly_made_proto_is_told(root, old, new, told):
    change(root, old, new)
    (complaint,) = check_protos.lint(root)
    assert told in complaint
    assert check_protos.main(root) > 0


def test_a_field_that_is_added_breaks_nobody_but_wants_its_code(root):
    change(root, "TokenIds resume_token_ids = 14;", "TokenIds resume_token_ids = 14;\n  string label = 99;")
    assert not check_protos.lint(root)
    assert not check_protos.breaking(root)
    (complaint,) = check_protos.generated(root)
    assert "generation_pb2.py" in complaint
    assert "make protos" in complaint


def test_a_comment_is_no_change_of_the_wire(root):
    change(root, "// Default 16.", "// Sixteen where it is absent.")
    assert not check_protos.breaking(root)


def test_edited_generated_code_is_told(root):
    path = root / "protos/attend/v1/generation_pb2_grpc.py"
    path.write_bytes(path.read_bytes() + b"# edited\n")
    (complaint,) = check_protos.generated(root)
    assert "generation_pb2_grpc.py" in complaint


@pytest.mark.parametrize("damage", ["absent", "cut", "proto"])
def test_a_check_that_cannot_run_fails(root, damage):
    if damage == "proto":
        change(root, "message TokenIds {", "message TokenIds")
    elif damage == "cut":
        (root / BASE).write_bytes((root / BASE).read_bytes()[:-100])
    else:
        (root / BASE).unlink()
    assert check_protos.breaking(root)


def test_a_new_base_holds_the_proto_as_it_stands(root):
    change(root, "string request_id = 1;", "string id = 1;")
    assert check_protos.breaking(root)
    check_protos.build_base(root)
    assert not check_protos.breaking(root)
