"""What is added to the syntax of a chat template: calls of the sandbox's own filters, and the block `generation`."""

from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser


def add_budget(tree: nodes.Template) -> None:
    """Put the budget into a parsed template. The filters' names hold a `!`, so no template can name or replace them."""
    repeated: list[Any] = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro), *tree.find_all(nodes.CallBlock)]
    for node in repeated:
        written = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        node.body.insert(0, nodes.ExprStmt(_call_filter("tick!", nodes.Const(written)), lineno=node.lineno))
        if isinstance(node, nodes.For) and node.test is not None:  # what it leaves out costs time as well
            node.test = nodes.And(_call_filter("tick!", nodes.Const(0)), node.test, lineno=node.lineno)
    for concat in list(tree.find_all(nodes.Concat)):  # `~` is not among the operators that a sandbox may intercept
        concat.nodes = [_call_filter("concat!", nodes.List(concat.nodes))]


def _call_filter(name: str, argument: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(argument, name, [], [], None, None)


class Generation(Extension):
    """`{% generation %}` marks what a model is trained on; for a prompt it means nothing."""

    tags = {"generation"}  # noqa: RUF012 - so declared by Jinja

    def parse(self, parser: Parser) -> nodes.Node:
        """The body of the block, unchanged."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)
