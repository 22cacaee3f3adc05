"""GGUF metadata -> the tokenizer, its special tokens, and where answers end.

Three kinds are read. "gpt2" is byte-level BPE with merges. "llama" is SentencePiece's BPE: it has scores in place of merges,
and bytes for what has no token. "gemma4" is the same with merges. Source: docs/gguf.md of ggml, and llama.cpp's
llama-vocab.cpp for what a missing key means.
"""

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from attend.model.errors import CheckpointError, is_failure
from attend.model.gguf.container import Container
from attend.model.gguf.splits import SPLITS

log = logging.getLogger("attend.model")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""The kinds of tokens, as `tokenizer.ggml.token_type` counts them."""
NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "sep_token": "seperator", "pad_token": "padding"}
"""How GGUF spells the names of special tokens, one of them wrongly."""
ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
TURNS = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>"),
        *("<|end_of_text|>", "<EOT>", "_<EOT>", "< EOT >", "[EOT]", "[EOS]", "<end_of_utterance>", "</s>", "<eos>"),
        *("<｜end▁of▁sentence｜>", "<|eot|>", "<turn|>", "<|endofturn|>", "[|endofturn|]", "<|END_OF_TURN_TOKEN|>"),
        *("<|role_end|>", "<|flush|>", "<|calls|>"),
    }
)
"""Tokens that end an answer, whether or not the metadata say so: most files name one of several. They are control tokens, or
the file's chat template writes them: whoever tunes a model often adds them as a token of another kind.
"""
OF_MAKERS = {
    "gemma4": ("<|tool_response>",),
    "glm": ("<|user|>", "<|observation|>"),
    "phi3": ("<|assistant|>",),
}
"""Ends of families that only the generation_config.json of their makers names: a file may say nothing of them."""
READ = frozenset((
    *("model", "pre", "tokens", "token_type", "scores", "merges", "add_space_prefix", "add_bos_token", "add_eos_token"),
    *("eos_token_ids", "suppress_tokens"),
    *(f"{name}_token_id" for name in (*NAMED.values(), *ENDS)),
))  # fmt: skip
HARMLESS = frozenset((
    *("token_type_count", "mask_token_id", "cls_token_id"),  # of encoders
    *("add_padding_token", "add_unknown_token", "add_mask_token", "add_cls_token"),  # nothing adds these
    *("remove_extra_whitespaces", "precompiled_charsmap"),  # of vocabularies of other kinds
    *("fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id"),  # known by their texts
    *("prefix_token_id", "suffix_token_id", "middle_token_id"),
    *("bos_token_ids", "padding_token_ids", "added_tokens"),  # of Ollama, and of the specification: nothing reads these
    *("add_sep_token", "add_seperator_token"),  # between two texts
))  # fmt: skip
"""Keys after `tokenizer.ggml.` that change no token of the kinds that are read."""
OFF = ("add_eot_token", "normalizer.lowercase", "normalizer.strip_accents")
"""Keys that change nothing where they are false."""
BESIDE = ("tokenizer.huggingface.json", "tokenizer.rwkv.world", "tokenizer.chat_template")
"""What other keys of `tokenizer.` begin with: those of other readers, and chat templates."""
SPACE = "▁"
_FACTOR = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: odd, and far from a small number."""


class Vocabulary:
    """The tokens of a file, checked. Raises CheckpointError."""

    def __init__(self, container: Container) -> None:
        self._path, self._said = container.path, container.metadata
        self.kind = self.metadata_value("model")
        self._check_keys()
        self.words: list[str] = self.array("tokens", str)
        kinds = self.array("token_type", int) if self.metadata_value("token_type") is not None else [NORMAL] * len(self.words)
        if len(kinds) < len(self.words):
            raise self.wrong(f"tokenizer.ggml.token_type has {len(kinds)} elements for {len(self.words)} tokens")
        self.kinds: list[int] = kinds[: len(self.words)]  # those of a padded vocabulary may go on
        self.ids: dict[str, int] = {}
        for token, (word, kind) in enumerate(zip(self.words, self.kinds, strict=True)):
            if kind != UNUSED and self.ids.setdefault(word, token) != token and word:  # no text is the empty word
                raise self.wrong(f"tokens {self.ids[word]} and {token} are both {word[:100]!r}")
        texts = [text for text in self.templates.values() if isinstance(text, str)]
        written = {word for word in TURNS if any(word in text for text in texts)} | self._of_makers
        for token, word in enumerate(self.words):
            if word in written and self.ids.setdefault(word, token) == token:
                self.kinds[token] = CONTROL

    def wrong(self, what: str) -> CheckpointError:
        """The error for something that is wrong with the file."""
        return CheckpointError(f"{self._path}: {what}")

    def _check_keys(self) -> None:
        for key, value in self._said.items():
            name = key.removeprefix("tokenizer.ggml.")
            known = name in READ or name in HARMLESS or (name in OFF and value is False) or key.startswith(BESIDE)
            if key.startswith("tokenizer.") and not known:
                what = (
                    f"= {repr(value)[:100]} is not supported" if name in OFF else "is an unknown key, which may change tokens"
                )
                raise self.wrong(f"{key[:100]} {what}")

    def metadata_value(self, name: str) -> Any:
        """A value of the tokenizer's metadata, `tokenizer.ggml.<name>`; None where there is none."""
        return self._said.get(f"tokenizer.ggml.{name}")

    def array(self, name: str, kind: type, count: int | None = None) -> list[Any]:
        """An array of the metadata whose elements are of one type."""
        values = self.metadata_value(name)
        if not isinstance(values, list) or not values or type(values[0]) is not kind:
            raise self.wrong(f"tokenizer.ggml.{name} must be an array of {kind.__name__}")
        if count is not None and len(values) != count:
            raise self.wrong(f"tokenizer.ggml.{name} has {len(values)} elements for {count} tokens")
        return values

    def token(self, name: str) -> int | None:
        """The id of a special token, None where there is none."""
        token = self.metadata_value(f"{name}_token_id")
        if token is None or token == 0xFFFFFFFF:  # as some writers say none
            return None
        if type(token) is int and token >= len(self.words):  # as of a padded vocabulary: llama.cpp passes it over too
            log.info("%s: tokenizer.ggml.%s_token_id %d is no token: ignored", self._path, name, token)
            return None
        if type(token) is not int or token < 0:
            raise self.wrong(f"tokenizer.ggml.{name}_token_id must be one of {len(self.words)} tokens; got {repr(token)[:100]}")
        return token

    def flag(self, name: str, default: bool) -> bool:
        """A boolean, or the default where the key is absent. Raises CheckpointError for anything else."""
        value = self.metadata_value(name)
        if not isinstance(value, bool | None):
            raise self.wrong(f"tokenizer.ggml.{name} must be true or false; got {repr(value)[:100]}")
        return default if value is None else value

    @property
    def templates(self) -> dict[str, str]:
        """The chat templates by their names."""
        start = "tokenizer.chat_template"
        said = {key: text for key, text in self._said.items() if key == start or key.startswith(f"{start}.")}
        return {key.removeprefix(start).removeprefix(".") or "default": text for key, text in said.items()}

    @property
    def _of_makers(self) -> set[str]:
        family = "glm" if "[gMASK]" in self.ids else self._said.get("general.architecture")
        return {word for word in OF_MAKERS.get(str(family), ()) if word in self.ids}

    @property
    def ends(self) -> list[int]:
        """The tokens that end an answer. Of gpt-oss, `<|end|>` ends a message of several."""
        named = [token for name in ENDS if (token := self.token(name)) is not None]
        if self.metadata_value("eos_token_ids") is not None:  # as Ollama writes them
            named += [token for token in self.array("eos_token_ids", int) if 0 <= token < len(self.words)]
        turns = {word for word in TURNS | self._of_makers if word in self.ids and self.kinds[self.ids[word]] == CONTROL}
        if {"<|return|>", "<|call|>"} <= turns:
            turns -= {"<|end|>"}
        return list(dict.fromkeys([*named, *sorted(self.ids[word] for word in turns)]))


@lru_cache(maxsize=1)
def vocabulary_of(container: Container) -> Vocabulary:
    """The tokens of a file, checked once: of 262,144 that takes 0.1 s. Raises CheckpointError."""
    return Vocabulary(container)


class Maker(NamedTuple):
    """How a kind of vocabulary becomes a tokenizer."""

    make: Callable[[Vocabulary], Tokenizer]
    starts: Callable[[Vocabulary], bool]
    """True if texts begin with the start token, where the metadata say nothing."""


def tokenizer_config(container: Container) -> dict[str, Any]:
    """What tokenizer_config.json would say: special tokens by name, and the chat template."""
    vocabulary = vocabulary_of(container)
    ids = {name: vocabulary.token(theirs) for name, theirs in NAMED.items()}
    found: dict[str, Any] = {name: vocabulary.words[token] for name, token in ids.items() if token is not None}
    if vocabulary.templates:
        found["chat_template"] = [{"name": name, "template": text} for name, text in vocabulary.templates.items()]
    return found


def build_tokenizer(container: Container) -> Tokenizer:
    """The tokenizer of a file. Raises CheckpointError."""
    vocabulary = vocabulary_of(container)
    if str(vocabulary.kind) not in MAKERS:
        kind = str(vocabulary.kind)[:100]
        raise vocabulary.wrong(f"tokenizer.ggml.model {kind!r} is not supported; known: {', '.join(MAKERS)}")
    maker = MAKERS[vocabulary.kind]
    try:
        raw = maker.make(vocabulary)
    except CheckpointError:
        raise
    except BaseException as error:  # the library raises bare Exception for every kind of damage, or panics
        if not is_failure(error):
            raise
        raise vocabulary.wrong(f"no tokenizer can be built from its tokens: {error}") from error
    strips = vocabulary.kind == "llama" and container.metadata.get("general.architecture") == "phi3"
    raw.add_tokens(_added_tokens(vocabulary, strips=strips))
    _frame(raw, vocabulary, maker.starts(vocabulary))
    return raw


def _added_tokens(vocabulary: Vocabulary, *, strips: bool) -> list[AddedToken]:
    """Tokens that are found in a text before it is split. With `strips`, as Phi-3's do, they take the spaces after them."""
    kept = ("<unk>", "<s>", "<|endoftext|>")
    return [
        AddedToken(word, special=kind != USER_DEFINED, normalized=False, rstrip=strips and word not in kept)
        for word, kind in zip(vocabulary.words, vocabulary.kinds, strict=True)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and word
    ]


def _frame(raw: Tokenizer, vocabulary: Vocabulary, starts: bool) -> None:
    """Put the start and the end token round a text, as far as the file asks for it. Gemma 4 answers nothing without the start,
    and early files of it say false.
    """
    ids = {}
    for name, default in (("bos", starts), ("eos", False)):
        token = vocabulary.token(name)
        asks = vocabulary.flag(f"add_{name}_token", default) or (name == "bos" and vocabulary.kind == "gemma4")
        if asks and token is not None:
            ids[name] = token
    if ids:
        single = [name for name in ("bos", "$A", "eos") if name == "$A" or name in ids]
        described = [{"id": name, "ids": [token], "tokens": [vocabulary.words[token]]} for name, token in ids.items()]
        raw.post_processor = processors.TemplateProcessing(single=single, pair=["$A", "$B"], special_tokens=described)


def _byte_level(vocabulary: Vocabulary) -> Tokenizer:
    split = _split(vocabulary)
    merges = _pairs(vocabulary) if vocabulary.metadata_value("merges") else []
    raw = Tokenizer(models.BPE(vocabulary.ids, merges, ignore_merges=split.whole_words))
    if (normalizer := split.normalizer()) is not None:
        raw.normalizer = normalizer
    raw.pre_tokenizer, raw.decoder = split.pre_tokenizer(), decoders.ByteLevel()
    return raw


def _split(vocabulary: Vocabulary) -> Any:
    name = vocabulary.metadata_value("pre")
    if name not in SPLITS:
        raise vocabulary.wrong(f"tokenizer.ggml.pre {str(name)[:100]!r} is not supported; known: {', '.join(SPLITS)}")
    return SPLITS[name]


def _pairs(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """The merges as the file has them, but for those that end in no token, which fall apart again."""
    pairs = []
    for text in vocabulary.array("merges", str):
        if (at := text.find(" ", 1)) < 0:
            raise vocabulary.wrong(f"tokenizer.ggml.merges has {text[:100]!r}, which is no pair")
        pairs.append((text[:at], text[at + 1 :]))
    kept = vocabulary.ids.keys() | {part for pair in pairs for part in pair}
    return [pair for pair in pairs if "".join(pair) in kept or not vocabulary.ids.keys() >= set(pair)]


def _spaced_tokenizer(vocabulary: Vocabulary, merges: list[tuple[str, str]], *, prefixed: bool) -> Tokenizer:
    """BPE of characters, with bytes for what has no token. `prefixed`: whether a space stands before a text by default."""
    unknown = vocabulary.token("unknown")
    word = vocabulary.words[0 if unknown is None else unknown]
    raw = Tokenizer(models.BPE(vocabulary.ids, merges, unk_token=word, fuse_unk=True, byte_fallback=True))
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    spelled = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.flag("add_space_prefix", prefixed):
        spaces, spelled = [normalizers.Prepend(SPACE), *spaces], [*spelled, decoders.Strip(" ", 1, 0)]
    raw.normalizer, raw.decoder = normalizers.Sequence(spaces), decoders.Sequence(spelled)
    return raw


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """The pairs that make a token, the best score first: SentencePiece joins whichever neighbours make the best token.

    Of those with one score `transformers` takes the longest first part first, and so do we.
    """
    scores = vocabulary.array("scores", float, len(vocabulary.words))
    tokens = [token for token in vocabulary.ids.values() if vocabulary.kinds[token] == NORMAL]
    words, ids = [vocabulary.words[token] for token in tokens], numpy.array(tokens, numpy.int64)
    length = numpy.fromiter(map(len, words), numpy.int64, len(words))
    which, at = _splits(words, length)
    order = numpy.lexsort((ids[which], at - length[which], -at, -numpy.array(scores)[ids[which]]))
    splits = zip(which[order].tolist(), at[order].tolist(), strict=True)
    return [(words[word][:left], words[word][left:]) for word, left in splits]


def _splits(words: list[str], length: NDArray[numpy.int64]) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64]]:
    """All ways to split a word into two other words: indices of the words [N], and lengths of their first parts [N].

    A word is told by a polynomial of its letters modulo 2^64, so that all parts of 262,144 words are looked up at once. For
    two texts to have one number is as good as impossible; a file that is made so has merges of no words, and is refused.
    """
    letters = numpy.frombuffer("".join(words).encode("utf-32-le", "surrogatepass"), numpy.uint32).astype(numpy.uint64)
    ends = numpy.cumsum(length)
    starts, which = ends - length, numpy.repeat(numpy.arange(len(words)), length)
    powers = numpy.ones((2, len(letters) + 1), numpy.uint64)
    powers[0, 1:], powers[1, 1:] = _FACTOR, pow(_FACTOR, -1, 1 << 64)  # what is odd has an inverse
    power, inverse = numpy.cumprod(powers, axis=1)
    sums = numpy.zeros(len(letters) + 1, numpy.uint64)
    numpy.cumsum((letters + numpy.uint64(1)) * power[:-1], out=sums[1:])
    known = numpy.sort((sums[ends] - sums[starts]) * inverse[starts])

    def are_words(first: NDArray[numpy.int64], end: NDArray[numpy.int64]) -> NDArray[numpy.bool_]:
        found = (sums[end] - sums[first]) * inverse[first]
        there: NDArray[numpy.bool_] = known[numpy.searchsorted(known, found).clip(max=len(known) - 1)] == found
        return there

    middle = numpy.arange(len(letters))
    middle = middle[middle > starts[which]]
    middle = middle[are_words(starts[which[middle]], middle)]
    middle = middle[are_words(middle, ends[which[middle]])]
    return which[middle], middle - starts[which[middle]]


MAKERS = {
    "gpt2": Maker(_byte_level, lambda vocabulary: _split(vocabulary).starts),
    "llama": Maker(
        lambda vocabulary: _spaced_tokenizer(vocabulary, _merges(vocabulary), prefixed=True), lambda vocabulary: True
    ),
    "gemma4": Maker(
        lambda vocabulary: _spaced_tokenizer(vocabulary, _pairs(vocabulary), prefixed=False), lambda vocabulary: True
    ),
}
"""How a tokenizer is made, by the value of `tokenizer.ggml.model`."""
