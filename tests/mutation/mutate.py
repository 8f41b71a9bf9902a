"""Break the source one small step at a time, and see whether a test notices.

No file is touched: each mutant is imported from memory in a forked process that runs the tests with ``-x``.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.abc
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.MatMult: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
    ast.USub: ast.UAdd, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
METHODS = {
    "sum": "mean", "mean": "sum", "minimum": "maximum", "maximum": "minimum", "clamp_min": "clamp_max",
    "clamp_max": "clamp_min", "square": "abs", "sqrt": "square", "zeros": "ones", "ones_like": "zeros_like",
    "zeros_like": "ones_like", "new_zeros": "new_ones", "sin": "cos", "all": "any", "min": "max", "max": "min",
    "double": "float", "detach": "clone", "add_": "sub_", "exp": "neg", "eye": "ones", "isfinite": "isnan",
}  # fmt: skip


def changes(node: ast.AST) -> Iterator[tuple[str, Callable[[ast.AST], object]]]:
    """Every way to break this node alone: a description, and what does it to the same node of a copy."""
    op = type(getattr(node, "op", None))
    if op in OPERATORS:
        yield f"{op.__name__} → {OPERATORS[op].__name__}", lambda n: setattr(n, "op", OPERATORS[op]())
    elif op is ast.Not:
        yield "not removed", lambda n: setattr(n, "operand", ast.UnaryOp(ast.Not(), n.operand))
    elif isinstance(node, ast.Compare):
        for i, other in enumerate(OPERATORS[type(op)] for op in node.ops):
            yield f"compares by {other.__name__}", lambda n, i=i, other=other: n.ops.__setitem__(i, other())
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float | str):
        v = node.value
        numbers = {v + 1, 2 * v} - {v} if not isinstance(v, bool | str) else set()
        for new in numbers or [not v if isinstance(v, bool) else f"{v}?"]:
            yield f"{v!r} → {new!r}", lambda n, new=new: setattr(n, "value", new)
    elif isinstance(node, ast.Call):
        if len(node.args) > 1 and not any(isinstance(a, ast.Starred) for a in node.args[:2]):
            yield "first two arguments swapped", lambda n: n.args.insert(0, n.args.pop(1))
        for i, keyword in enumerate(node.keywords):
            yield f"{keyword.arg}= dropped", lambda n, i=i: n.keywords.pop(i)
        name = getattr(node.func, "attr", "")
        if name in METHODS:
            yield f".{name} → .{METHODS[name]}", lambda n: setattr(n.func, "attr", METHODS[name])
    elif isinstance(node, ast.IfExp):
        yield "branches swapped", lambda n: n.__dict__.update(body=n.orelse, orelse=n.body)
    elif isinstance(node, ast.Slice):
        for field in [f for f in ("lower", "upper") if getattr(node, f) is not None]:
            yield f"{field} bound dropped", lambda n, field=field: setattr(n, field, None)
    elif isinstance(node, ast.Return) and node.value is not None:
        yield "returns None", lambda n: setattr(n, "value", ast.Constant(None))
    elif isinstance(node, ast.If):
        for value in (True, False):
            yield f"condition → {value}", lambda n, value=value: setattr(n, "test", ast.Constant(value))
    for i, decorator in enumerate(getattr(node, "decorator_list", [])):
        yield f"@{ast.unparse(decorator)} removed", lambda n, i=i: n.decorator_list.pop(i)
    if isinstance(node, ast.FunctionDef | ast.If | ast.For | ast.With):
        for i, statement in enumerate(node.body):
            if not isinstance(getattr(statement, "value", None), ast.Constant):  # a docstring
                first = ast.unparse(statement).splitlines()[0]
                yield f"removed: {first}", lambda n, i=i: n.body.__setitem__(i, ast.Pass())


def ignored(tree: ast.Module) -> set[int]:
    """Nodes without a behaviour: docstrings, annotations, __all__, type aliases, the words of messages."""
    roots: list[ast.AST] = []
    for node in ast.walk(tree):
        roots += [node] if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else []
        roots += [r for r in (getattr(node, "annotation", None), getattr(node, "returns", None)) if r]
        if isinstance(node, ast.Assign):
            alias = isinstance(node.value, ast.Subscript) and node in tree.body
            roots += [node] if alias or ast.unparse(node.targets[0]) == "__all__" else []
        if isinstance(node, ast.Raise | ast.JoinedStr):
            roots += [n for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return {id(node) for root in roots for node in ast.walk(root)}


def mutants(source: str) -> Iterator[tuple[int, str, str]]:
    """(line, description, broken source)."""
    tree = ast.parse(source)
    skipped = ignored(tree)
    for index, node in enumerate(ast.walk(tree)):
        for description, change in changes(node) if id(node) not in skipped else ():
            broken = copy.deepcopy(tree)
            change(list(ast.walk(broken))[index])
            yield getattr(node, "lineno", 0), description, ast.unparse(ast.fix_missing_locations(broken))


class InMemory(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Imports one module from a string; the others as usual."""

    def __init__(self, name: str, path: Path, source: str) -> None:
        self.name, self.path, self.source = name, str(path), source

    def find_spec(self, fullname: str, path: object, target: object = None) -> object:
        return importlib.util.spec_from_loader(fullname, self) if fullname == self.name else None

    def get_filename(self, fullname: str) -> str:
        return self.path

    def get_data(self, path: str) -> bytes:
        return self.source.encode()


def survives(name: str, path: Path, source: str, tests: list[str]) -> bool:
    child = os.fork()
    if child == 0:
        signal.alarm(120)  # a mutant may loop for ever; without a handler this ends it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        sys.meta_path.insert(0, InMemory(name, path, source))
        os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]) != 0))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="a file or folder below src/")
    parser.add_argument("--tests", nargs="+", default=["tests/core"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for path in sorted(arguments.source.rglob("*.py")) if arguments.source.is_dir() else [arguments.source]:
        name = ".".join(path.with_suffix("").parts[path.parts.index("src") + 1 :]).removesuffix(".__init__")
        source = path.read_text(encoding="utf-8")
        if not survives(name, path, source, arguments.tests):
            sys.exit(f"the tests fail without any change to {path}")
        fates = []
        for line, description, broken in mutants(source):
            fates.append(survives(name, path, broken, arguments.tests))
            if fates[-1]:
                print(f"{path}:{line}: {description}", flush=True)
        print(f"# {path}: {len(fates)} mutants, {sum(fates)} survived", flush=True)


if __name__ == "__main__":
    main()
