"""What the files of sentence-transformers ask for, and what is said where that is not computed."""

import json
from pathlib import Path
from typing import Any

import pytest

from attend.model.errors import NotSupported
from attend.model.net.checkpoint import inspect
from attend.model.pooling import CHOICES, NO_EMBEDDINGS, EmbeddingRules, Pooling, chosen_rules, read_rules
from tests.model.gguf_files import make, write_gguf

KINDS = ("Transformer", "Pooling", "Normalize")
MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


def modules(*kinds: str) -> list[dict[str, Any]]:
    """As sentence-transformers writes them."""
    return [
        {"idx": at, "name": str(at), "path": f"{at}_{kind}" if at else "", "type": f"sentence_transformers.models.{kind}"}
        for at, kind in enumerate(kinds)
    ]


def modes(*on: str) -> dict[str, Any]:
    return {"word_embedding_dimension": 32} | {f"pooling_mode_{mode}": mode in on for mode in MODES} | {"include_prompt": True}


def written(folder: Path, listed: Any = None, pooling: Any = None, sentences: Any = None) -> Path:
    """The files in a folder; a str as it stands."""
    files = {
        "modules.json": modules(*KINDS) if listed is None else listed,
        "1_Pooling/config.json": modes("lasttoken") if pooling is None else pooling,
        "sentence_bert_config.json": sentences,
    }
    for name, value in files.items():
        if value is not None:
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("pooling", "wanted"),
    [
        (modes("lasttoken"), Pooling.LAST),
        (modes("mean_tokens"), Pooling.MEAN),
        ({"pooling_mode": "lasttoken"}, Pooling.LAST),
        ({"pooling_mode": "mean"}, Pooling.MEAN),
        (modes("cls_token"), Pooling.CLS),
        ({"pooling_mode": "cls"}, Pooling.CLS),
    ],
)
@pytest.mark.parametrize("kinds", [KINDS, KINDS[:2]])
def test_the_mode_is_read(tmp_path, pooling, wanted, kinds):
    assert read_rules(written(tmp_path, modules(*kinds), pooling)) == EmbeddingRules(wanted, None, "")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"listed": modules(*KINDS[:2], "Dense")}, "the module 'Dense'"),
        ({"listed": modules(*KINDS[:2], "Pooling")}, "the module 'Pooling'"),
        ({"listed": modules("Transformer")}, "has no Pooling"),
        ({"listed": {}}, "array"),
        ({"listed": [3]}, "3 (integer)"),
        ({"listed": [{"type": "a.Pooling"}]}, "a type and a path"),
        ({"listed": "["}, "JSON"),
        ({"listed": modules("Transformer", "Transformer")}, "'Transformer'"),
        ({"pooling": modes("max_tokens")}, "asks for max_tokens"),
        ({"pooling": modes("lasttoken", "mean_tokens")}, "mean_tokens and lasttoken"),
        ({"pooling": modes()}, "asks for no pooling"),
        ({"pooling": {"pooling_mode": "weightedmean"}}, "asks for weightedmean"),
        ({"pooling": "{"}, "JSON"),
        ({"pooling": {"pooling_mode": ["mean"]}}, "asks for"),
        ({"sentences": {"max_seq_length": 0}}, "positive integer"),
        ({"sentences": {"max_seq_length": True}}, "positive integer"),
        ({"sentences": {"do_lower_case": True}}, "do_lower_case"),
    ],
)
def test_what_is_not_computed_is_refused_with_a_sentence_that_shows_no_path(tmp_path, files, words):
    rules = read_rules(written(tmp_path, **files))
    assert (rules.pooling, rules.max_tokens) == (None, None)
    with pytest.raises(NotSupported) as caught:
        rules.require_pooling()
    assert words in str(caught.value)
    assert str(tmp_path) not in str(caught.value)


def test_a_checkpoint_without_the_files_makes_no_embeddings(tmp_path):
    with pytest.raises(NotSupported, match=r"has no modules\.json"):
        read_rules(tmp_path).require_pooling()


@pytest.mark.parametrize(("kind", "wanted"), [(1, Pooling.MEAN), (2, Pooling.CLS), (3, Pooling.LAST)])
def test_the_pooling_of_a_gguf_file_is_read(tmp_path, kind, wanted):
    path = write_gguf(make("qwen3", tmp_path), tmp_path / "tiny.gguf", metadata={"qwen3.pooling_type": kind})
    assert read_rules(path) == EmbeddingRules(wanted, None, "")
    assert inspect(path).family == "qwen3"


@pytest.mark.parametrize(("kind", "said"), [(None, "no pooling_type"), (0, "0 (NONE)"), (4, "4 (RANK)")])
def test_a_gguf_file_whose_pooling_is_not_computed_still_serves_text(tmp_path, kind, said):
    path = write_gguf(make("qwen3", tmp_path), tmp_path / "tiny.gguf", metadata={"qwen3.pooling_type": kind})
    assert inspect(path).family == "qwen3"
    with pytest.raises(NotSupported) as caught:
        read_rules(path).require_pooling()
    assert said in str(caught.value) and str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize(("choice", "pooling"), CHOICES.items())
def test_a_chosen_pooling_is_used_where_the_files_say_nothing_and_no_line_is_written(tmp_path, choice, pooling):
    lines: list[str] = []
    assert chosen_rules(read_rules(tmp_path), choice, lines.append).require_pooling() is pooling
    path = write_gguf(make("qwen3", tmp_path), tmp_path / "tiny.gguf")
    assert chosen_rules(read_rules(path), choice, lines.append).require_pooling() is pooling
    assert lines == []


def test_a_refusal_where_the_files_say_nothing_names_the_flag(tmp_path):
    path = write_gguf(make("qwen3", tmp_path), tmp_path / "tiny.gguf")
    assert all("--pooling" in rules.refusal for rules in (NO_EMBEDDINGS, read_rules(path)))
    assert "--pooling" not in read_rules(written(tmp_path, pooling=modes("max_tokens"))).refusal
