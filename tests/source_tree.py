"""A Python file as the house rules see it: functions with what surrounds them, and imports, resolved."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cached_property

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Violation:
    """One broken rule, printed as `file:line: message`."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


@dataclass(frozen=True)
class Import:
    """One imported module, absolute, with the line and whether only type checkers see it."""

    module: str
    line: int
    type_only: bool


@dataclass(frozen=True)
class Scope:
    """A function and the names of the classes and functions around it, outermost first."""

    node: FunctionNode
    classes: tuple[ast.ClassDef, ...]
    functions: tuple[FunctionNode, ...]


@dataclass(frozen=True)
class Source:
    """A Python file: its place below the root, its text, and all module names of the package (to resolve imports)."""

    path: str
    text: str
    modules: frozenset[str] = field(default=frozenset())

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.path)

    @cached_property
    def module(self) -> str:
        """`kilat.masks.core` for src/kilat/masks/core.py; empty outside src."""
        if not self.path.startswith("src/"):
            return ""
        return self.path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def place(self) -> str:
        """The module without the package's name: `masks.core`, or empty for the package itself."""
        return self.module.partition(".")[2]

    @property
    def layer_name(self) -> str:
        return self.place.partition(".")[0]

    @cached_property
    def functions(self) -> list[Scope]:
        found: list[Scope] = []

        def visit(node: ast.AST, classes: tuple[ast.ClassDef, ...], functions: tuple[FunctionNode, ...]) -> None:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, FunctionNode):
                    found.append(Scope(child, classes, functions))
                    visit(child, classes, (*functions, child))
                elif isinstance(child, ast.ClassDef):
                    visit(child, (*classes, child), functions)
                else:
                    visit(child, classes, functions)

        visit(self.tree, (), ())
        return found

    @cached_property
    def imports(self) -> list[Import]:
        """Every import in the file, wherever it stands."""
        type_only = {
            id(inner)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.If) and last_name(node.test) == "TYPE_CHECKING"
            for statement in node.body
            for inner in ast.walk(statement)
        }
        found: list[Import] = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found += [Import(alias.name, node.lineno, id(node) in type_only) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                for alias in node.names:
                    whole = f"{base}.{alias.name}"
                    found.append(Import(whole if whole in self.modules else base, node.lineno, id(node) in type_only))
        return found

    def _absolute(self, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        package = self.module.split(".")
        keep = len(package) - node.level + (1 if self.path.endswith("__init__.py") else 0)
        return ".".join([*package[:keep], *([node.module] if node.module else [])])


def last_name(node: ast.expr) -> str:
    """`jit` for `jit`, `triton.jit` and `triton.jit(...)`."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
