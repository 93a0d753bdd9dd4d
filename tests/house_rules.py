"""The house rules as functions over syntax trees; test_architecture.py applies them, CONTRIBUTING.md explains them.

A rule takes a `Source` and yields `Violation`s. Rules know a file only by its place below the root
(`src/kilat/api.py`), so a test can hand them a made-up file and see them bite.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from source_tree import FunctionNode, Scope, Source, Violation, last_name

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 150
MAX_PUBLIC_PARAMETERS = 8
MAX_HELPER_PARAMETERS = 6
MAX_KERNEL_PARAMETERS = 48  # of a GPU kernel's entry: descriptors, pointers, lengths and constants have no struct
MAX_PARAMETERS_WITH_KEYWORD_ONLY = 12

# A module may import only from a lower layer.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"config", "_version"}),
    frozenset({"symbolic"}),
    frozenset({"math"}),
    frozenset({"structure"}),
    frozenset({"masks", "scores", "numerics", "dropout"}),
    frozenset({"problem"}),
    frozenset({"reference_parts", "validate_basic"}),
    frozenset({"reference", "validate_tensors", "validate_values", "views", "numpy_door"}),
    frozenset({"kv", "accuracy", "validate", "backends", "tune"}),
    frozenset({"dispatch"}),
    frozenset({"planning"}),
    frozenset({"shortcut"}),
    frozenset({"autograd", "functorch", "compiled", "batching"}),
    frozenset({"gather"}),
    frozenset({"api", "cached", "explaining", "merging"}),
    frozenset({"bench", "checks", "compat", "parallel"}),
    frozenset({"demo"}),
    frozenset({"cli"}),
)
# The few arrows between neighbours of one layer: (from, to). The three doors of autograd call one another.
DOORS = ("autograd", "functorch", "compiled", "batching")
SIDEWAYS = frozenset({("scores", "numerics"), ("backends", "tune")} | {(a, b) for a in DOORS for b in DOORS})
FREE_OF_TORCH = frozenset({"masks", "scores", "numerics", "symbolic", "math", "structure"})
DSL_OWNERS = {
    "llvmlite": ("backends.cpu",),
    "triton": ("backends.triton", "backends.gluon"),
    "cuda": ("backends.cutile",),
}
SHARED_BACKEND_MODULES = frozenset({"protocol", "registry", "common", "kernel_files", "store"})

# Signatures that somebody else fixed: the public API is a contract, torch and typer prescribe how they call back.
PROTOCOL_METHODS = frozenset({"__array_ufunc__", "__array_function__", "__torch_function__", "__torch_dispatch__"})
API_CONTRACT = frozenset({"attention", "ragged_attention", "cached_attention", "merge", "explain", "check"})
FOREIGN_DECORATORS = frozenset(
    {"custom_op", "register_fake", "register_kernel", "register_autograd", "impl", "command", "callback", "overload"}
)
KERNEL_DECORATORS = frozenset({"jit", "kernel", "function", "constexpr_function"})
EMITTER_TYPES = frozenset({"Function", "Module", "Builder", "Emitter"})


def _is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def _is_public(scope: Scope) -> bool:
    names = [scope.node.name, *(owner.name for owner in scope.classes)]
    return not scope.functions and not any(_is_private(name) for name in names)


def _is_kernel(source: Source, scope: Scope) -> bool:
    """A function that is kernel code: below a backend, and compiled by a DSL or writing IR through the emitter."""
    if not (source.place.startswith("backends.") and source.place.count(".") >= 2):
        return False
    for node in (scope.node, *scope.functions):
        arguments = [*node.args.posonlyargs, *node.args.args]
        annotations = {ast.unparse(a.annotation).strip("\"'").split(".")[-1] for a in arguments if a.annotation}
        if (
            annotations & EMITTER_TYPES
            or node.name.lstrip("_").startswith(("emit_", "kernel_"))
            or node.name.endswith("_kernel")
            or any(last_name(d) in KERNEL_DECORATORS for d in node.decorator_list)
        ):
            return True
    return False


def _has_foreign_signature(source: Source, scope: Scope) -> bool:
    bases = {last_name(base) for owner in scope.classes for base in owner.bases}
    return (
        source.layer_name == "compat"
        or scope.node.name in PROTOCOL_METHODS
        or "Function" in bases  # torch.autograd.Function and what derives from it
        or any(last_name(d) in FOREIGN_DECORATORS for d in scope.node.decorator_list)
        or (source.place in {"api", "cached", "explaining", "merging", ""} and scope.node.name in API_CONTRACT)
    )


def file_length(source: Source) -> Iterator[Violation]:
    lines = source.text.count("\n")
    if lines > MAX_FILE_LINES:
        yield Violation(source.path, MAX_FILE_LINES, f"the file has {lines} lines; at most {MAX_FILE_LINES}")


def function_length(source: Source) -> Iterator[Violation]:
    """Lines from `def` to the end, docstring aside: a formula and its shapes should not cost code."""
    for scope in source.functions:
        node = scope.node
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        first = node.body[0]
        if ast.get_docstring(node, clean=False) is not None:
            lines -= (first.end_lineno or first.lineno) - first.lineno + 1
        limit = MAX_KERNEL_LINES if _is_kernel(source, scope) else MAX_FUNCTION_LINES
        if lines > limit:
            yield Violation(
                source.path, node.lineno, f"{node.name} has {lines} lines without docstring; at most {limit}"
            )


def parameter_count(source: Source) -> Iterator[Violation]:
    for scope in source.functions:
        arguments = scope.node.args
        positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
        if scope.classes and positional and positional[0] in {"self", "cls"}:
            positional = positional[1:]
        total = len(positional) + len(arguments.kwonlyargs)
        if not source.module or _has_foreign_signature(source, scope):
            continue
        if _is_kernel(source, scope):
            limit, limit_total = MAX_KERNEL_PARAMETERS, MAX_KERNEL_PARAMETERS
        else:
            limit = MAX_PUBLIC_PARAMETERS if _is_public(scope) else MAX_HELPER_PARAMETERS
            limit_total = MAX_PARAMETERS_WITH_KEYWORD_ONLY
        if len(positional) > limit or total > limit_total:
            got = f"{len(positional)} positional parameters, {total} in all"
            message = f"{scope.node.name} has {got}; at most {limit} and {limit_total}: pass a dataclass"
            yield Violation(source.path, scope.node.lineno, message)


def import_arrows(source: Source) -> Iterator[Violation]:
    """cli -> demo -> bench, compat, parallel -> api -> autograd -> dispatch -> backends, tune -> problem -> masks."""
    if not source.place:  # the package itself only gathers public names
        return
    rank = {name: i for i, names in enumerate(LAYERS) for name in names}
    here = source.layer_name
    if here not in rank:
        yield Violation(source.path, 1, f"{here} has no layer: give it one in tests/house_rules.py")
        return
    for imported in dict.fromkeys(source.imports):
        if imported.module != "kilat" and not imported.module.startswith("kilat."):
            continue
        there = imported.module.partition(".")[2].partition(".")[0] or "api"  # `import kilat` means the public API
        if there == here or (here, there) in SIDEWAYS:
            continue
        if rank.get(there, len(LAYERS)) >= rank[here]:
            yield Violation(
                source.path, imported.line, f"{here} must not import {imported.module}: imports go down only"
            )


def backends_are_strangers(source: Source) -> Iterator[Violation]:
    """Backends never import one another; the registry alone knows them all."""
    parts = source.place.split(".")
    if parts[0] != "backends" or len(parts) < 2 or parts[1] == "registry":
        return
    for imported in dict.fromkeys(source.imports):
        target = imported.module.split(".")
        if target[:2] != ["kilat", "backends"] or len(target) < 3:
            continue
        if target[2] != parts[1] and target[2] not in SHARED_BACKEND_MODULES:
            yield Violation(source.path, imported.line, f"backend {parts[1]} must not import backend {target[2]}")


def heavy_imports(source: Source) -> Iterator[Violation]:
    """A DSL is imported only inside its backend; masks, scores, numerics and symbolic import no torch either."""
    if not source.module:
        return
    for imported in dict.fromkeys(source.imports):
        root = imported.module.partition(".")[0]
        owners = DSL_OWNERS.get(root)
        if owners and not source.place.startswith(owners):
            message = f"{imported.module} may be imported only below {' and '.join(owners)}"
            yield Violation(source.path, imported.line, message)
        if root == "torch" and source.layer_name in FREE_OF_TORCH and not imported.type_only:
            yield Violation(source.path, imported.line, f"{source.layer_name} must not import torch")


def environment(source: Source) -> Iterator[Violation]:
    if not source.module or source.place == "config":
        return
    for node in ast.walk(source.tree):
        names: set[str] = set()
        if isinstance(node, ast.Attribute) and last_name(node.value) == "os":
            names = {node.attr}
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            names = {alias.name for alias in node.names}
        for name in sorted(names & {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}):
            yield Violation(
                source.path, getattr(node, "lineno", 1), f"os.{name}: only kilat/config.py reads the environment"
            )


def keyword_catchalls(source: Source) -> Iterator[Violation]:
    """`**kwargs` hides the real signature.

    It may stand where the signature is another's (compat, numpy's and torch's protocols), and in a function that only
    raises, whose keywords are the values of its message.
    """
    if not source.module or source.layer_name == "compat":
        return
    for scope in source.functions:
        returns = scope.node.returns
        is_exempt = scope.node.name in PROTOCOL_METHODS or (returns is not None and last_name(returns) == "NoReturn")
        if scope.node.args.kwarg is not None and _is_public(scope) and not is_exempt:
            message = f"{scope.node.name} takes **{scope.node.args.kwarg.arg}: name the parameters"
            yield Violation(source.path, scope.node.lineno, message)


def exceptions(source: Source) -> Iterator[Violation]:
    """No bare except, none that does nothing, and no suppression of every exception."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler):
            if node.type is None:
                yield Violation(source.path, node.lineno, "bare except: name the exceptions")
            if all(isinstance(s, ast.Pass) or _is_constant_statement(s) for s in node.body):
                yield Violation(
                    source.path, node.lineno, "silent except: act on it, or use contextlib.suppress(TheError)"
                )
        elif isinstance(node, ast.Call) and last_name(node.func) == "suppress":
            names = {last_name(argument) for argument in node.args}
            if not names or names & {"Exception", "BaseException"}:
                yield Violation(source.path, node.lineno, "suppress: name the exceptions")


def _is_constant_statement(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def asserts(source: Source) -> Iterator[Violation]:
    if not source.module:
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assert):
            yield Violation(source.path, node.lineno, "assert vanishes under -O: raise an error that names the value")


def star_imports(source: Source) -> Iterator[Violation]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            yield Violation(source.path, node.lineno, "import *: name what is imported")


def docstrings(source: Source) -> Iterator[Violation]:
    """Modules, and their public classes and functions, say what they are for."""
    if not source.module:
        return
    if source.text.strip() and ast.get_docstring(source.tree) is None:
        yield Violation(source.path, 1, "the module has no docstring")
    for node in source.tree.body:
        if isinstance(node, FunctionNode | ast.ClassDef) and not node.name.startswith("_"):
            is_overload = any(last_name(d) == "overload" for d in node.decorator_list)
            if ast.get_docstring(node) is None and not is_overload:
                yield Violation(source.path, node.lineno, f"{node.name} has no docstring")


RULES: tuple[Callable[[Source], Iterator[Violation]], ...] = (
    file_length,
    function_length,
    parameter_count,
    import_arrows,
    backends_are_strangers,
    heavy_imports,
    environment,
    keyword_catchalls,
    exceptions,
    asserts,
    star_imports,
    docstrings,
)
