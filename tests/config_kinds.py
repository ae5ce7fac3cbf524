"""The types of expressions of the package: source in, for every expression the classes that its value may have.

The code is walked as a syntax tree. The type of an expression comes from annotations: of parameters, results, fields
and attributes of `self`, and from there through assignments, loops, calls and subscripts. What only a validator of a
configuration itself looks at is left out. `tests/config_flow.py` follows the values of configuration fields with it.
"""

import ast
import functools
import importlib
import inspect
import pkgutil
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

import m2forge
from m2forge.config import Config

Kind = Any
"""A class, or what typing makes of several; `_Class` for a class itself."""
_ITERABLES = ("Sequence", "Iterable", "Iterator", "Collection", "list", "tuple", "set", "frozenset", "Set", "deque")
_MAPPINGS = ("dict", "Mapping", "MutableMapping", "OrderedDict")
_SAME_ITEMS = ("sorted", "reversed", "list", "tuple", "set", "iter")


class Scope(dict[str, list[Kind]]):
    """The names bound in a function, comprehension or module, with their types."""

    def __init__(self, node: ast.AST | None = None) -> None:
        self.node = node


class _Class:
    def __init__(self, kind: Kind) -> None:
        self.kind = kind


def modules() -> Iterator[types.ModuleType]:
    for found in pkgutil.walk_packages(m2forge.__path__, "m2forge."):
        if not found.name.endswith("__main__"):
            try:
                yield importlib.import_module(found.name)
            except ImportError:
                assert "triton" in found.name or "harbor" in found.name, f"{found.name} cannot be imported"


def owner_of(kind: type[Config], name: str) -> type[Config]:
    """The class that defines the field."""
    return [base for base in kind.__mro__ if name in getattr(base, "model_fields", ())][-1]


def _origin(kind: Kind) -> Any:
    return typing.get_origin(kind)


def _listed(kind: Kind) -> Kind:
    return types.GenericAlias(list, (kind,))


def _tupled(*kinds: Kind) -> Kind:
    return types.GenericAlias(tuple, kinds)


def _either(kinds: list[Kind]) -> Kind:
    return typing.Union[tuple(kinds)]  # noqa: UP007  (of kinds that only the code walked knows)


def members(kind: Kind) -> list[Kind]:
    """The alternatives of a union, without annotations."""
    origin = _origin(kind)
    if origin is typing.Annotated:
        return members(typing.get_args(kind)[0])
    if origin in (typing.Union, types.UnionType):
        return [inner for member in typing.get_args(kind) for inner in members(member)]
    return [kind]


def is_config(kind: Kind) -> typing.TypeGuard[type[Config]]:
    return isinstance(kind, type) and _origin(kind) is None and issubclass(kind, Config)


class Kinds(ast.NodeVisitor):
    """Walks modules twice: attributes of `self` may be read in a module before the one that sets them."""

    def __init__(self, sources: list[tuple[types.ModuleType, ast.Module]]) -> None:
        self._selves: dict[tuple[type, str], list[Kind]] = {}
        self._scopes: list[Scope] = []
        self._globals: dict[str, Any] = {}
        self._class: type | None = None
        self._has_closures: dict[ast.AST, bool] = {}
        self._annotations: dict[ast.expr, list[Kind]] = {}
        for _ in range(2):
            for module, tree in sources:
                self._globals, self._class, self._scopes = vars(module), None, [Scope()]
                self.visit(tree)

    # -- scopes --------------------------------------------------------------------------------------------------------

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, found = self._class, self._globals.get(node.name)
        self._class = found if isinstance(found, type) else None
        self.generic_visit(node)
        self._class = outer

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
        if "_validator" in decorators and self._class is not None and is_config(self._class):
            return
        scope = Scope(node)
        for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
            scope[argument.arg] = [] if argument.annotation is None else self._annotated(argument.annotation)
        if self._class is not None and len(self._scopes) == 1 and node.args.args and node.args.args[0].arg == "self":
            scope["self"] = [self._class]
        self._scopes.append(scope)
        # Twice where there are closures, which may read what is bound below them.
        if node not in self._has_closures:
            inner = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
            found = (isinstance(below, inner) for child in node.body for below in ast.walk(child))
            self._has_closures[node] = any(found)
        for _ in range(1 + self._has_closures[node]):
            for child in [*node.args.defaults, *node.body]:
                self.visit(child)
        self._scopes.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._scopes.append(Scope(node))
        self._scopes[-1].update({argument.arg: [] for argument in node.args.args})
        self.visit(node.body)
        self._scopes.pop()

    def _annotated(self, node: ast.expr) -> list[Kind]:
        if node not in self._annotations:
            self._annotations[node] = self._evaluated(node)
        return [*self._annotations[node]]

    def _evaluated(self, node: ast.expr) -> list[Kind]:
        try:
            if isinstance(node, ast.Name) and node.id in self._globals:  # most are, and compiling takes long
                kind = self._globals[node.id]
            else:
                kind = eval(compile(ast.Expression(node), "annotation", "eval"), self._globals)
            kind = eval(kind, self._globals) if isinstance(kind, str) else kind
        except Exception:  # noqa: BLE001  (a name that only the type checker imports)
            return []
        return members(kind)

    # -- bindings ------------------------------------------------------------------------------------------------------

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        self.bind_targets(node)

    def bind_targets(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for one, value in zip(target.elts, node.value.elts, strict=False):
                    self._bind(one, self.infer(value))
            else:
                self._bind(target, self.infer(node.value))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        self._bind(node.target, self._annotated(node.annotation))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.generic_visit(node)
        self._bind(node.target, self.infer(node.value))

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self._bind(node.target, self._items(node.iter))
        self.generic_visit(node)

    visit_AsyncFor = visit_For

    def visit_withitem(self, node: ast.withitem) -> None:
        self.generic_visit(node)
        if node.optional_vars is not None:
            self._bind(node.optional_vars, self.infer(node.context_expr))

    def _visit_comprehension(self, node: Any) -> None:
        self._scopes.append(Scope(node))
        for generator in node.generators:
            self._bind(generator.target, self._items(generator.iter))
        self.generic_visit(node)
        self._scopes.pop()

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _visit_comprehension

    def _bind(self, target: ast.expr, kinds: list[Kind]) -> None:
        if isinstance(target, ast.Name):
            known = self._scopes[-1].setdefault(target.id, [])
            known += [kind for kind in kinds if kind not in known]
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
            if self._class is not None:
                known = self._selves.setdefault((self._class, target.attr), [])
                known += [kind for kind in kinds if kind not in known]
        elif isinstance(target, ast.Tuple | ast.List):
            for place, one in enumerate(target.elts):
                self._bind(one, [inner for kind in kinds for inner in self._part(kind, place)])

    @staticmethod
    def _part(kind: Kind, place: int) -> list[Kind]:
        """One of several values that are unpacked."""
        arguments = typing.get_args(kind)
        if _origin(kind) is not tuple or not arguments:
            return []
        if arguments[-1] is Ellipsis:
            return members(arguments[0])
        return members(arguments[place]) if place < len(arguments) else []

    # -- expressions ---------------------------------------------------------------------------------------------------

    def infer(self, node: ast.expr) -> list[Kind]:
        match node:
            case ast.Name():
                return self._named(node.id)
            case ast.Attribute():
                return [inner for kind in self.infer(node.value) for inner in self._attribute(kind, node.attr)]
            case ast.Call():
                return self._called(node)
            case ast.Subscript():
                return [inner for kind in self.infer(node.value) for inner in self._element(kind, node)]
            case ast.IfExp():
                return self.infer(node.body) + self.infer(node.orelse)
            case ast.BoolOp():
                return [kind for value in node.values for kind in self.infer(value)]
            case ast.Await() | ast.Starred() | ast.NamedExpr():
                return self.infer(node.value)
        return []

    def _named(self, name: str) -> list[Kind]:
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        found = self._globals.get(name)
        if isinstance(found, type):
            return [_Class(found)]
        return [found] if inspect.isfunction(found) else [type(found)] if isinstance(found, Config) else []

    def _attribute(self, kind: Kind, name: str) -> list[Kind]:
        if not isinstance(kind, type) or _origin(kind) is not None:
            return []
        if is_config(kind) and name in kind.model_fields:
            return members(kind.model_fields[name].annotation)
        for base in kind.__mro__:
            if (base, name) in self._selves:
                return self._selves[base, name]
            found = vars(base).get(name)
            if isinstance(found, property):
                return self._result(found.fget)
            if found is not None and inspect.isfunction(found):
                return [found]
            if name in getattr(base, "__annotations__", {}):
                return self._field(base, name)
        return []

    @staticmethod
    @functools.cache
    def _field(owner: type, name: str) -> list[Kind]:
        try:
            return members(typing.get_type_hints(owner)[name])
        except Exception:  # noqa: BLE001  (as for `_annotated`)
            return []

    @staticmethod
    @functools.cache
    def _result(function: Any) -> list[Kind]:
        try:
            return members(typing.get_type_hints(function).get("return"))
        except Exception:  # noqa: BLE001  (as for `_annotated`)
            return []

    def _called(self, node: ast.Call) -> list[Kind]:
        if isinstance(node.func, ast.Attribute):
            of = self.infer(node.func.value)
            if node.func.attr == "model_copy":
                return of
            mapped = [typing.get_args(kind)[1] for kind in of if _is(kind, _MAPPINGS)]
            if node.func.attr in ("get", "pop", "setdefault"):
                return [inner for kind in mapped for inner in members(kind)]
            if node.func.attr == "values":
                return [_listed(kind) for kind in mapped]
            if node.func.attr == "items":
                return [_listed(_tupled(*typing.get_args(kind))) for kind in of if _is(kind, _MAPPINGS)]
        if isinstance(node.func, ast.Name) and node.func.id in _SAME_ITEMS and node.args:
            return [_listed(_either(items)) for items in [self._items(node.args[0])] if items]
        if isinstance(node.func, ast.Name) and node.func.id in ("max", "min", "next", "replace") and node.args:
            return self._items(node.args[0]) or self.infer(node.args[0])
        found: list[Kind] = []
        for function in self.infer(node.func):
            if isinstance(function, _Class):
                found.append(function.kind)
                continue
            for kind in self._result(function):
                if isinstance(kind, typing.TypeVar):
                    found += [given.kind for arg in node.args for given in self.infer(arg) if isinstance(given, _Class)]
                else:
                    found.append(kind)
        return found

    def _items(self, node: ast.expr) -> list[Kind]:
        """What iterating over it gives."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            if node.func.id == "enumerate":
                return [_tupled(int, item) for item in self._items(node.args[0])]
            if node.func.id == "zip":
                parts = [self._items(arg) or [object] for arg in node.args]
                return [_tupled(*(_either(part) for part in parts))]
        if isinstance(node, ast.Tuple | ast.List):
            return [kind for one in node.elts for kind in self.infer(one)]
        found: list[Kind] = []
        for kind in self.infer(node):
            arguments = typing.get_args(kind)
            if (_is(kind, _ITERABLES) and arguments) or (_is(kind, _MAPPINGS) and arguments):
                found += members(arguments[0])
        return found

    def _element(self, kind: Kind, node: ast.Subscript) -> list[Kind]:
        arguments = typing.get_args(kind)
        if isinstance(node.slice, ast.Slice):
            return [kind]
        if _is(kind, _MAPPINGS) and arguments:
            return members(arguments[1])
        return members(arguments[0]) if _is(kind, _ITERABLES) and arguments else []


def _is(kind: Kind, names: tuple[str, ...]) -> bool:
    origin = _origin(kind)
    return getattr(origin, "__name__", "") in names


def reachable(kinds: list[type[Config]]) -> list[type[Config]]:
    """The classes themselves and those of their fields, of fields of these, and so on."""
    found: list[type[Config]] = []
    waiting: list[Kind] = list(kinds)
    while waiting:
        kind = waiting.pop()
        if typing.get_args(kind):
            waiting += [inner for member in members(kind) for inner in (typing.get_args(member) or [member])]
        elif is_config(kind) and kind not in found:
            found.append(kind)
            waiting += [field.annotation for field in kind.model_fields.values()]
    return found


def is_tag(kind: type[Config], name: str) -> bool:
    """Whether a field only tells the alternatives of a union apart, which pydantic reads."""
    annotation = kind.model_fields[name].annotation
    return _origin(annotation) is Literal and len(typing.get_args(annotation)) == 1
