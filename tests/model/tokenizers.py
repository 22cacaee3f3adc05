"""Tiny tokenizers of every kind that published checkpoints have, as `tokenizer.json` would describe them."""

import json
from collections.abc import Callable
from functools import cache

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RawTokenizer

TEXTS = [
    "the cat sat on the mat, then sat there. It's 2026!\n\n",
    "naïve café, 日本語, 😀😁🚀👩‍👩‍👧 שלום",
    "def attend(q, k, v):\r\n\treturn v\n",
]
STARTS, ENDS, TURN = "<s>", "</s>", "<|turn|>"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""A split in the manner of Llama 3 and Qwen: a word with what stands before it, digits by three, line ends together."""
SPELLED = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
"""The decoder of tokenizers that spell in bytes what they have no token for."""


def _trained(raw: RawTokenizer, size: int = 320, **options: object) -> RawTokenizer:
    raw.train_from_iterator(TEXTS * 4, trainers.BpeTrainer(vocab_size=size, show_progress=False, **options))
    return raw


def _byte_level(pre_tokenizer: pre_tokenizers.PreTokenizer, decoder: decoders.Decoder | None = None) -> RawTokenizer:
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizer, decoder or decoders.ByteLevel()
    return _trained(raw, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def _parts(space: str) -> list[str]:
    """Letters of the texts, and beginnings of their words with `space` before them. Trainers would not give them an order."""
    words = sorted({word for text in TEXTS for word in text.split()})
    longer = {space + word[:size] for word in words for size in (1, 2, 3, 5)}
    return [*filter(None, [space]), *sorted((longer | {letter for text in TEXTS for letter in text} | {"\ufffd"}) - {space})]


def gpt2() -> RawTokenizer:
    """Byte-level BPE with the library's own split."""
    return _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))


def llama3() -> RawTokenizer:
    """Byte-level BPE with a split of its own, and a start token."""
    split = pre_tokenizers.Split(Regex(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|" + WORDS), "isolated")
    raw = _byte_level(pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]))
    raw.model.ignore_merges = True
    return raw


def qwen() -> RawTokenizer:
    """As Llama 3, but composed characters, single digits, and no start token."""
    split = pre_tokenizers.Split(Regex(WORDS.replace("{1,3}", "")), "isolated")
    raw = _byte_level(pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]))
    raw.normalizer = normalizers.NFC()
    return raw


def nested() -> RawTokenizer:
    """Byte-level BPE whose decoder stands in a sequence."""
    return _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.Sequence([decoders.ByteLevel()]))


def _with_bytes(raw: RawTokenizer) -> RawTokenizer:
    """The same, with a token for each byte before its own."""
    described = json.loads(raw.to_str())
    model, own = described["model"], [f"<0x{byte:02X}>" for byte in range(256)]
    if model["type"] == "Unigram":
        model["vocab"] = [*model["vocab"][:1], *([word, -9.0] for word in own), *model["vocab"][1:]]
    else:
        words = sorted(model["vocab"], key=model["vocab"].get)
        model["vocab"] = {
            word: token for token, word in enumerate(["<unk>", *own, *(word for word in words if word != "<unk>")])
        }
        model |= {"unk_token": "<unk>", "fuse_unk": True}
    return RawTokenizer.from_str(json.dumps(described | {"model": model | {"byte_fallback": True}}))


def _pieces(scheme: str, decoder: decoders.Decoder, *, split: bool = False) -> RawTokenizer:
    raw = RawTokenizer(models.BPE(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    raw.decoder = decoder
    return _trained(raw, 120, special_tokens=["<unk>"])


def llama2() -> RawTokenizer:
    """BPE with byte fallback, its spaces written by a normalizer, in the form that older converters wrote."""
    raw = RawTokenizer(models.BPE())
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence([*SPELLED, decoders.Strip(" ", 1, 0)])
    return _with_bytes(_trained(raw, 120))


def mistral() -> RawTokenizer:
    """BPE with byte fallback; a space is written before the text's first word only."""
    return _with_bytes(_pieces("first", decoders.Sequence([*SPELLED, decoders.Strip(" ", 1, 0)])))


def always() -> RawTokenizer:
    """BPE with byte fallback; a space is written before each part of a text, also after a special token."""
    return _with_bytes(_pieces("always", decoders.Sequence([*SPELLED, decoders.Strip(" ", 1, 0)])))


def gemma() -> RawTokenizer:
    """BPE with byte fallback; nothing is written before a text, and nothing stripped from it."""
    raw = RawTokenizer(models.BPE())
    raw.normalizer = normalizers.Replace(" ", "▁")
    raw.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    raw.decoder = decoders.Sequence(SPELLED)
    return _with_bytes(_trained(raw, 120))


def metaspace() -> RawTokenizer:
    """BPE over words that begin with a space, without byte fallback."""
    return _pieces("always", decoders.Metaspace(prepend_scheme="always"), split=True)


def unigram() -> RawTokenizer:
    """Unigram as T5 has it: what it does not know is one unknown token."""
    raw = RawTokenizer(models.Unigram([("<unk>", 0.0), *((piece, -9.0 + len(piece)) for piece in _parts("▁"))], unk_id=0))
    raw.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return raw


def unigram_bytes() -> RawTokenizer:
    """Unigram with byte fallback."""
    raw = unigram()
    raw.normalizer, raw.decoder = normalizers.NFC(), decoders.Sequence([*SPELLED, decoders.Strip(" ", 1, 0)])
    return _with_bytes(raw)


def wordpiece() -> RawTokenizer:
    """Whole words and their ends, whose decoder also removes spaces before punctuation."""
    pieces = ["<unk>", *_parts(""), *(f"##{piece}" for piece in _parts(""))]
    raw = RawTokenizer(models.WordPiece({piece: token for token, piece in enumerate(pieces)}, unk_token="<unk>"))
    raw.normalizer, raw.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.WordPiece()
    return raw


KINDS: dict[str, Callable[[], RawTokenizer]] = {
    make.__name__: make
    for make in (
        *(gpt2, llama3, qwen, nested, llama2, mistral, always, gemma),
        *(metaspace, unigram, unigram_bytes, wordpiece),
    )
}


@cache
def complete(kind: str) -> RawTokenizer:
    """A tokenizer of `kind` with added tokens of every sort, and a start and an end that its post-processor adds."""
    raw = KINDS[kind]()
    raw.add_special_tokens([AddedToken(text, normalized=False) for text in (STARTS, ENDS, TURN)])
    raw.add_special_tokens([AddedToken("<|x|>", lstrip=True, rstrip=True, normalized=False)])
    raw.add_tokens([AddedToken("<tool>", normalized=True), AddedToken("<|y|>", lstrip=True, normalized=False)])
    raw.add_tokens([AddedToken("zz", single_word=True), AddedToken("né ", normalized=False)])
    ends = [(text, raw.token_to_id(text)) for text in (STARTS, ENDS)]
    template = processors.TemplateProcessing(single=f"{STARTS} $A {ENDS}", special_tokens=ends)
    raw.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return raw
