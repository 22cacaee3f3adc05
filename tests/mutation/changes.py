"""What a mutant changes: one comparison, operator, constant, condition, result, call or `raise` of a file.

Left out: docstrings, annotations, decorators, assertions, f-strings, and the words of log lines and errors.
"""

import ast
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass

SWAPPED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
LOGS = {"log", "logger", "logging", "warnings"}
UNSEEN = {"strict", "help", "description", "title", "summary"}
"""Keywords whose values are words, or `strict` of a zip of what always agrees."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Mutant:
    """A change of the text from (`line`, `column`) to (`last`, `end`), columns in bytes.

    `span` has the lines of its statement, `scope` those of its innermost function.
    """

    path: str
    line: int
    column: int
    last: int
    end: int
    old: str
    new: str
    span: range
    scope: range
    function: str
    text: str

    @property
    def name(self) -> str:
        """What it changes where, in words that outlive changes of other lines."""
        return f"{self.path} {self.function or 'module'}: {self.old} -> {self.new} | {self.text}"

    def applied(self, source: str) -> str:
        """The file with it."""
        lines = source.encode().splitlines(keepends=True)
        before, after = lines[self.line - 1][: self.column], lines[self.last - 1][self.end :]
        return b"".join([*lines[: self.line - 1], before, self.new.encode(), after, *lines[self.last :]]).decode()


def mutants(path: str, source: str) -> list[Mutant]:
    """All of a file."""
    return list(Walk(path, source).below(ast.parse(source), range(0), range(0), ""))


class Walk:
    """Goes through a file."""

    def __init__(self, path: str, source: str) -> None:
        self.path = path
        self.source = source
        self.lines = source.splitlines()

    def below(self, node: ast.AST, span: range, scope: range, function: str) -> Iterator[Mutant]:
        """The mutants of a node and of what is below it."""
        if isinstance(node, ast.stmt):
            inner = [child.lineno for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.ExceptHandler)]
            span = range(node.lineno, max(min(inner, default=node.end_lineno + 1), node.lineno + 1))
        outer = function
        if isinstance(node, Function):
            function = f"{function}.{node.name}".strip(".")
            scope = range(node.lineno, node.end_lineno + 1)
        for new in changed(node, function):
            new = new if isinstance(new, str) else f"({ast.unparse(new)})"
            old = " ".join((ast.get_source_segment(self.source, node) or "").split())
            yield Mutant(
                self.path,
                node.lineno,
                node.col_offset,
                node.end_lineno,
                node.end_col_offset,
                old,
                new,
                span,
                scope,
                function,
                self.lines[node.lineno - 1].strip(),
            )
        if isinstance(node, ast.ClassDef):
            function = f"{function}.{node.name}".strip(".") if function else ""
        for child in seen(node):
            yield from self.below(child, span, scope, outer if isinstance(child, ast.arguments) else function)  # defaults


def seen(node: ast.AST) -> Iterator[ast.AST]:
    """The children that a test could see a change of."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom) or logs(node) or typed(node):
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_comment", "ctx"):
            continue
        for child in value if isinstance(value, list) else [value]:
            words = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if isinstance(child, ast.AST) and not words and getattr(child, "arg", "") not in UNSEEN:
                yield child


def logs(node: ast.AST) -> bool:
    """True if it is a call that writes a log line."""
    if not isinstance(node, ast.Call):
        return False
    names = ast.unparse(node.func).split(".")
    return len(names) > 1 and bool(LOGS & {name.strip("_").lower() for name in names[:-1]})


def typed(node: ast.AST) -> bool:
    """True if it is about types alone: `Literal[...]`, `cast`, what only a type checker imports."""
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    if isinstance(node, ast.Subscript):
        return ast.unparse(node.value) in ("Literal", "Annotated")
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("cast", "TypeVar", "NewType")


def changed(node: ast.AST, function: str) -> Iterator[ast.expr | str]:
    """What may stand in its place: an expression, or the text of a statement."""
    if isinstance(node, ast.Raise):
        yield "pass"
    elif typed(node) or logs(node):
        return
    elif isinstance(node, ast.Expr):
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(call, ast.Call) and not logs(call):
            yield "pass"
    elif isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield "return None"
    elif isinstance(node, ast.Constant):
        yield from changed_constant(node)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)
    else:
        yield from changed_operator(node, function)


def changed_constant(node: ast.Constant) -> Iterator[str]:
    """Another number, the other truth, another name. Words with spaces are for people."""
    if isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node.value, int | float):
        yield repr(node.value + 1)
    elif isinstance(node.value, str) and node.value.isidentifier():
        yield repr(node.value + "x")


def changed_operator(node: ast.AST, function: str) -> Iterator[ast.expr | str]:
    """Comparisons, arithmetic, `and` and `or`, and branches the other way round."""
    new = deepcopy(node)
    if isinstance(new, ast.Compare):
        for place, op in enumerate(new.ops):
            other = deepcopy(new)
            other.ops[place] = SWAPPED[type(op)]()
            yield other
    elif isinstance(new, ast.BoolOp | ast.BinOp) and type(new.op) in SWAPPED and (function or type(new.op) is not ast.BitOr):
        new.op = SWAPPED[type(new.op)]()
        yield new
    elif isinstance(new, ast.AugAssign) and type(new.op) in SWAPPED:
        new.op = SWAPPED[type(new.op)]()
        yield ast.unparse(new)
