"""Control tokens in a caller's texts: where they are, and the token ids of the same letters as plain text."""

import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from tokenizers import AddedToken, Encoding, models
from tokenizers import Tokenizer as RawTokenizer

from attend.model.text import caller_marks
from attend.model.text.caller_marks import CLOSE, EDGE, OPEN, ChatText, Fragment, Span

SHORT = 32
"""Characters of texts that are remembered: the words of schemas come again and again."""


class ControlTokens:
    """The tokens that only a chat template may write: the special ones, and other added ones that stand in the template.

    Added tokens that are neither are words of the vocabulary, as Gemma's runs of line ends and of spaces. Safe to call from
    several threads.
    """

    def __init__(self, raw: RawTokenizer, template: str) -> None:
        added = list(raw.get_added_tokens_decoder().values())
        control = [each for each in added if each.content.strip() and (each.special or each.content in template)]
        self._texts = frozenset(each.content for each in control)
        self._finder = _finder(self._texts)
        may_change = raw.normalizer is not None and (_reads_whole_words(raw) or any(each.normalized for each in control))
        self._normalized_finder = _finder(self._texts, _without_prefix(raw)) if may_change else None
        self._start = _starts(self._texts)
        self._first = _one_of(text[0] for text in self._texts)
        self._last = _one_of(text[-1] for text in self._texts)
        self._outer = _one_of([*caller_marks.MARKS, *(letter for text in self._texts for letter in (text[0], text[-1]))])
        """Finds what must be escaped in a text."""
        self._beginnings = frozenset(text[:size] for text in self._texts for size in range(1, len(text)))
        self._ends = frozenset(text[-size:] for text in self._texts for size in range(1, len(text)))
        self._threes = frozenset(text[at : at + size] for text in self._texts for at in range(len(text)) for size in (1, 2, 3))
        self._all = "\0".join(sorted(self._texts))
        self._longest = max(map(len, self._texts), default=0)
        self._short = lru_cache(4096)(self._mark_text)

    def mark_texts(self, value: Any) -> Any:
        """JSON of a caller with marks in all its texts: see `marks`. Marks of the caller's own are left out."""
        if isinstance(value, str):
            return self._short(value) if len(value) <= SHORT else self._mark_text(value)
        if isinstance(value, dict):
            return {self._mark_name(name): self.mark_texts(each) for name, each in value.items()}
        return list(map(self.mark_texts, value)) if isinstance(value, (list, tuple)) else value

    def _mark_name(self, name: Any) -> Any:
        """A name as `mark_texts` has it; one that holds no control token is found by what it is, whatever stands beside it."""
        marked = self.mark_texts(name)
        if not isinstance(marked, str) or OPEN in marked or not caller_marks.is_marked(marked):
            return marked
        return Fragment(caller_marks.without_marks(name))

    def read(self, prompt: str) -> ChatText:
        """Split a rendered prompt with marks into its text and the places of callers' texts."""
        if not caller_marks.is_marked(prompt):
            return ChatText(prompt)
        text, literals = caller_marks.split_literals(prompt, self._is_token)
        return ChatText(text, tuple(span for span in literals if span[0] < span[1] or self._is_inside(text, span[0])))

    def _mark_text(self, text: str) -> str:
        is_part = self._is_part(text)
        if not is_part and self._normalized_finder is None and not self._outer.search(text):
            return text
        text = caller_marks.without_marks(text)
        spans = self._spans(text)
        if is_part and not spans:
            return Fragment(text)
        before = EDGE if is_part or self._ends_one(text) else ""
        after = EDGE if is_part or self._begins_one(text) else ""
        if not (spans or before or after):
            return text
        if not spans and len(text) <= SHORT:
            return Fragment(text)  # a word of a schema that a template may compare
        pieces, at = [before], 0
        for start, end in spans:
            pieces += [text[at:start], OPEN, text[start:end], CLOSE]
            at = end
        return "".join([*pieces, text[at:], after])

    def _spans(self, text: str) -> list[Span]:
        """Where control tokens are in a text. In time that grows with its length alone: the library finds them all at once."""
        found = _offsets(self._finder, text) if self._start.search(text) else []
        if self._normalized_finder is None:
            return found
        spans, at = list[Span](), 0
        for start, end in sorted({*found, *_offsets(self._normalized_finder, text)}):
            if at <= start < end:
                spans.append((start, end))
                at = end
        return spans

    def _is_token(self, text: str) -> bool:
        return text in self._texts or (self._normalized_finder is not None and self._spans(text) == [(0, len(text))])

    def _is_inside(self, text: str, place: int) -> bool:
        """True if a control token may stand around a place between two characters."""
        if self._normalized_finder is not None:
            return True
        before, after = text[max(0, place - self._longest) : place], text[place : place + self._longest]
        starts = [before[match.start() :] for match in self._first.finditer(before)]
        return any(start + after[:size] in self._texts for start in starts for size in range(1, len(after) + 1))

    def _is_part(self, text: str) -> bool:
        """True if a control token has the text inside, or is it."""
        return 0 < len(text) <= self._longest and text[:3] in self._threes and text in self._all

    def _begins_one(self, text: str) -> bool:
        """True if the text's end is the beginning of a control token."""
        tail = text[-self._longest :]
        return any(tail[match.start() :] in self._beginnings for match in self._first.finditer(tail))

    def _ends_one(self, text: str) -> bool:
        """True if the text's beginning is the end of a control token."""
        head = text[: self._longest]
        return any(head[: match.end()] in self._ends for match in self._last.finditer(head))


class PlainTokens:
    """Token ids of texts in which no added token is looked for."""

    def __init__(self, raw: RawTokenizer) -> None:
        self._added = {token: each for token, each in raw.get_added_tokens_decoder().items() if len(each.content) > 1}
        self._raw = _without_prefix(raw)
        self._raw.model = raw.model
        self._of = lru_cache(4096)(self._find)

    def replace_control_tokens(self, text: str, encoding: Encoding, literals: Sequence[Span]) -> list[int]:
        """The ids of `encoding`, with plain ones in place of added tokens that touch parts that the caller wrote."""
        ids = list[int]()
        for token, span in zip(encoding.ids, encoding.offsets, strict=True):
            if token in self._added and caller_marks.touches(literals, _letters(text, span, self._added[token])):
                ids += self._of(text[slice(*span)])
            else:
                ids.append(token)
        return ids

    def _find(self, text: str) -> list[int]:
        """A model may have the token as a word of its own: then each letter is tokenized by itself."""
        ids = self._encode_plain(text)
        return ids if self._added.keys().isdisjoint(ids) else [token for letter in text for token in self._encode_plain(letter)]

    def _encode_plain(self, text: str) -> list[int]:
        ids: list[int] = self._raw.encode(text, add_special_tokens=False).ids
        return ids


def _letters(text: str, span: Span, token: AddedToken) -> Span:
    """The span of a token without the white space that it takes along."""
    start, end = span
    taken = text[start:end]
    left = len(taken) - len(taken.lstrip()) if token.lstrip else 0
    right = len(taken) - len(taken.rstrip()) if token.rstrip else 0
    return start + left, end - right


def _finder(texts: Iterable[str], like: RawTokenizer | None = None) -> RawTokenizer:
    """A tokenizer that knows these tokens alone. It finds them in what the normalizer of `like` makes of a text."""
    finder = RawTokenizer(models.BPE())
    if like is not None and like.normalizer is not None:
        finder.normalizer = like.normalizer
    finder.add_tokens([AddedToken(text, normalized=like is not None) for text in sorted(texts)])
    return finder


def _offsets(finder: RawTokenizer, text: str) -> list[Span]:
    offsets: list[Span] = finder.encode_batch([text])[0].offsets  # a batch releases the GIL
    return offsets


def _starts(texts: Iterable[str]) -> re.Pattern[str]:
    """Finds the first two letters of the texts. In prose and in most code it finds none."""
    seconds: dict[str, set[str]] = {}
    for text in texts:
        seconds.setdefault(text[0], set()).add(text[1:2])
    pairs = (re.escape(first) + ("" if "" in after else _one_of(after).pattern) for first, after in sorted(seconds.items()))
    return re.compile("|".join(pairs) or "(?!)")


def _one_of(letters: Iterable[str]) -> re.Pattern[str]:
    wanted = "".join(map(re.escape, sorted(set(letters))))
    return re.compile(f"[{wanted}]" if wanted else "(?!)")


def _reads_whole_words(raw: RawTokenizer) -> bool:
    """True if the model takes a word of its vocabulary for one token, also where it cannot be merged from smaller ones."""
    return not isinstance(raw.model, models.BPE) or bool(raw.model.ignore_merges)


def _without_prefix(raw: RawTokenizer) -> RawTokenizer:
    """The tokenizer's normalizer and pre-tokenizer with an empty model, without those that put a space before a text."""
    parts = {name: _state(getattr(raw, name)) for name in ("normalizer", "pre_tokenizer")}
    return RawTokenizer.from_str(json.dumps(json.loads(RawTokenizer(models.BPE()).to_str()) | parts))


def _state(part: Any) -> Any:
    return None if part is None else _without_prefix_space(json.loads(part.__getstate__()))


def _without_prefix_space(state: Any) -> Any:
    if isinstance(state, list):
        return [_without_prefix_space(each) for each in state if not (isinstance(each, dict) and each.get("type") == "Prepend")]
    if not isinstance(state, dict):
        return state
    if state.get("type") == "Prepend":
        return None
    never = {"add_prefix_space": False, "prepend_scheme": "never"}
    return {name: never.get(name, _without_prefix_space(value)) for name, value in state.items()}
