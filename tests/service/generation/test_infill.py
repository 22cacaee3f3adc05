"""Fill in the middle: each family's tokens around the two texts, and a sentence where a vocabulary has none."""

import pytest
from tokenizers import AddedToken

from attend.model.errors import InvalidRequest, NotSupported
from attend.service.generation.infill import _FORMS, infill
from tests.fakes import build_server, byte_tokenizer


def with_tokens(*tokens: str):
    tokenizer = byte_tokenizer.__wrapped__()
    tokenizer.raw.add_tokens([AddedToken(token, special=True) for token in tokens])
    return tokenizer


@pytest.mark.parametrize("form", _FORMS, ids=lambda form: form.tokens[0])
def test_both_texts_stand_between_the_familys_tokens(form):
    text = infill(with_tokens(*form.tokens), "a%s", "b%p")
    assert text == form.layout.replace("%p", "A").replace("%s", "B").replace("A", "a%s", 1).replace("B", "b%p", 1)
    for prompt, suffix, name in (("a" + form.tokens[0], "b", "prompt"), ("a", form.tokens[-1], "suffix")):
        with pytest.raises(InvalidRequest, match=f"{name} must not hold") as caught:
            infill(with_tokens(*form.tokens), prompt, suffix)
        assert caught.value.field == name


def test_a_vocabulary_without_the_tokens_is_told_by_name():
    with pytest.raises(NotSupported, match="no tokens to fill in the middle"):
        infill(byte_tokenizer(), "a", "b")
    answer = build_server().post(b'{"prompt":"a","suffix":"b"}')
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "suffix")


def test_an_empty_suffix_is_none_and_another_needs_one_text():
    assert build_server().post(b'{"prompt":"a","suffix":"","max_tokens":2}').status_code == 200
    for body in (b'{"prompt":["a"],"suffix":"b"}', b'{"prompt":[97],"suffix":"b"}', b'{"prompt":"a","suffix":"b","echo":true}'):
        assert "needs a single prompt" in build_server().post(body).text
