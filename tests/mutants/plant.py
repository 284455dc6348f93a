"""Mutants of a Python file: small changes of the kinds that a person makes by mistake."""

import ast
from collections.abc import Iterator
from typing import Any, NamedTuple

FLIPPED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


class Mutant(NamedTuple):
    """A change of one place in a file.

    Attributes:
        path: The file, relative to the checkout.
        kind: Kind of the change.
        code: The code that is changed.
        tree: Syntax tree of the file.
        node: Node of the tree that is changed.
        field: Field of the node that gets another value.
        value: The other value.
    """

    path: str
    kind: str
    code: Any
    tree: ast.Module
    node: ast.AST
    field: str
    value: Any

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
        spans = [
            range(node.lineno, (node.end_lineno or 0) + 1)
            for function in functions
            for statement in function.body
            for node in ast.walk(statement)
            if isinstance(node, ast.stmt)
        ]
        around = [span for span in spans if self.code.lineno in span]
        return set(min(around, key=len, default=set().union(*spans)) or {self.code.lineno})

    def source(self) -> str:
        """Return the file with the change, without comments, because `ast.unparse` drops them."""
        before = getattr(self.node, self.field)
        setattr(self.node, self.field, self.value)
        source = ast.unparse(self.tree)
        setattr(self.node, self.field, before)
        return source


def find_mutants(path: str, source: str) -> Iterator[Mutant]:
    """Yield all mutants of a file."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for kind, code, field, value in find_changes(node):
            yield Mutant(path, kind, code, tree, node, field, value)


def find_changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, str, Any]]:
    """Yield the kind of each change of a node, the changed code, the field and its other value."""
    match node:
        case ast.Compare(ops=[operator, *others]):
            yield "comparison flipped", node, "ops", [FLIPPED[type(operator)](), *others]
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield "condition negated", test, "test", ast.UnaryOp(ast.Not(), test)
        case ast.Constant(value=bool(value)):
            yield "constant changed", node, "value", not value
        case ast.Constant(value=int(value) | float(value)):
            yield "constant changed", node, "value", value + 1
        case ast.Call(args=[first, second, *others]):
            yield "arguments swapped", node, "args", [second, first, *others]
    for field, values in ast.iter_fields(node):
        for place, value in enumerate(values if isinstance(values, list) else ()):
            before, after = values[:place], values[place + 1 :]
            match value:
                case ast.Raise(exc=ast.Name("NotImplementedError")):
                    pass  # a method that every subclass replaces
                case ast.keyword():
                    yield "keyword argument dropped", value, field, before + after
                case (
                    ast.Raise() | ast.AugAssign() | ast.Delete() | ast.Continue() | ast.Break()
                    | ast.Expr(ast.Call()) | ast.Assign([ast.Attribute() | ast.Subscript()])
                ):  # fmt: skip
                    yield "statement removed", value, field, [*before, ast.Pass(), *after]
