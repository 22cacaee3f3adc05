"""The tool parser and reasoning parser: an answer's text to its parts, as it is written. One machine for all forms.

The machine is a generator that yields where it needs more text. Laws: however a text is cut, the joined parts are the same;
no marker is shown; text that looks like a call and cannot be one is content from the first character on that shows it;
the name of a call is that of a tool; time is in proportion to the text.

White space that touches a marker belongs to the form, and is not shown.
"""

import re
from collections.abc import Callable, Collection, Generator
from contextlib import suppress
from functools import lru_cache, partial

from attend.service.chat.calls import read_calls, stream_arguments
from attend.service.chat.forms import HARMONY, AnswerFormat
from attend.service.chat.parts import Content, Part, Reasoning, Tool
from attend.service.chat.reader import NotACall, Reader, partial_marker, starts_of

MAX_SPACE = 1024
"""White space that is held back, since a marker may follow."""
MAX_HEADER = 256
"""Characters of a header in Harmony."""
_RECIPIENT = re.compile(r"to=(?:functions\.)?([A-Za-z0-9_.-]+)")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis")
Steps = Generator[None, None, None]


class AnswerParser(Reader):
    """Splits one answer. `tools` are those whose calls are looked for; without any, calls are text like any other."""

    def __init__(
        self,
        form: AnswerFormat,
        tools: Collection[Tool] = (),
        *,
        reasoning_open: bool = False,
        content_formed: bool = False,
        calls_formed: bool = False,
    ) -> None:
        """`reasoning_open`: the prompt ends inside reasoning. `content_formed`: content follows a grammar; markers in it are
        text. `calls_formed`: see `Reader`.
        """
        super().__init__(tools, calls_formed=calls_formed)
        self.in_reasoning = reasoning_open
        self._reasoning = form.reasoning
        self._calls = form.calls if tools else None
        self._formed = content_formed
        self._space = ""
        """White space at the end of the text so far."""
        self._long_space = False
        """True if that is longer than is held back."""
        self._after_marker = reasoning_open
        self._said = False
        self._starts: frozenset[str] | None = None
        """First characters of the markers that may end the text, while it is shown and nothing is held back; else None."""
        self._has_channels = form.has_channels
        self._in_text = not form.has_channels
        self._machine = self._messages() if form.has_channels else self._answer()

    @property
    def in_content(self) -> bool:
        """True if what comes next is content, and no marker or call has begun."""
        return self._in_text and not self.in_reasoning

    def feed(self, text: str) -> list[Part]:
        """The parts that more text settles."""
        if self._starts is not None and not self.ended and self._starts.isdisjoint(text):
            self._say(text)
        else:
            self.text, self.at = self.text[self.at :] + text, 0
            next(self._machine, None)
        parts, self.parts = self.parts, []
        return parts

    def finish(self, *, complete: bool = True) -> list[Part]:
        """The rest. `complete`: the model ended the answer itself.

        Of an answer that was broken off, the beginning of a marker, or of a call after one, is not shown.
        """
        self.complete, self.ended = complete, True
        return self.feed("")

    def start(self, name: str) -> int:
        """A call is certain, and with it what was read. Its index."""
        self._space, self._after_marker = "", True
        return super().start(name)

    def _answer(self) -> Steps:
        """An answer that is text with markers in it."""
        while True:
            if self._may_be_bare() and (yield from self._bare_calls()):
                continue
            marker = yield from self._until(self._markers, self._say)
            if not marker:
                break
            if marker in self._own():
                self.in_reasoning = not self.in_reasoning
                self._space, self._after_marker = "", True
            else:
                yield from self._after(marker)
        self._show(self._space)

    def _own(self) -> tuple[str, ...]:
        """What ends reasoning, or begins it: in the middle of content nothing does."""
        if self._reasoning is None or (self._is_amid and not self.in_reasoning):
            return ()
        return (self._reasoning.end if self.in_reasoning else self._reasoning.begin,)

    def _markers(self) -> tuple[str, ...]:
        """What ends the text here. A call may stand inside reasoning, which goes on after it."""
        no_calls = self._calls is None or (self._formed and self._is_amid)
        return (*self._own(), *(() if no_calls or self._calls is None else self._calls.begins))

    @property
    def _is_amid(self) -> bool:
        """True if something was said since the answer, or its last marker, began."""
        return self._said and not self._after_marker

    def _may_be_bare(self) -> bool:
        """True if calls may begin here without a marker: where an answer begins, and after reasoning or a call."""
        return self._calls is not None and bool(self._calls.bare) and not self.in_reasoning and not self._is_amid

    def _bare_calls(self) -> Generator[None, None, bool]:
        """Read calls that begin here without a marker; whether there were any."""
        assert self._calls is not None
        while (yield from self.char()).isspace() and self._may_be_bare():
            self._say(self.take())
            self.read.clear()
        before = self.num_calls
        if self._may_be_bare() and self.text[self.at : self.at + 1] == self._calls.bare:
            yield from self._after("")
        return self.num_calls > before

    def _after(self, marker: str) -> Steps:
        """Read calls after a marker. What turns out to be none is said."""
        assert self._calls is not None
        self.read[:] = [marker]
        before = self.num_calls
        try:
            yield from read_calls(self, self._calls, marker)
        except NotACall:
            if self.num_calls > before and self._calls.end and (yield from self.literal(self._calls.end)):
                self.read.clear()  # as of a call whose last brace was forgotten
        rest = "".join(self.read)
        self.read.clear()
        if self.complete or not self.ended or not (marker or self.num_calls > before):
            self._say(rest)

    def _messages(self) -> Steps:
        """An answer in Harmony: messages, each with a header that names its channel, and the tool that it is for."""
        yield from self.spaces()
        marker = yield from self.literal("<|channel|>", "<|start|>", "<|message|>", "to=")
        if not marker:
            self._say("".join(self.read))
        while True:
            if marker in ("<|channel|>", "<|start|>", "to="):
                header = yield from self._header(marker)
                marker = "" if header is None else (yield from self._body(header))
            else:
                self._after_marker = self._after_marker or marker != ""
                marker = yield from self._until(_harmony, self._say)
            if not marker and self.ended and self.at == len(self.text):
                break
        self._show(self._space)

    def _header(self, marker: str) -> Generator[None, None, str | None]:
        """The header that `marker` began, up to its message. None where no message follows: then its text was said."""
        pieces = [marker]
        with suppress(NotACall):
            while marker != "<|message|>":
                marker = yield from self._until(_harmony, partial(_add, pieces))
                if not marker:
                    break
                _add(pieces, marker)
            else:
                return "".join(pieces)
        if self.complete or not self.ended:
            self._say("".join(piece for piece in pieces if piece not in HARMONY))
        return None

    def _body(self, header: str) -> Generator[None, None, str]:
        """A message, and the marker after it."""
        self._space, self._after_marker = "", True
        recipient = _RECIPIENT.search(header)
        if recipient and recipient[1] in self.tools:
            yield from self.spaces()
            if (yield from self.char()) == "{":
                with suppress(NotACall):
                    yield from stream_arguments(self, self.start(recipient[1]))
        self.read.clear()
        self.in_reasoning = recipient is None and _ANALYSIS.search(header) is not None
        is_formed = self._formed and recipient is None and not self.in_reasoning
        marker = yield from self._until(_nothing if is_formed else _harmony, self._say)
        self._space = self._space if not marker else ""
        self.in_reasoning = self.in_reasoning and not marker
        return marker

    def _until(self, markers: Callable[[], tuple[str, ...]], say: Callable[[str], None]) -> Generator[None, None, str]:
        """Hand on text up to one of the markers, which is taken; "" at the end."""
        while True:
            wanted = markers()
            found = _pattern(wanted).search(self.text, self.at)
            if found:
                text, self.at = self.text[self.at : found.start()], found.start()
                say(text)
                self.at = found.end()
                if found.group() in markers():
                    return found.group()
                say(found.group())  # after the text before it, it is text too
                continue
            keep = partial_marker(self.text, self.at, wanted)
            if self.ended and not self.is_half(self.text[len(self.text) - keep :], wanted):
                keep = 0
            text, self.at = self.text[self.at : len(self.text) - keep], len(self.text) - keep
            say(text)
            if self.ended:
                self.at = len(self.text)
                return ""
            self._in_text = say == self._say
            self._starts = starts_of(wanted) if self._in_text and not keep else None
            yield
            self._in_text, self._starts = False, None

    def _say(self, text: str) -> None:
        """Show text, but for the white space at its end where a marker may follow."""
        if self._after_marker:
            text = text.lstrip()
        if not text:
            return
        self._after_marker = False
        whole = self._space + text
        shown = whole.rstrip()
        self._said = self._said or shown != ""
        if not (self._has_channels or self._markers()):
            shown = whole
        self._long_space = (self._long_space and not shown) or len(whole) - len(shown) > MAX_SPACE
        if self._long_space:
            shown = whole
        self._space = whole[len(shown) :]
        self._show(shown)

    def _show(self, text: str) -> None:
        if text:
            self._said = True
            self.parts.append(Reasoning(text) if self.in_reasoning else Content(text))


def _harmony() -> tuple[str, ...]:
    return HARMONY


def _nothing() -> tuple[str, ...]:
    return ()


def _add(pieces: list[str], text: str) -> None:
    pieces.append(text)
    if sum(map(len, pieces)) > MAX_HEADER:
        raise NotACall


@lru_cache(64)
def _pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Any of the markers; nothing where there are none."""
    return re.compile("|".join(map(re.escape, markers)) or r"(?!)")
