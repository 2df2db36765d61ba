"""Kernels name the parts of what they hand each other. Parses the sources."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "jax_fa" / "kernels"
FILES = {str(path.relative_to(KERNELS)): path for path in sorted(KERNELS.rglob("*.py"))}

ALIKE = {"exp2_by_polynomial", "widen"}
"""What they return are two of a kind, for whoever counts to two."""


def is_anonymous(annotation: ast.expr | None) -> bool:
    """Whether an annotation, be it within ``cutlass.Constexpr``, says tuple and no more."""
    names = ast.walk(annotation) if annotation else ()
    return any(isinstance(name, ast.Name) and name.id == "tuple" for name in names)


def is_sequence(annotation: ast.expr | None) -> bool:
    """Whether an annotation is ``tuple[X, ...]``: any number of one kind, which need no names."""
    return annotation is not None and bool(
        re.fullmatch(r"tuple\[.*, \.\.\.\]", ast.unparse(annotation))
    )


def anonymous_tuples(source: str) -> Iterator[str]:
    """Parameters and results of functions whose parts have no names."""
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        given, docstring = function.args, ast.get_docstring(function) or ""
        for parameter in (*given.posonlyargs, *given.args, *given.kwonlyargs):
            name = parameter.arg
            found = is_anonymous(parameter.annotation)
            if parameter.annotation is None:
                said = rf"``{name}`` (is|are) \(|^ *{name}: \("
                found = re.search(said, docstring, re.MULTILINE) is not None
            if found:
                yield f"{function.name}: {name}"
        is_named = is_sequence(function.returns) or function.name in ALIKE
        if is_anonymous(function.returns) and not is_named:
            yield f"{function.name}: what it returns"


@pytest.mark.parametrize("name", FILES)
def test_functions_name_the_parts_of_tuples(name):
    assert list(anonymous_tuples(FILES[name].read_text())) == []


@pytest.mark.parametrize(
    ("function", "found"),
    [
        ("def f(at: tuple): ...", ["f: at"]),
        ("def f(*, at: tuple[int, int]): ...", ["f: at"]),
        ("def f(at: tuple[int, ...]): ...", ["f: at"]),
        ("def f(at: cutlass.Constexpr[tuple]): ...", ["f: at"]),
        ("def f(at: tuple | None): ...", ["f: at"]),
        ("def f(at):\n  '''Does. ``at`` is (row, column).'''", ["f: at"]),
        ("def f(at):\n  '''Does.\n\n  Args:\n    at: (row, column).\n  '''", ["f: at"]),
        ("def f() -> tuple: ...", ["f: what it returns"]),
        ("def f() -> tuple[int, float]: ...", ["f: what it returns"]),
        ("def f(at: Tensor):\n  '''Does. ``at`` is (rows, columns).'''", []),
        ("def f(at: Shape, rows: Sequence[int]) -> Slot: ...", []),
        ("def f() -> tuple[int, ...]: ...", []),
    ],
)
def test_an_anonymous_tuple_is_found(function, found):
    assert list(anonymous_tuples(function)) == found


def nested_targets(source: str) -> Iterator[str]:
    """Assignments to names within names, in functions that the DSL rewrites.

    It (4.8.1) overlooks those names: a branch on a run-time value that assigns to them afterwards
    changes nothing.
    """
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef) or not function.decorator_list:
            continue
        for node in ast.walk(function):
            for target in node.targets if isinstance(node, ast.Assign) else ():
                parts = target.elts if isinstance(target, ast.Tuple | ast.List) else ()
                if any(isinstance(part, ast.Tuple | ast.List) for part in parts):
                    yield ast.unparse(target)


@pytest.mark.parametrize("name", FILES)
def test_assigned_names_are_not_nested(name):
    assert list(nested_targets(FILES[name].read_text())) == []


@pytest.mark.parametrize(
    ("function", "found"),
    [
        ("@cute.jit\ndef f(): a, (b, c) = g()", ["(a, (b, c))"]),
        ("@cute.jit\ndef f(): a, b = g()", []),
        ("def f(): a, (b, c) = g()", []),
    ],
)
def test_a_nested_name_is_found(function, found):
    assert list(nested_targets(function)) == found
