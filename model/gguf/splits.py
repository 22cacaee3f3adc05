"""How byte-level tokenizers split a text into words, by the names that GGUF has for it (`tokenizer.ggml.pre`).

Sources: the tokenizer.json of the models that a name stands for, and the list of names in llama.cpp's llama-vocab.cpp.
"""

from typing import NamedTuple

from tokenizers import Regex, normalizers, pre_tokenizers

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_QWEN35 = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASHED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_SLASHED}"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}?|"
    rf"\p{{N}}{{1,3}}|{_SLASHED}"
)


class Split(NamedTuple):
    """What a name stands for."""

    pattern: str | None
    """Of the words; None: GPT-2's own."""
    before: tuple[str, ...] = ()
    """Patterns of words that are split off first, one after the other."""
    digits: bool = False
    """Whether each digit is a word."""
    composed: bool = False
    """Whether characters are composed first (NFC)."""
    whole_words: bool = False
    """Whether a word that is a token is that token, whatever the merges."""
    starts: bool = False
    """Whether texts begin with the start token, where `tokenizer.ggml.add_bos_token` says nothing."""

    def normalizer(self) -> normalizers.Normalizer | None:
        """What is done to a text first."""
        return normalizers.NFC() if self.composed else None

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """What makes words of a text, and letters of their bytes."""
        spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None)
        if self.pattern is not None:
            splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in (*self.before, self.pattern)]
            return pre_tokenizers.Sequence([*splits, spelled])
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), spelled]) if self.digits else spelled


SPLITS = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "exaone4"), Split(None)),
    **dict.fromkeys(("starcoder", "refact", "smollm"), Split(None, digits=True)),
    "command-r": Split(None, digits=True, composed=True),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), Split(_LLAMA3, whole_words=True, starts=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), Split(_LLAMA3)),
    "glm4": Split(_LLAMA3, whole_words=True),
    "seed-coder": Split(_SEED),
    "hunyuan-dense": Split(_DEEPSEEK3, before=(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+")),
    "qwen2": Split(_QWEN2, composed=True),
    "qwen35": Split(_QWEN35, composed=True),
    "deepseek-r1-qwen": Split(_QWEN2),
    "tekken": Split(_TEKKEN, whole_words=True, starts=True),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), Split(_GPT4O)),
}
"""By `tokenizer.ggml.pre`."""
