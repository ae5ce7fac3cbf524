"""Which configuration fields lead anywhere: source in, the fields whose values no code uses out.

A value that is only copied is not used: `x = config.size` where nothing loads `x`, `self._size = config.size` where
nothing loads `_size` of that class, an argument whose parameter is never loaded, a field of another record that is
never loaded. So reads are the edges of a graph:

    config field, local variable, parameter, attribute of a class   →   what its value is copied to
                                                                    →   USED, where it is more than copied

A field is used if USED can be reached from it. Where the graph is not known (a callee or an object without a type), a
value counts as used.
"""

import ast
import dataclasses
import inspect
import types
from collections.abc import Iterable
from typing import Any

from m2forge.config import Config
from tests.config_kinds import Kind, Kinds, is_config, is_tag, owner_of, reachable

Slot = tuple[object, ...]
USED: Slot = ("used",)
_WHOLE = ("asdict", "astuple", "fields", "vars", "repr", "str", "hash")
"""Functions that load every attribute of their argument."""
Functions = dict[tuple[str, str], ast.FunctionDef | ast.AsyncFunctionDef]


class Flows(Kinds):
    def __init__(self, sources: list[tuple[types.ModuleType, ast.Module]]) -> None:
        self.edges: dict[Slot, set[Slot]] = {}
        self._modules = {module.__name__ for module, _ in sources}
        self._functions: Functions = {}
        for module, tree in sources:
            self._collect(module.__name__, "", tree)
        self._overridden = _overridden(sources)
        self._use: list[Slot] = [USED]
        """What a value that is more than copied counts as: within a property of a configuration, as the property."""
        super().__init__(sources)
        self._link_attributes()

    def _collect(self, module: str, prefix: str, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                self._functions[module, f"{prefix}{child.name}"] = child
            elif isinstance(child, ast.ClassDef):
                self._collect(module, f"{prefix}{child.name}.", child)
            elif isinstance(child, ast.If | ast.Try):
                self._collect(module, prefix, child)

    def is_live(self, kind: type[Config], name: str) -> bool:
        waiting, seen = [_attribute(kind, name)], set[Slot]()
        while waiting:
            slot = waiting.pop()
            if slot == USED:
                return True
            if slot not in seen:
                seen.add(slot)
                waiting += self.edges.get(slot, ())
        return False

    def _link_attributes(self) -> None:
        """A value that is stored as an attribute of one class may be loaded from a class above or below it, or from an
        object without a known type."""
        attributes = [slot for slot in self.edges if slot[0] == "attribute"]
        stored = {slot for targets in self.edges.values() for slot in targets if slot[0] == "attribute"}
        by_name: dict[object, list[Slot]] = {}
        for slot in {*attributes, *stored}:
            by_name.setdefault(slot[2], []).append(slot)
        for name, slots in by_name.items():
            for slot in slots:
                targets = self.edges.setdefault(slot, set())
                targets.add(("any", name))
                targets.update(other for other in slots if other != slot and _is_related(slot[1], other[1]))

    # -- statements ----------------------------------------------------------------------------------------------------

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        before = self._use
        if self._class is not None and is_config(self._class) and len(self._scopes) == 1:
            self._use = [_attribute(self._class, node.name)]
        super().visit_FunctionDef(node)
        self._use = before

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Expr(self, node: ast.Expr) -> None:
        self._flow(node.value, [])

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for one, value in zip(target.elts, node.value.elts, strict=False):
                    self._store(one, value)
            else:
                self._store(target, node.value)
        self.bind_targets(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._store(node.target, node.value)
        self._bind(node.target, self._annotated(node.annotation))

    def _store(self, target: ast.expr, value: ast.expr) -> None:
        self._flow(value, self._stored(target))
        if not isinstance(target, ast.Name):
            self.visit(target)

    def _stored(self, target: ast.expr) -> list[Slot]:
        if isinstance(target, ast.Name) and len(self._scopes) > 1:
            return [("local", self._scopes[-1].node, target.id)]
        if isinstance(target, ast.Attribute):
            kinds = [kind for kind in self.infer(target.value) if self._is_ours(kind)]
            return [_attribute(kind, target.attr) for kind in kinds] or self._use
        return self._use

    # -- expressions ---------------------------------------------------------------------------------------------------

    def visit_Name(self, node: ast.Name) -> None:
        self._flow(node, self._use)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._flow(node, self._use)

    def _flow(self, node: ast.expr, targets: list[Slot]) -> None:
        """The value of `node` is copied to `targets`."""
        match node:
            case ast.Name():
                for slot in self._local(node.id) if isinstance(node.ctx, ast.Load) else ():
                    self.edges.setdefault(slot, set()).update(targets)
            case ast.Attribute():
                self.visit(node.value)
                if isinstance(node.ctx, ast.Load):
                    for slot in self._loaded(node):
                        self.edges.setdefault(slot, set()).update(targets)
            case ast.IfExp():
                self.visit(node.test)
                self._flow(node.body, targets)
                self._flow(node.orelse, targets)
            case ast.BoolOp():
                for value in node.values:
                    self._flow(value, targets)
            case _:
                self.visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self.visit(node.func)
        if isinstance(node.func, ast.Name) and node.func.id in _WHOLE:
            for kind in [kind for argument in node.args for kind in self.infer(argument)]:
                for name in getattr(kind, "__annotations__", {}):
                    self.edges.setdefault(_attribute(kind, name), set()).add(USED)
        callees = [self._parameters(function) for function in self.infer(node.func)]
        is_known = bool(callees) and None not in callees
        for place, argument in enumerate(node.args):
            self._flow(argument, self._received(callees, place) if is_known else self._use)
        for keyword in node.keywords:
            self._flow(keyword.value, self._received(callees, keyword.arg) if is_known else self._use)

    def _received(self, callees: list[dict[int | str, Slot] | None], place: int | str | None) -> list[Slot]:
        slots = [callee[place] for callee in callees if callee is not None and place is not None and place in callee]
        return slots if len(slots) == len(callees) else self._use

    def _local(self, name: str) -> list[Slot]:
        for scope in reversed(self._scopes[1:]):
            if name in scope:
                return [("local", scope.node, name)]
        return []

    def _loaded(self, node: ast.Attribute) -> list[Slot]:
        kinds = [kind for kind in self.infer(node.value) if self._is_ours(kind)]
        return [_attribute(kind, node.attr) for kind in kinds] or [("any", node.attr)]

    def _is_ours(self, kind: Kind) -> bool:
        return isinstance(kind, type) and (is_config(kind) or kind.__module__ in self._modules)

    # -- callees -------------------------------------------------------------------------------------------------------

    def _parameters(self, callee: Kind) -> dict[int | str, Slot] | None:
        """What each argument, by position and by keyword, is stored as; None where that is not known."""
        kind = getattr(callee, "kind", None)
        if kind is None:
            return self._of_function(callee)
        if not self._is_ours(kind):
            return None
        if is_config(kind):
            return {name: _attribute(kind, name) for name in kind.model_fields}
        if dataclasses.is_dataclass(kind):
            names = [field.name for field in dataclasses.fields(kind) if field.init]
            return _both([(name, _attribute(kind, name)) for name in names])
        return self._of_function(kind.__init__) if inspect.isfunction(kind.__init__) else None

    def _of_function(self, function: Any) -> dict[int | str, Slot] | None:
        function = inspect.unwrap(function)
        name = getattr(function, "__qualname__", "")
        node = self._functions.get((getattr(function, "__module__", ""), name))
        if node is None or name in self._overridden or _is_empty(node):
            return None
        names = [argument.arg for argument in [*node.args.posonlyargs, *node.args.args]]
        names = names[1:] if names[:1] in (["self"], ["cls"]) else names
        found = _both([(name, ("local", node, name)) for name in names])
        return found | {argument.arg: ("local", node, argument.arg) for argument in node.args.kwonlyargs}


def _both(pairs: Iterable[tuple[str, Slot]]) -> dict[int | str, Slot]:
    found: dict[int | str, Slot] = {}
    for place, (name, slot) in enumerate(pairs):
        found[place] = found[name] = slot
    return found


def _attribute(kind: Any, name: str) -> Slot:
    if is_config(kind) and name in kind.model_fields:
        return "attribute", owner_of(kind, name), name
    return "attribute", kind, name


def _is_related(one: Any, other: Any) -> bool:
    return other in one.__mro__ or one in other.__mro__


def _is_empty(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is a declaration of what others define: a docstring, `...` or nothing but an error."""
    return all(isinstance(child, ast.Expr | ast.Pass | ast.Raise) for child in node.body) and not any(
        isinstance(child, ast.Expr) and not isinstance(child.value, ast.Constant) for child in node.body
    )


def _overridden(sources: list[tuple[types.ModuleType, ast.Module]]) -> set[str]:
    """Names of methods of which a class below has one of its own."""
    found: set[str] = set()
    for module, _ in sources:
        for kind in vars(module).values():
            if isinstance(kind, type) and kind.__module__ == module.__name__:
                for base in kind.__mro__[1:]:
                    found |= {f"{base.__qualname__}.{name}" for name in vars(kind) if name in vars(base)}
    return found


def unused(stages: list[type[Config]], sources: list[tuple[types.ModuleType, ast.Module]]) -> list[str]:
    """Fields of the stages' configurations whose values lead nowhere, as Class.field."""
    flows, kinds = Flows(sources), reachable(stages)
    fields = {(owner_of(kind, name), name) for kind in kinds for name in kind.model_fields if not is_tag(kind, name)}
    return sorted(f"{kind.__name__}.{name}" for kind, name in fields if not flows.is_live(kind, name))
