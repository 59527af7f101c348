"""Where a template pays: around what it writes, compares and lists, and in whatever may run many times."""

from __future__ import annotations

from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

NODE = 8  # what a node of the template costs each time it runs
# Filters that only pay: for all of a value, for its length, for one run of a body. No template can write these names.
LOOK, GLANCE, TOLL = "!look", "!glance", "!toll"


def with_tolls(template: nodes.Template) -> nodes.Template:
    """The syntax tree with LOOK, GLANCE and TOLL put in; what it gives stays the same."""
    changed: nodes.Template = _Paying().visit(template)
    return changed


class _Paying(NodeTransformer):
    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [
            _paid_for(nodes.Const(part.data) if isinstance(part, nodes.TemplateData) else part) for part in node.nodes
        ]
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        node.body.insert(0, _toll(node))
        self.generic_visit(node)
        node.iter = _paid_for(node.iter, GLANCE)
        return node

    def _with_toll(self, node: Any) -> Any:
        node.body.insert(0, _toll(node))
        self.generic_visit(node)
        return node

    visit_Macro = visit_CallBlock = visit_Block = visit_FilterBlock = visit_AssignBlock = _with_toll

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _paid_for(node.expr)
        for operand in node.ops:
            operand.expr = _paid_for(operand.expr)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_paid_for(part) for part in node.nodes]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _paid_for(node, GLANCE) if isinstance(node.arg, nodes.Slice) else node

    def _literal(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") != "load" else _paid_for(node)

    visit_List = visit_Tuple = visit_Dict = _literal


def _paid_for(node: nodes.Node, how: str = LOOK) -> nodes.Filter:
    return nodes.Filter(node, how, [], [], None, None, lineno=node.lineno)


def _toll(node: nodes.Node) -> nodes.ExprStmt:
    """Pays for one run of a body."""
    cost = NODE * sum(1 for _ in node.find_all(nodes.Node))
    return nodes.ExprStmt(_paid_for(nodes.Const(cost), TOLL), lineno=node.lineno)
