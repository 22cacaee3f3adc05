"""How byte-level tokenizers split a text into words, by the names that GGUF has for it (`tokenizer.ggml.pre`).

Sources: the tokenizer.json of the models that a name stands for, and the names and patterns of llama.cpp's llama-vocab.cpp.
"""

from typing import NamedTuple

from tokenizers import Regex, normalizers, pre_tokenizers

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_QWEN35 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
_SEED = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASHED = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_SLASHED}"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}?|"
    rf"\p{{N}}{{1,3}}|{_SLASHED}"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
)
_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-"
    "\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Letters that are upper or lower case, in an older Unicode."""
_MARKS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_DEEPSEEK_LLM = (r"[\r\n]", rf"\s?[{_CASED}]+", rf"\s?[{_MARKS}]+", r"\s+$", _HAN, r"\p{N}+")
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")


class Split(NamedTuple):
    """How the pre-tokenizer that `tokenizer.ggml.pre` names splits a text."""

    patterns: tuple[str, ...]
    """Regular expressions of the words; each one splits what those before it have left."""
    uses_nfc: bool = False
    """True if characters are composed first (NFC)."""
    whole_words: bool = False
    """True if a word that is a token is that token, whatever the merges."""
    starts: bool = False
    """True if texts begin with the start token, where `tokenizer.ggml.add_bos_token` says nothing."""

    def normalizer(self) -> normalizers.Normalizer | None:
        """The normalizer, which changes a text before it is split; None: there is none."""
        return normalizers.NFC() if self.uses_nfc else None

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """The pre-tokenizer: it splits a text into words, and writes their bytes as letters."""
        known = self.patterns[-1] == _GPT2  # to ByteLevel itself, which is faster
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=known)
        splits = self.patterns[:-1] if known else self.patterns
        return pre_tokenizers.Sequence([*(pre_tokenizers.Split(Regex(each), "isolated") for each in splits), letters])


SPLITS = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "exaone4", "granite-docling"), Split((_GPT2,))),
    **dict.fromkeys(("starcoder", "refact", "smollm", "exaone"), Split((r"\p{N}", _GPT2))),
    "command-r": Split((r"\p{N}", _GPT2), uses_nfc=True),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2"), Split((_LLAMA3,), whole_words=True, starts=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), Split((_LLAMA3,))),
    "glm4": Split((_LLAMA3,), whole_words=True),
    "qwen2": Split((_QWEN2,), uses_nfc=True),
    "qwen35": Split((_QWEN35,), uses_nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "hunyuan"), Split((_QWEN2,))),
    **dict.fromkeys(("bailingmoe", "bailingmoe2"), Split((_QWEN2,), uses_nfc=True)),
    "seed-coder": Split((_SEED,)),
    "tekken": Split((_TEKKEN,), whole_words=True, starts=True),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), Split((_GPT4O,))),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), Split(_DEEPSEEK3)),
    "deepseek-llm": Split(_DEEPSEEK_LLM),
    "deepseek-coder": Split(_DEEPSEEK_CODER),
    "default": Split(_DEFAULT),
}
"""How texts are split, by the value of `tokenizer.ggml.pre`."""
