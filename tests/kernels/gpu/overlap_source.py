"""What the source of kernels says of their overlap: what stands before the wait, and launches.

Calls are followed into helpers, and each address to the pointers of the kernel that it comes from.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

PACKAGE = "peagle.kernels.gpu."
WAITS, SIGNAL = ("wait", "gdc_wait"), "gdc_launch_dependents"
WRITES = ("store", "atomic", "inline_asm")  # how their names begin


class Jit(NamedTuple):
    """A function under @triton.jit."""

    module: str
    function: ast.FunctionDef

    @property
    def parameters(self) -> list[ast.arg]:
        return self.function.args.args


Scope = Mapping[str, Jit]


class Sources:
    def __init__(self, texts: Mapping[str, str]) -> None:
        self.trees = {module: ast.parse(text) for module, text in texts.items()}
        own = {module: _jit_functions(module, tree) for module, tree in self.trees.items()}
        self.scopes = {m: own[m] | _imported(tree, own) for m, tree in self.trees.items()}
        helpers = {
            id(self.scopes[m][name].function)
            for m, functions in own.items()
            for jit in functions.values()
            for name in _called([jit.function])
            if name in self.scopes[m]
        }
        self.kernels = {
            f"{m}.{name}": jit
            for m, functions in own.items()
            for name, jit in functions.items()
            if id(jit.function) not in helpers and _overlaps(jit)
        }

    def launches(self, kernel: Jit) -> Iterator[tuple[ast.Module, ast.Call]]:
        """`kernel[grid](...)`, with the module where it stands."""
        for module, tree in self.trees.items():
            for call in _calls([tree]):
                if isinstance(call.func, ast.Subscript) and isinstance(call.func.value, ast.Name):
                    launched = self.scopes[module].get(call.func.value.id)
                    if launched is not None and launched.function is kernel.function:
                        yield tree, call


def _jit_functions(module: str, tree: ast.Module) -> dict[str, Jit]:
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {
        f.name: Jit(module, f)
        for f in functions
        if any(ast.unparse(d).startswith("triton.jit") for d in f.decorator_list)
    }


def _imported(tree: ast.Module, own: Mapping[str, Scope]) -> dict[str, Jit]:
    found: dict[str, Jit] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            there = own.get((node.module or "").removeprefix(PACKAGE), {})
            names = [(a.asname or a.name, a.name) for a in node.names if a.name in there]
            found |= {here: there[name] for here, name in names}
    return found


def _overlaps(jit: Jit) -> bool:
    has_flag = "OVERLAPS" in [p.arg for p in jit.parameters]
    return has_flag or bool(_called([jit.function]) & {*WAITS, SIGNAL})


def _calls(nodes: Sequence[ast.AST]) -> Iterator[ast.Call]:
    return (n for node in nodes for n in ast.walk(node) if isinstance(n, ast.Call))


def _name(call: ast.Call) -> str:
    """Of what is called, without what stands before the dot."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _called(nodes: Sequence[ast.AST]) -> set[str]:
    return {_name(call) for call in _calls(nodes)}


def before_wait(jit: Jit) -> list[ast.stmt] | None:
    """What may run before the wait that every program passes; None: there is none."""
    for n, statement in enumerate(jit.function.body):
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "OVERLAPS":
            for m, inner in enumerate(statement.body):
                if ast.unparse(inner) in [f"{name}()" for name in WAITS]:
                    return [*jit.function.body[:n], *statement.body[:m]]
    return None


@dataclass
class Early:
    """What a kernel does before it waits, as far as it concerns others."""

    reads: set[str] = field(default_factory=set)  # its pointers
    fetches: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)  # calls and statements with an effect


def early(sources: Sources, kernel: Jit) -> Early:
    found, statements = Early(), before_wait(kernel)
    assert statements is not None, "no wait() under `if OVERLAPS:` that every program passes"
    constants = [p.arg for p in kernel.parameters if p.annotation is not None]
    pointers = {p.arg: {p.arg} for p in kernel.parameters if p.arg not in constants}
    _follow(sources, sources.scopes[kernel.module], statements, pointers, found)
    # The end of a program is a signal, too.
    if any(isinstance(n, ast.Return) for statement in statements for n in ast.walk(statement)):
        found.others.add("return")
    return found


def _follow(
    sources: Sources,
    scope: Scope,
    statements: Sequence[ast.stmt],
    pointers: Mapping[str, set[str]],  # of each parameter: the kernel's pointers in it
    found: Early,
) -> None:
    known = {**pointers}
    for _ in range(1 + len(statements)):  # until nothing is new, in whatever order it was assigned
        for target, value in _assignments(statements):
            known[target] = known.get(target, set()) | _origins(value, known)
    for call in _calls(statements):
        name = _name(call)
        if name == "load":
            found.reads |= _origins(_loaded(call), known) or {ast.unparse(call)}
        elif name == "fetch":
            found.fetches |= _origins(call.args[0], known)
        elif name in scope:
            helper = scope[name]
            given = _given(helper, call, known)
            _follow(sources, sources.scopes[helper.module], helper.function.body, given, found)
        elif isinstance(call.func, ast.Name) or name.startswith(WRITES):
            found.others.add(name)


def _assignments(statements: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    for node in (n for statement in statements for n in ast.walk(statement)):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr | ast.For):
            targets = [node.target]
        value = node.iter if isinstance(node, ast.For) else getattr(node, "value", None)
        for target in (n for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)):
            assert isinstance(value, ast.expr)
            yield target.id, value


def _origins(node: ast.AST, known: Mapping[str, set[str]]) -> set[str]:
    """The pointers that an address may come from. One is only added to, or handed on."""
    if isinstance(node, ast.Name):
        return known.get(node.id, set())
    is_offset = isinstance(node, ast.BinOp) and not isinstance(node.op, ast.Add | ast.Sub)
    is_loaded = isinstance(node, ast.Call) and _name(node) == "load"
    if is_offset or is_loaded or isinstance(node, ast.Compare | ast.BoolOp):
        return set()
    return set().union(*(_origins(child, known) for child in ast.iter_child_nodes(node)))


def _loaded(call: ast.Call) -> ast.expr:
    """The address of `tl.load(address)` and of `address.load()`."""
    assert isinstance(call.func, ast.Attribute)
    return call.args[0] if ast.unparse(call.func) == "tl.load" else call.func.value


def _given(helper: Jit, call: ast.Call, known: Mapping[str, set[str]]) -> dict[str, set[str]]:
    names = [p.arg for p in helper.parameters]
    by_place = {name: _origins(a, known) for name, a in zip(names, call.args, strict=False)}
    return by_place | {k.arg: _origins(k.value, known) for k in call.keywords if k.arg}


def says_overlapping(tree: ast.Module, call: ast.Call) -> bool:
    """Whether a launch has **overlapping(), or **options() of a function that gives it on."""
    spread = [_name(k.value) for k in call.keywords if isinstance(k.value, ast.Call) and not k.arg]
    givers = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        for inner in ast.walk(node)
        if isinstance(inner, ast.Return) and _gives_overlapping(inner.value)
    ]
    named = {k.arg for k in call.keywords} & {"OVERLAPS", "launch_pdl"}
    return not named and any(name in ["overlapping", *givers] for name in spread)


def _gives_overlapping(value: ast.expr | None) -> bool:
    if not isinstance(value, ast.Dict):
        return False
    spread = [v for k, v in zip(value.keys, value.values, strict=True) if k is None]
    return "overlapping()" in [ast.unparse(v) for v in spread]
