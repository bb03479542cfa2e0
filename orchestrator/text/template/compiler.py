"""Compiles templates like jinja2, with checks of sizes and work added.

Nodes are rewritten only where their operands are not constants, so that results stay the same.
Loops over few items and texts of ordinary length cost almost nothing more.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar, cast

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.visitor import NodeTransformer

from mlx_dp.orchestrator.text.template import operations
from mlx_dp.orchestrator.text.template.budget import NODE_COST, SMALL, budget

_Body = TypeVar("_Body", nodes.Macro, nodes.CallBlock, nodes.Block)
_INTERCEPTED: Final = {nodes.Mul: "*", nodes.Pow: "**", nodes.Mod: "%"}


class BoundedCodeGenerator(CodeGenerator):
    """Calls the sandbox in rewritten nodes, and wherever values become text."""

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:
        # Templates cannot name the environment; only rewritten nodes do.
        if not isinstance(node.node, nodes.EnvironmentAttribute):
            super().visit_Call(node, frame, forward_caller=forward_caller)
            return
        self.write(f"environment.{node.node.name}(")
        for argument in node.args:
            self.visit(argument, frame)
            self.write(", ")
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        if frame.eval_ctx.volatile:
            join = "(markup_join if context.eval_ctx.volatile else str_join)"
        else:
            join = "markup_join" if frame.eval_ctx.autoescape else "str_join"
        self.write(f"environment.concatenate({join}, (")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super()._output_child_pre(node, frame, finalize)
            self.write("environment.weighed(")
        else:
            self.write("environment.as_text(")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write(")")
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super()._output_child_post(node, frame, finalize)


class Bounds(NodeTransformer):
    """Inserts calls of the sandbox into the tree."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        cost = _cost(node)
        self.generic_visit(node)
        items = cast(nodes.Expr, node.iter)
        node.iter = _sandbox_call("counted", items, nodes.Const(cost))
        if node.recursive:
            # A recursive loop re-enters its body with items that bypass the line above.
            _spend_first(node, cost)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        return self._body(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:
        return self._body(node)

    def visit_Block(self, node: nodes.Block) -> nodes.Block:
        return self._body(node)

    def _body(self, node: _Body) -> _Body:
        cost = _cost(node)
        self.generic_visit(node)
        _spend_first(node, cost)
        return node

    def visit_Add(self, node: nodes.Add) -> nodes.Expr:
        self.generic_visit(node)
        if _is_number(node.left) or _is_number(node.right):
            return node
        if _folds(operations.add, node.left, node.right):
            return node
        left = node.left
        if isinstance(left, nodes.Call) and _sandbox_name(left) == "add":
            return _sandbox_call("add", *left.args, node.right)
        return _sandbox_call("add", left, node.right)

    def visit_Mul(self, node: nodes.Mul) -> nodes.Expr:
        return self._operation(node)

    def visit_Pow(self, node: nodes.Pow) -> nodes.Expr:
        return self._operation(node)

    def visit_Mod(self, node: nodes.Mod) -> nodes.Expr:
        return self._operation(node)

    def _operation(self, node: nodes.BinExpr) -> nodes.Expr:
        self.generic_visit(node)
        symbol = _INTERCEPTED[type(node)]
        if _folds(partial(operations.operate, symbol), node.left, node.right):
            return node
        return _sandbox_call("operate", nodes.Const(symbol), node.left, node.right)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        left = node.expr
        for operand in node.ops:
            right = operand.expr
            searched = operand.op in ("in", "notin")
            if not _is_constant(right) and (searched or not _is_constant(left)):
                operand.expr = _sandbox_call("weighed", right)
            left = right
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Getitem:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice) and not _is_constant(node.node):
            node.node = _sandbox_call("sliced", node.node)
        return node

    def visit_List(self, node: nodes.List) -> nodes.Expr:
        return self._container(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:
        return self._container(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        return self._container(node) if node.ctx == "load" else node

    def _container(self, node: nodes.Expr) -> nodes.Expr:
        self.generic_visit(node)
        return node if _is_constant(node) else _sandbox_call("container", node)


def _cost(node: nodes.Node) -> int:
    return NODE_COST * sum(1 for _ in node.find_all(nodes.Node))


def _spend_first(node: nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block, cost: int) -> None:
    call = nodes.ExprStmt(_sandbox_call("spend", nodes.Const(cost)))
    node.body.insert(0, call.set_lineno(node.lineno))


def _sandbox_call(name: str, *arguments: nodes.Expr) -> nodes.Call:
    call = nodes.Call(nodes.EnvironmentAttribute(name), list(arguments), [], None, None)
    call.set_lineno(getattr(arguments[0], "lineno", None) or 1)
    return call


def _sandbox_name(call: nodes.Call) -> str | None:
    return call.node.name if isinstance(call.node, nodes.EnvironmentAttribute) else None


def _is_number(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) and isinstance(node.value, int | float)


def _is_constant(node: nodes.Expr) -> bool:
    return _constants(node) is not None


def _constants(*operands: nodes.Expr) -> list[Any] | None:
    """Return the operands' values, if all are constants."""
    try:
        return [operand.as_const() for operand in operands]
    # Filters among them may raise anything.
    except Exception:
        return None


def _folds(compute: Callable[..., Any], *operands: nodes.Expr) -> bool:
    """Whether the compiler may compute this: a constant of small size."""
    values = _constants(*operands)
    if values is None:
        return False
    try:
        return budget().measure(compute(*values)) <= SMALL
    except Exception:
        return False
