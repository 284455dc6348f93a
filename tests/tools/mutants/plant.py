"""Mutants of a Python file: small changes of the kinds that a person makes by mistake."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

PAIRS = {ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.Is: ast.IsNot, ast.In: ast.NotIn}
FLIPPED: dict[type, Any] = PAIRS | {second: first for first, second in PAIRS.items()}
ORDERLESS = ("max", "min", "suppress")  # functions whose arguments have no order


class Mutant(NamedTuple):
    """A change of one place in a file.

    Attributes:
        path: The file, relative to the checkout.
        kind: Kind of the change.
        code: The code that is changed.
        tree: Syntax tree of the file.
        change: A node of the tree, its field that gets another value, and this value.
    """

    path: str
    kind: str
    code: Any
    tree: ast.Module
    change: tuple[ast.AST, str, Any]

    def __str__(self) -> str:
        place = f"{self.code.lineno}:{self.code.col_offset}"
        return f"{self.path}:{place}: {self.kind}: {ast.unparse(self.code)}"

    @property
    def lines(self) -> set[int]:
        """Lines whose tests may notice the change.

        They are those of its statement, or for code outside of all functions, such as a constant,
        those of all functions, in which it has its effect. A file without functions has its line.
        """
        functions = [node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)]
        nodes = [node for function in functions for top in function.body for node in ast.walk(top)]
        ends = {node.lineno: node.end_lineno for node in nodes if isinstance(node, ast.stmt)}
        spans = [range(first, last + 1) for first, last in ends.items() if last]
        around = [span for span in spans if self.code.lineno in span]
        return set(min(around, key=len, default=set().union(*spans)) or {self.code.lineno})

    def source(self) -> str:
        """Return the file with the change, without comments, because `ast.unparse` drops them."""
        with patch.object(*self.change):
            return ast.unparse(self.tree)


def find_mutants(checkout: Path, path: str) -> Iterator[Mutant]:
    """Yield all mutants of a file of the checkout."""
    tree = ast.parse((checkout / path).read_text())
    for node in ast.walk(tree):
        for kind, code, field, value in find_changes(node):
            yield Mutant(path, kind, code, tree, (node, field, value))


def find_changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, str, Any]]:
    """Yield the kind of each change of a node, the changed code, the field and its other value."""
    match node:
        case ast.Compare(ops=[operator, *others]):
            yield "comparison flipped", node, "ops", [FLIPPED[type(operator)](), *others]
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield "condition negated", test, "test", ast.UnaryOp(ast.Not(), test)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant changed", node, "value", not value if value in (0, 1) else value + 1
        case ast.Call(func, [first, second, *others]) if ast.unparse(func) not in ORDERLESS:
            yield "arguments swapped", node, "args", [second, first, *others]
    for field, values in ast.iter_fields(node):
        for place, value in enumerate(values if isinstance(values, list) else ()):
            before, after = values[:place], values[place + 1 :]
            match value:
                case ast.keyword():
                    yield "keyword argument dropped", value, field, before + after
                case (
                    ast.Raise() | ast.AugAssign() | ast.Delete() | ast.Continue() | ast.Break()
                    | ast.Expr(ast.Call()) | ast.Assign([ast.Attribute() | ast.Subscript()])
                ):  # fmt: skip
                    yield "statement removed", value, field, [*before, ast.Pass(), *after]
