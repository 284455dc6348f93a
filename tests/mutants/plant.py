"""Mutants of a Python file: small changes of the kind that a person makes by mistake."""

import ast
import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

FLIPPED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
# A statement of these types can be removed, and no name is missing then.
REMOVED = (ast.Raise, ast.Delete, ast.AugAssign, ast.Continue, ast.Break)
SHOWN = 120  # characters of a line in a diff


class Mutant(NamedTuple):
    """A change of one place in a file.

    Attributes:
        path: The file, relative to the checkout.
        number: Place of the mutant among those of the file.
        kind: What is done to the code.
        line: Line of the changed code.
    """

    path: str
    number: int
    kind: str
    line: int

    def plant(self, root: Path) -> tuple[str, str]:
        """Return the file's code with the change in it, and the difference in two lines.

        The code is written anew by `ast.unparse`, so that comments are gone and lines move.
        """
        tree = ast.parse((root / self.path).read_text())
        before = ast.unparse(tree)
        _, _, node, field, value = list(_changes(tree))[self.number]
        setattr(node, field, value)
        after = ast.unparse(tree)
        lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), n=0))[3:]
        pairs = enumerate(zip(lines[0], lines[-1], strict=False))
        start = next(place for place, (old, new) in pairs if place and old != new)
        start = max(1, start - SHOWN // 2)
        return after, "\n".join(line[0] + line[start : start + SHOWN] for line in lines)


def find_mutants(root: Path, path: str) -> list[Mutant]:
    """Return all mutants of a file."""
    changes = _changes(ast.parse((root / path).read_text()))
    return [Mutant(path, number, *change[:2]) for number, change in enumerate(changes)]


def _changes(tree: ast.Module) -> Iterator[tuple[str, int, ast.AST, str, Any]]:
    """Yield kind, line, node, and the field of the node with the value that makes the mutant."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            flipped = [FLIPPED[type(node.ops[0])](), *node.ops[1:]]
            yield "comparison flipped", node.lineno, node, "ops", flipped
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            negated = ast.UnaryOp(ast.Not(), node.test)
            yield "condition negated", node.test.lineno, node, "test", negated
        if isinstance(node, ast.Call):
            for one in node.keywords:
                rest = [other for other in node.keywords if other is not one]
                yield "keyword argument dropped", one.value.lineno, node, "keywords", rest
            if len(node.args) > 1:
                swapped = [node.args[1], node.args[0], *node.args[2:]]
                yield "arguments swapped", node.lineno, node, "args", swapped
        if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            value = not node.value if isinstance(node.value, bool) else node.value + 1
            yield "constant changed", node.lineno, node, "value", value
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            for place, one in enumerate(statements if isinstance(statements, list) else ()):
                is_call = isinstance(one, ast.Expr) and isinstance(one.value, ast.Call)
                is_stored = isinstance(one, ast.Assign) and not isinstance(
                    one.targets[0], ast.Name | ast.Tuple
                )
                if is_call or is_stored or isinstance(one, REMOVED):
                    rest = [*statements[:place], ast.Pass(), *statements[place + 1 :]]
                    yield "statement removed", one.lineno, node, field, rest
