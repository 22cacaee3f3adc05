"""`attend explain`: what the terminal draws is what the answer says."""

import io
import json

import pytest
from rich.console import Console

from attend.model.errors import SettingError
from attend.service.commands.explain import draw, links, mean
from tests.fakes import build_server
from tests.service.generation.test_explain import told


def drawn(found: dict, width: int = 100) -> str:
    text = io.StringIO()
    draw(found, Console(file=text, width=width, highlight=False))
    return text.getvalue()


def test_a_row_asks_and_a_column_answers():
    found = told(build_server(), {"prompt": "abc", "layers": [1], "heads": [0], "top_logprobs": 1})
    lines = drawn(found).splitlines()
    table = next(at for at, line in enumerate(lines) if line.startswith("query"))
    assert lines[table].split() == ["query", "a", "b", "c"]
    assert [line.split() for line in lines[table + 1 : table + 4]] == [["a", "75"], ["b", "38", "38"], ["c", "0", "38", "38"]]
    assert "Layer 1 of 0 to 2, head 0." in lines[0]
    assert "   38%  b (1) -> a (0)" in lines
    assert "8.2%" in drawn(found)  # exp(-2.5), of each token


def test_without_a_head_the_mean_of_all_is_drawn():
    assert mean([[[1.0], [0.5, 0.5]], [[1.0], [0.0, 1.0]]]) == [[1.0], [0.25, 0.75]]
    found = told(build_server(), {"prompt": "abc", "layers": [0]})
    assert "the mean of its 2 heads" in drawn(found)


def test_links_are_between_two_tokens_and_the_strongest_come_first():
    assert links([[1.0], [0.3, 0.7], [0.6, 0.1, 0.3]])[:3] == [(0.6, 2, 0), (0.3, 1, 0), (0.1, 2, 1)]


def test_a_text_too_long_for_a_table_has_its_links_and_a_longer_one_is_refused():
    server = build_server()
    shown = drawn(told(server, {"prompt": "a" * 20, "layers": [0], "heads": [0]}))
    assert "query  " not in shown and " -> a (0)" in shown
    with pytest.raises(SettingError, match="at most 40 tokens"):
        drawn(told(server, {"prompt": "a" * 41, "layers": [0], "heads": [0]}))


def test_a_layer_that_keeps_a_state_says_so_and_what_layers_would_say_is_listed():
    found = told(build_server(), {"prompt": "ab", "layers": [2], "logit_lens": 1})
    shown = drawn(found)
    assert "Layer 2 has a recurrent state" in shown
    assert "logit lens of layer  2: the next token is e" in shown


def test_the_shipped_model_explains_a_text(attend):
    status, out, err = attend("explain", "def f(x):", "--layer", "2", "--head", "1", "--json")
    assert status == 0, err
    found = json.loads(out)
    [layer] = found["layers"]
    assert (layer["layer"], [head["head"] for head in layer["heads"]]) == (2, [1])
    assert all(sum(row) == pytest.approx(1, abs=1e-5) for row in layer["heads"][0]["weights"])


def test_a_layer_that_does_not_exist_is_a_sentence(attend):
    status, _, err = attend("explain", "def", "--layer", "6")
    assert (status, err.splitlines()[-1]) == (2, "attend: layers must hold integers from 0 to 5; got 6 (integer)")
