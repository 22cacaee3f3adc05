"""Fill in the middle: the text between a prompt and a suffix, by the tokens that a model has for it."""

import re
from typing import NamedTuple

from attend.model.errors import InvalidRequest, NotSupported
from attend.model.text.tokenizer import Tokenizer


class _Form(NamedTuple):
    """The tokens of a family, and how it writes both texts with them."""

    tokens: tuple[str, ...]
    layout: str
    """%p stands for the prompt, %s for the suffix."""


_FORMS = (
    _Form(
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), "<|fim_prefix|>%p<|fim_suffix|>%s<|fim_middle|>"
    ),  # Qwen2.5-Coder and Qwen 3, CodeGemma
    _Form(("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "<fim_prefix>%p<fim_suffix>%s<fim_middle>"),  # StarCoder, Granite
    _Form(("<fim-prefix>", "<fim-suffix>", "<fim-middle>"), "<fim-prefix>%p<fim-suffix>%s<fim-middle>"),  # SantaCoder
    _Form(
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), "<｜fim▁begin｜>%p<｜fim▁hole｜>%s<｜fim▁end｜>"
    ),  # DeepSeek-Coder
    _Form(("▁<PRE>", "▁<SUF>", "▁<MID>"), "▁<PRE>%p▁<SUF>%s▁<MID>"),  # Code Llama
    _Form(("[SUFFIX]", "[PREFIX]"), "[SUFFIX]%s[PREFIX]%p"),  # Codestral
)


def infill(tokenizer: Tokenizer, prompt: str, suffix: str) -> str:
    """The text that the model is to continue with what stands between. Raises NotSupported where it has no tokens for it."""
    for form in _FORMS:
        if all(tokenizer.raw.token_to_id(token) is not None for token in form.tokens):
            for name, text in (("prompt", prompt), ("suffix", suffix)):
                held = next((token for token in form.tokens if token in text), None)
                if held is not None:
                    raise InvalidRequest(f"{name} must not hold {held}, which separates the two texts", name)
            before, between, after = re.split("%[ps]", form.layout)
            texts = (prompt, suffix) if form.layout.index("%p") < form.layout.index("%s") else (suffix, prompt)
            return f"{before}{texts[0]}{between}{texts[1]}{after}"
    raise NotSupported("suffix: this model's vocabulary has no tokens to fill in the middle", "suffix")
