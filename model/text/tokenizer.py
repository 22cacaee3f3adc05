"""Text to token ids and back, over a checkpoint's `tokenizer.json` (the `tokenizers` library)."""

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from string import hexdigits
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from attend.model.errors import EngineFailed, InvalidRequest, is_failure, is_panic
from attend.model.gguf.paths import is_gguf
from attend.model.text.caller_marks import Span
from attend.model.text.control_tokens import PlainTokens
from attend.model.text.tokenizer_files import named_tokens, read_facts, read_raw

REPLACEMENT = "\ufffd"
"""What an incomplete UTF-8 sequence decodes to."""
PATIENCE = 16
"""Tokens that may make one character: its four bytes, and some that say nothing between them."""
LONG = 4096
"""Tokens that take longer than a step to decode."""
_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
BYTE_LETTERS = {chr(byte): byte for byte in _PRINTED} | {chr(256 + at): byte for at, byte in enumerate(_OTHERS)}
"""How byte-level tokenizers write a byte (GPT-2): as itself where it can be printed, else as a letter from U+0100 on."""
NEVER_IN_UTF8 = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))
FALLBACK_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""How the others write a byte that no token of theirs covers."""


class Tokenizer:
    """A thin, typed face of one `tokenizer.json`. Safe to call from several threads."""

    def __init__(
        self,
        raw: RawTokenizer,
        bos_token_id: int | None = None,
        facts: dict[str, Any] | None = None,
        *,
        of_gguf: bool = False,
    ) -> None:
        """`of_gguf`: the file says of each added token that it is no word of the vocabulary, and templates leave out the start
        token that it asks for.
        """
        self.raw = raw
        self.bos_token_id = bos_token_id
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}
        self.own_texts = _own_texts(raw, of_gguf) if _joins_bytes(raw) else {}
        """The texts of added tokens that a byte-level decoder would take for letters of bytes, by id."""
        self._alone = {skip: _Alone(self, skip) for skip in (False, True)} if _joins_bytes(raw) else {}
        self.facts = facts or {}
        """tokenizer_config.json, and what older files beside it say; empty where there is none."""
        self.chat_start_id = bos_token_id if of_gguf and raw.encode("x").ids[:1] == [bos_token_id] else None
        """What a chat begins with where its template writes no start token; None where the template alone decides."""
        self._special = {token for token, added in raw.get_added_tokens_decoder().items() if added.special}
        self._size = 1 + max(raw.get_vocab(with_added_tokens=True).values(), default=-1)
        self._fallback = _fallback_bytes(raw)
        self._of_byte = {byte: token for token, byte in self._fallback.items()}

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read `tokenizer.json`, and the special tokens from `tokenizer_config.json` where there is one."""
        facts = read_facts(folder)
        raw = read_raw(folder, facts)
        start = named_tokens(facts).get("bos_token")
        return cls(raw, None if start is None else raw.token_to_id(start), facts, of_gguf=is_gguf(folder))

    @cached_property
    def _plain(self) -> PlainTokens:
        return PlainTokens(self.raw)

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest token: no text has fewer tokens than its bytes divided by this."""
        return max(len(token.encode()) for token in self.raw.get_vocab(with_added_tokens=True))

    @property
    def has_byte_tokens(self) -> bool:
        """True if there is a token for each byte, for characters that have none."""
        return bool(self._fallback)

    @property
    def size(self) -> int:
        """One more than the highest token id that the tokenizer knows; there may be ids below it without a token."""
        return self._size

    def encode(self, text: str, *, add_special_tokens: bool = True, literals: Sequence[Span] = ()) -> list[int]:
        """Token ids of `text`, by default with the special tokens that the checkpoint's post-processor adds.

        `literals` are parts of the text, in order: an added token that touches one is written with other tokens.
        Raises InvalidRequest where the tokenizer has nothing for a part of the text, not even an unknown token.
        """
        # The library holds the GIL through encode, 1 s for 1 MiB, but not through encode_batch; "fast" leaves out offsets.
        try:
            if literals:
                found = self.raw.encode_batch([text], add_special_tokens=add_special_tokens)[0]
                return self._plain.replace_control_tokens(text, found, literals)
            return self.raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except BaseException as error:  # bare, where a text has what the vocabulary lacks and there is no unknown token
            if not is_failure(error):
                raise
            raise InvalidRequest(f"prompt: this model's tokenizer cannot take the text: {error}", "prompt") from error

    def first(self, text: str, count: int) -> str:
        """The part of a text that its first tokens, without special ones, come from; raises as `encode` does."""
        try:
            found = self.raw.encode_batch([text], add_special_tokens=False)[0]
        except BaseException as error:  # as in encode
            if not is_failure(error):
                raise
            raise InvalidRequest(f"prompt: this model's tokenizer cannot take the text: {error}", "prompt") from error
        return text if len(found.ids) <= count else text[: found.offsets[count - 1][1]]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that are not UTF-8 become U+FFFD, and no others."""
        text = self.decode_as_is(token_ids, skip_special_tokens=skip_special_tokens)
        if not self._fallback or REPLACEMENT not in text:
            return text
        utf8, sound = _utf8_decoder(), []
        for token in token_ids:
            if not self.says_nothing(token, skip_special_tokens=skip_special_tokens):
                sound += self.sound(token, utf8)
        return self.decode_as_is([*sound, *self.sound(None, utf8)], skip_special_tokens=skip_special_tokens)

    def decode_as_is(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """`decode` by the library alone: of byte tokens in a row, one that fits nowhere makes every one of them U+FFFD.

        Added tokens that it would take for bytes are put between what it decodes.
        """
        if not self.own_texts.keys().isdisjoint(token_ids):
            return self._decode_between(token_ids, skip_special_tokens)
        try:
            if len(token_ids) > LONG:  # as in encode: the batch releases the GIL
                return self.raw.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0]
            return self.raw.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            if not is_panic(error):
                raise
            raise EngineFailed(f"this model's tokenizer cannot decode its tokens: {error}") from error

    def _decode_between(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        texts, others = [], list[int]()
        for token in (*token_ids, None):
            if skip_special_tokens and token in self._special:
                continue  # the bytes before it and those after it may be one character
            text = None if token is None else self.own_texts.get(token)
            if token is not None and text is None:
                others.append(token)
                continue
            texts.append(self.decode_as_is(others, skip_special_tokens=skip_special_tokens))
            others = []
            if text is not None:
                texts.append(text)
        return "".join(texts)

    def is_special(self, token_id: int) -> bool:
        """True if the checkpoint calls a token special: it stands for no text."""
        return token_id in self._special

    def says_nothing(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """True if a text is the same without a token: one that is unknown, or special and skipped."""
        return (skip_special_tokens and token_id in self._special) or self.raw.id_to_token(token_id) is None

    def special_ids(self, texts: Iterable[str]) -> dict[str, int]:
        """Ids of those texts that are special tokens."""
        ids = {text: self.raw.token_to_id(text) for text in texts}
        return {text: token for text, token in ids.items() if token is not None and token in self._special}

    def sound(self, token_id: int | None, utf8: codecs.IncrementalDecoder) -> list[int]:
        """The tokens for the next one, None for the end: a byte token waits in `utf8` until its character is whole, and bytes
        that are no character become the bytes of U+FFFD. Other tokenizers' tokens stay as they are."""
        byte = None if token_id is None else self._fallback.get(token_id)
        text = utf8.decode(b"", True) if byte is None else utf8.decode(bytes([byte]))
        spelled = [self._of_byte[each] for each in text.encode()]
        return spelled if byte is not None or token_id is None else [*spelled, token_id]

    def alone(self, *, skip_special_tokens: bool) -> dict[int, str | None] | None:
        """By token id, what the token says between whole characters, whatever stands before it: for tokenizers whose text is
        their tokens' bytes joined, and no table for the others. None stands for a token that leaves a character unfinished."""
        return self._alone.get(skip_special_tokens)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of one token inside a text: joined, they are the text's. They need not be whole characters."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._find_bytes(token_id)
        return self._bytes[token_id]

    def text_of(self, token_id: int) -> str:
        """One token inside a text; one that is no whole characters as `bytes:\\xc3`, an id without a token as `token_id:7`."""
        if token_id not in self._texts:
            known = self.raw.id_to_token(token_id) is not None
            self._texts[token_id] = _printable_token(self.bytes_of(token_id)) if known else f"token_id:{token_id}"
        return self._texts[token_id]

    def _find_bytes(self, token_id: int) -> bytes:
        if token_id in self.own_texts:
            return self.own_texts[token_id].encode()
        once, twice = (self.decode([token_id] * count, skip_special_tokens=False) for count in (1, 2))
        text = twice[len(once) :]  # some decoders strip the space before a text's first word
        if REPLACEMENT not in twice:
            return text.encode()
        written = self.raw.id_to_token(token_id) or ""
        fallback = FALLBACK_BYTE.fullmatch(written)
        if fallback is not None:
            return bytes([int(fallback[1], 16)])
        read = _bytes_in(written)
        return text.encode() if read is None else read


def _printable_token(token: bytes) -> str:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _joins_bytes(raw: RawTokenizer) -> bool:
    """True if a text is the bytes of its tokens, one after the other, and nothing is made of it afterwards."""
    if raw.decoder is None:
        return False
    described = json.loads(raw.decoder.__getstate__())
    return [each["type"] for each in described.get("decoders", [described])] == ["ByteLevel"]


def _bytes_in(word: str) -> bytes | None:
    """What a byte-level decoder reads in a word; None where a letter of it is none of a byte: then it is text as it stands."""
    return bytes(BYTE_LETTERS[letter] for letter in word) if BYTE_LETTERS.keys() >= set(word) else None


def _own_texts(raw: RawTokenizer, added_are_text: bool) -> dict[int, str]:
    """The added tokens that are other text than their bytes. Not those that the model's merges make of a text too."""
    added = {token: each.content for token, each in raw.get_added_tokens_decoder().items()}
    read = {token: _bytes_in(text) for token, text in added.items()}
    own = {token: text for token, text in added.items() if read[token] not in (None, text.encode())}
    return (
        own if added_are_text else {token: text for token, text in own.items() if not _is_made(raw, text, read[token] or b"")}
    )


def _is_made(raw: RawTokenizer, word: str, read: bytes) -> bool:
    """True if texts that are not `word` have its token, since the model's vocabulary has it for the bytes `read`."""
    if raw.model.token_to_id(word) is None:
        return False
    if len(word) == 1 and not read.isascii():
        return read[0] not in NEVER_IN_UTF8
    text = read.decode(errors="replace")
    printable = all(each.isprintable() or each.isspace() for each in text)
    return printable and raw.token_to_id(word) in raw.encode(text, add_special_tokens=False).ids


def _fallback_bytes(raw: RawTokenizer) -> dict[int, int]:
    """The byte of each token that stands for one, in a tokenizer that has such a token for every byte."""
    if raw.decoder is None or b'"ByteFallback"' not in raw.decoder.__getstate__():
        return {}
    found = {raw.token_to_id(f"<0x{high}{low}>"): int(high + low, 16) for high in hexdigits for low in hexdigits}
    table = {token: byte for token, byte in found.items() if token is not None}
    return table if len(set(table.values())) == 256 else {}


def _utf8_decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


class _Alone(dict[int, str | None]):
    """See `Tokenizer.alone`; filled as tokens are asked for."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens

    def __missing__(self, token_id: int) -> str | None:
        text = self._tokenizer.decode_as_is([token_id], skip_special_tokens=self._skip)
        return self.setdefault(token_id, None if text.endswith(REPLACEMENT) else text)


class StreamDecoder:
    """Turns tokens into text as they come. Law: all pieces together == decode(all tokens).

    A UTF-8 character can span tokens. Where a text is its tokens' bytes joined (`Tokenizer.alone`), a token is looked up, and
    only such characters are put together from bytes. Elsewhere a token's text can depend on the one before it (a leading
    space): the last tokens are decoded again with each new one. Byte tokens wait until their character is whole; with
    decoders that have neither, a trailing U+FFFD is held back while it may still become a character.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, visible_tokens: Mapping[int, str] | None = None
    ) -> None:
        """`visible_tokens` are special tokens that are text all the same; text begins anew after one."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._visible_tokens = visible_tokens or {}
        self._alone = tokenizer.alone(skip_special_tokens=skip_special_tokens)
        self._utf8 = _utf8_decoder()
        self._patience = 0 if tokenizer.has_byte_tokens else PATIENCE
        self._unfinished = False  # whether `_utf8` holds the beginning of a character
        self._tokens: list[int] = []
        self._context = 0  # tokens before this index are settled and only give context
        self._sent = ""  # text of the window `_tokens` that was handed out or is context

    def push(self, token_id: int) -> str:
        """The text that `token_id` settles; may be empty."""
        if token_id in self._visible_tokens:
            piece = self.flush() + self._visible_tokens[token_id]
            self._unfinished, self._tokens, self._context, self._sent = False, [], 0, ""
            return piece
        if self._alone is None:
            return self._decode_again(token_id)
        text = self._alone[token_id]
        if text is not None and not self._unfinished:
            return text
        piece = self._utf8.decode(b"" if text == "" else self._tokenizer.bytes_of(token_id))
        self._unfinished = self._utf8.getstate()[0] != b""
        return piece

    def flush(self) -> str:
        """The characters that were held back, at the end of the stream."""
        if self._alone is not None:
            return self._utf8.decode(b"", True)
        self._tokens += self._tokenizer.sound(None, self._utf8)
        return self._decode()[len(self._sent) :]

    def _decode_again(self, token_id: int) -> str:
        if self._tokenizer.says_nothing(token_id, skip_special_tokens=self._skip):
            return ""
        self._tokens += self._tokenizer.sound(token_id, self._utf8)
        if len(self._tokens) == self._context:
            return ""
        text = self._decode()
        held = text.endswith(REPLACEMENT) and len(self._tokens) - self._context < self._patience
        piece = "" if held else text[len(self._sent) :]
        if piece:
            self._tokens = self._tokens[self._context :]
            self._context = len(self._tokens)
            self._sent = self._decode()
        return piece

    def _decode(self) -> str:
        return self._tokenizer.decode_as_is(self._tokens, skip_special_tokens=self._skip)
