"""Checks a checkpoint's files against each other, before the server listens."""

from pathlib import Path

from attend.model.config import DEFAULT_MODEL
from attend.model.errors import CheckpointError
from attend.model.text.chat import ChatTemplate
from attend.model.text.control_tokens import ControlTokens
from attend.model.text.tokenizer import Tokenizer
from attend.model.text.tokenizer_files import read_facts


def read_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a folder, for a model of so many tokens. Raises CheckpointError where it is another model's.

    Added tokens may lie beyond the model's, as image tokens do in a text model: a prompt that has one is refused by itself.
    """
    return of_model(Tokenizer.load(folder), folder, vocab_size)


def of_model(tokenizer: Tokenizer, folder: Path, vocab_size: int) -> Tokenizer:
    """The same tokenizer, for a model of so many tokens. Raises as `read_tokenizer` does."""
    if tokenizer.size <= vocab_size:
        return tokenizer
    last, token = max(((i, token) for token, i in tokenizer.raw.get_vocab(with_added_tokens=False).items()), default=(-1, ""))
    if last >= vocab_size and token not in {added.content for added in tokenizer.raw.get_added_tokens_decoder().values()}:
        known = f"config.json has vocab_size {vocab_size}"
        raise CheckpointError(f"{folder / 'tokenizer.json'} has token {last}, {token!r}, but {known}: it is another model's")
    return tokenizer


def read_template(
    folder: Path, tokenizer: Tokenizer, file: Path | None = None, *, special_tokens_in_content: bool
) -> ChatTemplate | None:
    """The chat template of a folder, or that of a `file` in its place; None where it has none.

    With `special_tokens_in_content` control tokens in a caller's texts are control tokens.
    """
    template = ChatTemplate.load(folder, file)
    if template is not None:
        template.shapes.try_all()
    if template is not None and not special_tokens_in_content:
        template.control = ControlTokens(tokenizer.raw, template.sources)
    return template


def was_taught(template: ChatTemplate) -> bool:
    """True if a model with this template was taught to chat: the shipped one, and copies of it, only join the messages."""
    return bool(template.source != read_facts(DEFAULT_MODEL)["chat_template"])
