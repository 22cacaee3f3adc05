"""Jinja as `transformers` sets it up for chat templates, in Jinja's sandbox, and within a budget of time and characters.

A template comes with the checkpoint; what anyone may send are messages. So the budget is for long conversations: it is looked
at in each round of a loop, at each call, and where a value has been made.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import wraps
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.ext import Extension
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from attend.model.text import caller_marks
from attend.model.text.chat_syntax import Generation, add_budget

MAX_CHARACTERS = 4 << 20
"""The longest prompt, and the longest text or list that a template may hold on the way."""
MAX_WORK = 64 * MAX_CHARACTERS
"""Characters made in one render, those that are thrown away included."""
MAX_SECONDS = 2.0
MAX_OPTION = 10_000
"""The largest number that a filter may be given."""
_MAX_BITS = 4096
_WIDENING = frozenset(("center", "encode", "expandtabs", "ljust", "maketrans", "rjust", "translate", "zfill"))
"""Methods of a text that no chat template needs, and whose small arguments make much of it."""
_NO_FILTERS = ("batch", "center", "pprint", "random", "slice", "urlize", "wordwrap", "xmlattr")


class OverLimit(Exception):
    """A render went over its budget."""


class TemplateRefused(Exception):
    """The template called raise_exception: its own words are meant for the caller."""


def _require(fits: bool, complaint: str) -> None:
    if not fits:
        raise OverLimit(complaint)


class _Budget:
    """Time and characters that are left to one render."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.ends_at, self.work = clock, clock() + MAX_SECONDS, 0

    def check(self) -> None:
        _require(self.clock() <= self.ends_at, f"ran for more than {MAX_SECONDS:g} seconds")

    def charge(self, characters: int) -> None:
        self.work += characters
        _require(self.work <= MAX_WORK, f"made more than {MAX_WORK} characters")


_BUDGET: ContextVar[_Budget] = ContextVar("_BUDGET")
"""The budget of the render in this thread. Unset while a template is compiled, so that no constant is folded."""


def _fits(size: int) -> None:
    _require(size <= MAX_CHARACTERS, f"made a value of more than {MAX_CHARACTERS} characters")


def _charge_value(value: Any) -> Any:
    """`value`, paid for. Raises OverLimit where it is too large to be kept."""
    if isinstance(value, (str, list, tuple, dict, set)):
        _fits(len(value))
        _BUDGET.get().charge(len(value))
    elif isinstance(value, int):
        _require(value.bit_length() <= _MAX_BITS, "made a number that is too large")
    return value


def _check_replace(text: str, old: Any, new: Any, *_: Any, **__: Any) -> None:
    _fits(len(text) + text.count(str(old)) * len(str(new)))


@pass_context  # so that the compiler does not take it for a constant
def _tick(_: Context, characters: int) -> bool:
    """One round of a loop, or one call of a macro, whose body writes so many characters of its own."""
    _BUDGET.get().charge(characters)
    _BUDGET.get().check()
    return True


@pass_context  # as above
def _finalize(_: Context, value: Any) -> Any:
    """What an output expression writes. Inside a macro nobody sees it before the macro ends, so it is counted here."""
    return _charge_value(value) if isinstance(value, str) else value


def _guard_filter(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose result is paid for, and is a caller's text where its value was one."""

    @wraps(run)  # keeps Jinja's mark of what the filter wants to be passed first
    def run_filter(*args: Any, **kwargs: Any) -> Any:
        _BUDGET.get().check()
        value, *options = args[hasattr(run, "jinja_pass_arg") :]
        small = name in ("default", "d") or all(
            type(o) is not int or abs(o) <= MAX_OPTION for o in (*options, *kwargs.values())
        )
        _require(small, f"gives the filter {name} a number that is too large")
        if name == "replace":
            _check_replace(str(value), *options, **kwargs)
        made = run(*args, **kwargs)
        return _check_each(made) if isinstance(made, Iterator) else _like(value, _charge_value(made))

    return run_filter


def _check_each(items: Iterator[Any]) -> Iterator[Any]:
    for item in items:
        _BUDGET.get().check()
        yield item


def _like(value: Any, made: Any) -> Any:
    """A result of a value, marked as a caller's text where the value was one."""
    return value.wrap_result(made) if isinstance(value, caller_marks.Fragment) else made


def _as_texts(items: Any) -> list[Any]:
    """A caller's short texts among them as they are written."""
    return [str(each) if isinstance(each, caller_marks.Fragment) else each for each in items]


def _concat(values: list[Any]) -> str:
    return "".join(map(str, values))


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: Any = False
) -> str:
    """JSON as `transformers` writes it: neither HTML nor non-ASCII characters are escaped."""
    document = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return caller_marks.restore_marks(document) if ensure_ascii else document


def _trim(value: Any, letters: str | None = None) -> str:
    return caller_marks.strip(value if isinstance(value, str) else str(value), letters)


def raise_exception(message: Any) -> None:
    """What a template calls where it refuses the messages. Raises TemplateRefused with its sentence."""
    raise TemplateRefused(f"refuses them: {caller_marks.without_marks(str(message))[:512]}")


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with the budget."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        extensions: list[str | type[Extension]] = ["jinja2.ext.loopcontrols", Generation]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_finalize)
        del self.globals["lipsum"]
        own = {"tojson": _tojson, "trim": _trim, "concat!": _concat}
        filters = {name: run for name, run in self.filters.items() if name not in _NO_FILTERS} | own
        self.filters = {name: _guard_filter(name, run) for name, run in filters.items()} | {"tick!": _tick}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        add_budget(tree)
        tree.set_environment(self)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """No method of a number, such as `to_bytes`, and none that widens a text."""
        unsafe = isinstance(obj, (int, float)) or (isinstance(obj, str) and attr in _WIDENING)
        return not unsafe and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator whose result may be far larger than its operands."""
        if operator == "*" and not (isinstance(left, (int, float)) and isinstance(right, (int, float))):
            _fits(math.prod(factor if isinstance(factor, int) else len(factor) for factor in (left, right)))
        elif operator == "**":
            _require(abs(left) <= _MAX_BITS and abs(right) <= _MAX_BITS // 16, "made a number that is too large")
        return _charge_value(super().call_binop(context, operator, left, right))

    # Jinja's names: any other could be a keyword of the call.
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - Jinja's names
        """A call from the template, of a macro or a recursive loop too. Methods of texts pass over marks."""
        _BUDGET.get().check()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str) and name == "replace":
            _check_replace(owner, *args, **kwargs)
            args = (*args[:1], *_as_texts(args[1:]))
        elif isinstance(owner, str) and name == "join":
            args = tuple(map(_as_texts, args))
        run = caller_marks.method_of(owner, name) if isinstance(owner, str) else None
        return _like(owner, _charge_value(super().call(__context, run or __obj, *args, **kwargs)))


def render_template(template: Template, variables: dict[str, Any], clock: Callable[[], float]) -> str:
    """What the template writes, within a budget of its own. Raises OverLimit, TemplateRefused, or what it does wrong."""
    token = _BUDGET.set(_Budget(clock))
    try:
        pieces, size = list[str](), 0
        for piece in template.generate(variables):
            _BUDGET.get().check()
            size += len(piece)
            _require(size <= MAX_CHARACTERS, f"wrote more than {MAX_CHARACTERS} characters")
            pieces.append(piece)
        text = "".join(pieces)
        text.encode("utf-8")  # a template can write half a character, which no tokenizer takes
        return text
    finally:
        _BUDGET.reset(token)
