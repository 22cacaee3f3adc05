"""What the tests of batches share."""

import pytest

from attend.model.text.chat import ChatTemplate


@pytest.fixture
def chat_template() -> ChatTemplate:
    """A template that writes each message on a line of its own."""
    return ChatTemplate("{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}")
