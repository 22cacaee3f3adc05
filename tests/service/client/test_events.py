"""What the HTTP clients send again."""

import json

import pytest

from service.client.events import body_of
from service.client.retry import Call, Means


@pytest.mark.parametrize(
    ("fields", "received", "resumed"),
    [
        ({"prompt": "a"}, (), None),
        ({"prompt": "a"}, (5, 6), [5, 6]),
        ({"messages": [{"role": "user", "content": "a"}]}, (5, 6), None),
    ],
    ids=["at first", "a completion", "a conversation"],
)
def test_only_a_completion_goes_on_after_the_tokens_that_have_come(fields, received, resumed):
    body = json.loads(body_of(fields, Call(Means(), 7, received)))
    assert body == fields | {"stream": True, "return_token_ids": True, "seed": 7} | (
        {} if resumed is None else {"resume_token_ids": resumed}
    )
