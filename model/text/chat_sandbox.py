"""Jinja as `transformers` sets it up for chat templates, in a sandbox in which nothing runs away.

Each render has a budget: loop rounds, characters made, seconds. What a single operation may make is bounded before it runs
(`'a' * n`, `replace`, widths), because a budget that is read between operations comes too late for those. So are the lists
that one compares, hashes or sorts: of nested lists that share their parts a few lines make 2^44 steps.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import wraps
from typing import Any

from jinja2 import Environment, Template, nodes, pass_context, pass_environment
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace

from attend.model.text import caller_marks
from attend.model.text.chat_syntax import Generation, add_budget

MAX_CHARACTERS = 4 << 20
"""The longest prompt, and the longest text, list or number of digits that a template may hold on the way."""
MAX_WORK = 64 * MAX_CHARACTERS
"""Characters made in one render, those that are thrown away included."""
MAX_ROUNDS = 1_000_000
MAX_SECONDS = 2.0
_MAX_BITS = 4096
_WIDENING = frozenset(("center", "encode", "expandtabs", "ljust", "maketrans", "rjust", "translate", "zfill"))
"""Methods of a text that no chat template needs, and whose small arguments make much of it."""
_NO_FILTERS = ("batch", "center", "pprint", "random", "slice", "urlize", "wordwrap", "xmlattr")
_LIST_FILTERS = frozenset((
    "abs", "attr", "concat!", "count", "d", "default", "first", "float", "items", "join", "last", "length", "list", "map",
    "reject", "rejectattr", "reverse", "round", "select", "selectattr", "sum", "tojson",
))  # fmt: skip
"""Filters that neither write their value as text, nor compare or hash it, nor look at its size themselves."""
_COMPARING = frozenset(("dictsort", "groupby", "max", "min", "sort", "unique"))
"""Filters that compare or hash the items of their value."""
_SEARCHES = frozenset(("count", "index", "isdisjoint"))
"""Methods of a list that compare or hash its items."""
_BACKWARD = frozenset(("lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"))
"""Methods of a text that look for their whole argument at each of its characters."""
_MAX_DEPTH = 1000
"""Of lists in lists that are compared or hashed: a hash of nested tuples knows no limit but the stack of the thread."""
_UNBOUNDED_FORMAT = re.compile(r"\d{5}|\*|:[^}]*\{")
"""A width of five digits, or one that comes from an argument."""
_LISTS: tuple[type[Any], ...] = (list, tuple, set, frozenset, type({}.keys()), type({}.values()), type({}.items()), range)
_HOLDERS = (Cycler, Joiner, LoopContext, Namespace)
"""What holds values that cannot be counted from outside."""


class OverLimit(Exception):
    """A render went over its budget."""


class TemplateRefused(Exception):
    """The template called raise_exception: its own words are meant for the caller."""


def _require(fits: bool, complaint: str) -> None:
    if not fits:
        raise OverLimit(complaint)


class _Budget:
    """Time, iterations and characters that are left to one render."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.ends_at = clock, clock() + MAX_SECONDS
        self.rounds = self.work = self.steps = 0

    def check(self) -> None:
        _require(self.clock() <= self.ends_at, f"ran for more than {MAX_SECONDS:g} seconds")

    def tick(self, characters: int) -> None:
        """One round of a loop, or one call of a macro, whose body writes so many characters of its own."""
        self.rounds += 1
        _require(self.rounds <= MAX_ROUNDS, f"exceeded {MAX_ROUNDS} loop iterations")
        self.charge(characters)
        self.check()

    def step(self) -> None:
        """One item of a filter that gives them one by one, or one attribute of one: a small fraction of a round."""
        self.steps += 1
        if not self.steps % 64:
            self.check()

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
        _BUDGET.get().charge(len(value) * (1 if isinstance(value, str) else 16))
    elif isinstance(value, int):
        _require(value.bit_length() <= _MAX_BITS, "made a number that is too large")
    return value


def _text_size(*values: Any) -> int:
    """About the characters that the values have as text. Shared lists count each time, and the count stops at the limit. A
    large integer counts as 256: any number of them may have one hash.
    """
    size, depth, left = 0, 0, list(values)
    while left:
        depth += 1
        _require(depth <= _MAX_DEPTH, f"nested lists more than {_MAX_DEPTH} deep")
        values, left = tuple(left), []
        for value in values:
            _require(not isinstance(value, _HOLDERS), "compares a namespace or a loop, or writes it as text")
            if isinstance(value, dict):
                value = [*value, *value.values()]
            if isinstance(value, _LISTS):
                left += value
            is_large = isinstance(value, int) and value.bit_length() > 60
            size += 4 * len(value) if isinstance(value, _LISTS) else len(value) if isinstance(value, str) else 252 * is_large
            size += 4
            _fits(size)
    return size


def _charge_lists(*values: Any) -> None:
    """Before the values are compared or hashed: what the lists among them hold is paid for, shared parts each time."""
    _BUDGET.get().check()
    if lists := [value for value in values if isinstance(value, (dict, *_LISTS, *_HOLDERS))]:
        _BUDGET.get().charge(_text_size(*lists))


def _materialize(value: Any) -> Any:
    """`value`, or a list of what it still gives: what has not been made yet cannot be counted."""
    return list(value) if isinstance(value, Iterator) and not isinstance(value, LoopContext) else value


def _guard_test(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """A test that compares its value with others (`is eq`, `is in`), or writes it as text, pays for them."""

    @wraps(run)  # as with filters
    def run_test(*args: Any) -> Any:
        if len(args) > 1 or name in ("lower", "upper"):
            args = tuple(map(_materialize, args))
            _charge_lists(*args)
        return run(*args)

    return run_test


def _check_format(text: str, values: Sequence[Any]) -> None:
    """Before `text` is filled in, by % or by format: no wide column, no value that is repeated into a huge text."""
    _require(not _UNBOUNDED_FORMAT.search(text), "formats a column that is too wide")
    widest = max(map(int, re.findall(r"\d+", text)), default=0)
    _fits(len(text) + (text.count("%") + text.count("{")) * (_text_size(*values) + widest))


def _check_search(text: Any, *wanted: Any, **named: Any) -> None:
    longest = max((len(each) for each in (*wanted, *named.values()) if isinstance(each, str)), default=0)
    _require(len(str(text)) * longest <= MAX_WORK, "searches for a text that is too long")


def _check_replace(text: Any, old: Any, new: Any, *_: Any, **__: Any) -> None:
    _fits(len(str(text)) + str(text).count(str(old)) * len(str(new)))


def _joinable(items: Any, separator: Any) -> list[Any]:
    listed = [str(each) if isinstance(each, caller_marks.Fragment) else each for each in items]
    _fits(_text_size(*listed) + len(listed) * len(str(separator)))
    return listed


@pass_context  # so that the compiler does not take it for a constant
def _tick(_: Context, characters: int) -> bool:
    _BUDGET.get().tick(characters)
    return True


@pass_context  # as above
def _pay_operand(_: Context, value: Any) -> Any:
    """An operand of a comparison, or the key of a dictionary."""
    _charge_lists(value)
    return value


@pass_context  # as above
def _pay_container(_: Context, value: Any) -> Any:
    """What `in` looks into."""
    value = _materialize(value)
    _charge_lists(value)
    return value


@pass_context  # as above
def _finalize(_: Context, value: Any) -> Any:
    """What an output expression writes. Inside a macro nobody sees it before the macro ends, so it is counted here."""
    _BUDGET.get().charge(_text_size(value))
    return value


def _guard_filter(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that says no before it makes something huge, and whose result is paid for."""

    @wraps(run)  # keeps Jinja's mark of what the filter wants to be passed first
    def run_filter(*args: Any, **kwargs: Any) -> Any:
        _BUDGET.get().check()
        passed = 1 if hasattr(run, "jinja_pass_arg") else 0
        value, *options = args[passed:]
        if name in _COMPARING:
            value = _materialize(value)
            args = (*args[:passed], value, *options)
            _charge_lists(value)
        elif name not in _LIST_FILTERS:
            _text_size(value)
        _charge_lists(*options, *kwargs.values())
        small = name in ("default", "d") or all(type(o) is not int or abs(o) <= 10_000 for o in (*options, *kwargs.values()))
        _require(small, f"gives the filter {name} a number that is too large")
        if name in _CHECKS:
            _CHECKS[name](value, *options, **kwargs)
        made = run(*args, **kwargs)
        return _count_steps(made) if isinstance(made, Iterator) else _like(value, _charge_value(made))

    return run_filter


def _count_steps(items: Iterator[Any]) -> Iterator[Any]:
    for item in items:
        _BUDGET.get().step()
        yield item


def _like(value: Any, made: Any) -> Any:
    """A result of a value, marked as a caller's text where the value was one."""
    return value.wrap_result(made) if isinstance(value, caller_marks.Fragment) else made


_CHECKS: dict[str, Callable[..., None]] = {
    "replace": _check_replace,
    "indent": lambda text, width=4, *_, **__: _check_replace(
        str(text) + "\n", "\n", " " * width if isinstance(width, int) else width
    ),
    "int": lambda text, *_, **__: _require(
        not isinstance(text, str) or len(text) <= _MAX_BITS, "reads a number that is too long"
    ),
    "sum": lambda _, attribute=None, start=0: _require(isinstance(start, (int, float)), "sums what are not numbers"),
    "format": lambda text, *values, **named: _check_format(str(text), [*values, *named.values()]),
    "trim": _check_search,
    "striptags": lambda text: _BUDGET.get().charge(str(text).count("<") * len(str(text)) // 16),  # a copy for each
}


@pass_environment
def _join(environment: Environment, value: Any, d: Any = "", attribute: Any = None) -> str:
    items = value if attribute is None else map(make_attrgetter(environment, attribute), value)
    return str(d).join(map(str, _joinable(items, d)))


def _concat(values: list[Any]) -> str:
    _text_size(*values)
    return "".join(map(str, values))


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: Any = False
) -> str:
    """JSON as `transformers` writes it: neither HTML nor non-ASCII characters are escaped."""
    _text_size(value)
    _require(indent is None or 0 <= indent <= 16, "indents JSON too far")
    document = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return caller_marks.restore_marks(document) if ensure_ascii else document


def _trim(value: Any, letters: str | None = None) -> str:
    return caller_marks.strip(value if isinstance(value, str) else str(value), letters)


def raise_exception(message: Any) -> None:
    """What a template calls where it refuses the messages. Raises Refused with its sentence."""
    _text_size(message)
    raise TemplateRefused(f"refuses them: {caller_marks.without_marks(str(message))[:512]}")


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with what it leaves unbounded bounded."""

    intercepted_binops = frozenset(("+", "-", "*", "**", "%"))

    def __init__(self) -> None:
        extensions: list[str | type[Extension]] = ["jinja2.ext.loopcontrols", Generation]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_finalize)
        del self.globals["lipsum"]
        own = {"join": _join, "tojson": _tojson, "trim": _trim, "concat!": _concat}
        filters = {name: run for name, run in self.filters.items() if name not in _NO_FILTERS} | own
        self.filters = {name: _guard_filter(name, run) for name, run in filters.items()} | {
            "tick!": _tick,
            "compared!": _pay_operand,
            "searched!": _pay_container,
        }
        self.tests = {name: _guard_test(name, run) for name, run in dict[str, Any](self.tests).items()}

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
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right if isinstance(right, tuple) else [right])
        elif operator == "-":  # of two views of dictionaries
            _charge_lists(left, right)
        return _charge_value(super().call_binop(context, operator, left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """`obj[argument]`, which hashes a tuple, and writes down what is not there."""
        _BUDGET.get().step()
        if not isinstance(argument, (str, int)):
            _charge_lists(argument)
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """str.format and str.format_map, found on a text."""
        run = super().wrap_str_format(value)
        if run is None:
            return None

        def format_checked(*args: Any, **kwargs: Any) -> str:
            _check_format(value.__self__, [*args, *kwargs.values()])
            made: str = _charge_value(run(*args, **kwargs))
            return made

        return format_checked

    # Jinja's names: any other could be a keyword of the call.
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - Jinja's names
        """A call from the template: a round of its own, as a macro or a recursive loop may be called."""
        _BUDGET.get().tick(0)
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str) and name == "replace":
            _charge_lists(*args, *kwargs.values())
            _check_replace(owner, *args, **kwargs)
            args = (*args[:1], *(str(each) if isinstance(each, caller_marks.Fragment) else each for each in args[1:]))
        elif isinstance(owner, str) and name == "join":
            args = tuple(_joinable(items, owner) for items in args)
        elif not isinstance(__obj, (Macro, LoopContext)):  # these pass their arguments on, as a namespace does those with names
            args = tuple(map(_materialize, args))
            named = () if __obj is Namespace else kwargs.values()
            _charge_lists(*args, *named, *((owner,) if name in _SEARCHES else ()))
            if isinstance(owner, str) and name in _BACKWARD:
                _check_search(owner, *args, **kwargs)
        run = caller_marks.method_of(owner, name) if isinstance(owner, str) else None
        return _like(owner, _charge_value(super().call(__context, run or __obj, *args, **kwargs)))


def render_template(template: Template, variables: dict[str, Any], clock: Callable[[], float]) -> str:
    """What the template writes, within a budget of its own. Raises OverLimit, Refused, or whatever the template does wrong."""
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
