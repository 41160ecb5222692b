"""Mutation testing in one process: small errors are put into modules, one at a time, and
hand-computed tests must notice each.

    modules under test --AST--> mutants --exec--> fresh modules and fresh test modules
                                                  --> every test function and parameter

A mutant that no test notices survives: either a test is missing, or the mutant computes the same,
which needs a reason. Test functions must take no fixtures, so that nothing but a call is needed to
run them.
"""

import ast
import copy
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BINARY: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.Pow: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
}
_COMPARE: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
_NAMES = {
    "minimum": "maximum",
    "maximum": "minimum",
    "min": "max",
    "max": "min",
    "zeros_like": "ones_like",
    "ones_like": "zeros_like",
    "new_zeros": "new_ones",
    "sum": "mean",
    "mean": "sum",
    "exp": "expm1",
    "detach": "clone",
}
"""Functions and methods that take the same arguments and are mistaken for one another."""
_COMMUTE = {"min", "max", "minimum", "maximum"}
"""Functions whose arguments may change places."""


@dataclass(frozen=True)
class Mutant:
    """One change of the source."""

    module: str
    line: int
    change: str
    """The source line and the change of a part of it, as "return a * b: a * b -> a / b"; without
    the line's number, so that it can be listed as equivalent.
    """
    tree: ast.Module

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.change}"


def mutants(module: types.ModuleType) -> Iterator[Mutant]:
    """Every mutant of the module's code; type aliases, annotations and docstrings are not code."""
    assert module.__file__ is not None
    text = Path(module.__file__).read_text(encoding="utf-8")
    source, lines = ast.parse(text), text.splitlines()
    for index, node in enumerate(_code(source)):
        for replacement in _replacements(node):
            tree = copy.deepcopy(source)
            target = _code(tree)[index]
            line: int = node.lineno  # type: ignore[attr-defined]
            before, after = _shown(node), _shown(replacement)
            change = f"{lines[line - 1].strip()}: {before} -> {after}"
            yield Mutant(module.__name__, line, change, _replaced(tree, target, replacement))


def _code(tree: ast.Module) -> list[ast.AST]:
    """Nodes that compute, in a fixed order."""
    found: list[ast.AST] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return
        if isinstance(node, ast.Import | ast.ImportFrom):
            return
        found.append(node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_comment"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child)

    visit(tree)
    return found


def _replacements(node: ast.AST) -> Iterator[ast.AST]:
    yield from _other_operators(node)
    yield from _other_branches(node)
    yield from _other_operands(node)


def _other_operators(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.BinOp(left, operator, right):
            yield from (
                ast.BinOp(left, other(), right) for other in _BINARY.get(type(operator), ())
            )
        case ast.UnaryOp(ast.USub() | ast.Not() | ast.Invert(), operand):
            yield operand
        case ast.Compare(left, [operator], [right]):
            yield from (
                ast.Compare(left, [other()], [right]) for other in _COMPARE.get(type(operator), ())
            )
        case ast.BoolOp(operator, values):
            yield ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values)


def _other_branches(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.IfExp(test, body, orelse):
            yield ast.IfExp(test, orelse, body)
        case ast.If(test, body, orelse):
            yield ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)


def _other_operands(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            yield from (ast.Constant(value + 1), ast.Constant(value - 1))
        case ast.Attribute(value, name, context) if name in _NAMES:
            yield ast.Attribute(value, _NAMES[name], context)
        case ast.Call(function, [first, second, *others], keywords):
            if ast.unparse(function).rpartition(".")[2] not in _COMMUTE:
                yield ast.Call(function, [second, first, *others], keywords)


def _replaced(tree: ast.Module, target: ast.AST, replacement: ast.AST) -> ast.Module:
    class Swap(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            return (
                ast.copy_location(replacement, node) if node is target else self.generic_visit(node)
            )

    Swap().visit(tree)
    return ast.fix_missing_locations(tree)


def _shown(node: ast.AST) -> str:
    """As code; of a compound statement its condition."""
    return ast.unparse(node.test if isinstance(node, ast.If) else node)


@contextmanager
def modules(fresh: dict[str, types.ModuleType]) -> Iterator[None]:
    """`fresh` modules in the place of those that are imported."""
    before = {name: sys.modules.get(name) for name in fresh}
    sys.modules.update(fresh)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


class Runner:
    """Runs the functions of the modules `tests` against mutants of the modules `subjects`.

    Both are given in the order of their imports, and are executed again for each mutant.
    """

    def __init__(self, subjects: Sequence[str], tests: Sequence[str]) -> None:
        self._subjects = {name: sys.modules[name] for name in subjects}
        self._tests = list(tests)
        self._code: dict[str, Any] = {}
        for name in (*subjects, *tests):
            path = sys.modules[name].__file__
            assert path is not None
            self._code[name] = compile(Path(path).read_text(encoding="utf-8"), path, "exec")

    def mutants(self) -> list[Mutant]:
        return [mutant for module in self._subjects.values() for mutant in mutants(module)]

    def is_noticed(self, mutant: Mutant | None) -> bool:
        """Whether a test fails, or a module cannot even be imported; without a mutant, whether a
        test fails at all.
        """
        try:
            with self._executed(mutant) as executed:
                for name in self._tests:
                    for call in calls(executed[name]):
                        call()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            return True
        return False

    @contextmanager
    def _executed(self, mutant: Mutant | None) -> Iterator[dict[str, types.ModuleType]]:
        fresh = {}
        for name in self._code:
            fresh[name] = types.ModuleType(name)
            fresh[name].__file__ = sys.modules[name].__file__
        with modules(fresh):
            for name, code in self._code.items():
                if mutant is not None and name == mutant.module:
                    code = compile(mutant.tree, name, "exec")
                exec(code, fresh[name].__dict__)
            yield fresh


def survivors(runner: Runner) -> list[str]:
    """What no test noticed. Raises ValueError when the tests fail without any mutant, since they
    would notice everything.
    """
    if runner.is_noticed(None):
        raise ValueError("the tests fail without a mutant, or cannot be run without fixtures")
    return [mutant.change for mutant in runner.mutants() if not runner.is_noticed(mutant)]


def calls(module: types.ModuleType) -> Iterator[Callable[[], None]]:
    """The module's test functions, once for each set of their parameters."""
    for name, function in vars(module).items():
        if name.startswith("test_") and callable(function):
            yield from _with_parameters(function, getattr(function, "pytestmark", []))


def _with_parameters(
    function: Callable[..., None], marks: Sequence[Any], **given: Any
) -> Iterator[Callable[[], None]]:
    if not marks:
        yield lambda: function(**given)
        return
    mark, *others = marks
    if mark.name != "parametrize":
        yield from _with_parameters(function, others, **given)
        return
    names, sets = mark.args
    names = [names] if isinstance(names, str) else list(names)
    for values in sets:
        values = values if len(names) > 1 else [values]
        yield from _with_parameters(
            function, others, **given, **dict(zip(names, values, strict=True))
        )
