"""The failing twin of a test file: the same tests, which must all fail whatever the tested code does.

A verdict above 0 is believed only if the runner reports failure for the twins. Tested code that patches the runner,
skips tests, exits early or writes the reward itself makes the twins pass too: they run in a sandbox of their own, under
the same names, so that the tested code does not know in which of both it runs.

In each test function, the expected value of `assert x == y` and `self.assertEqual(x, y)` becomes an object that equals
nothing, so that also a result that claims to equal everything is found. A test function without such a comparison, or
that reaches its end before one, fails at its end. Comparisons inside `with` and `try` stay as they are, since a test
may expect their failure there.
"""

import ast
import secrets

from m2forge.python_source import parse_python

_HEAD = """
class {prefix}Other:
    __hash__ = None
    def __eq__(self, other):
        return False
    def __ne__(self, other):
        return True
{prefix}count = [0]
def {prefix}other():
    {prefix}count[0] += 1
    return {prefix}Other()
def {prefix}end(begin):
    if {prefix}count[0] == begin:
        raise AssertionError
"""


def names_of_tests(source: str) -> list[str]:
    """Names of the test functions of a file, in order; none if it is not Python."""
    try:
        return [function.name for function in _test_functions(parse_python(source))]
    except (SyntaxError, ValueError):
        return []


def failing_twin(source: str) -> str | None:
    """The twin of a test file; None if it has no test function."""
    try:
        tree = parse_python(source)
    except (SyntaxError, ValueError):
        return None
    functions = _test_functions(tree)
    if not functions:
        return None
    prefix = f"_{secrets.choice('abcdefghijklmnop')}{secrets.token_hex(3)}_"
    for function in functions:
        _turn(function, prefix)
    num_first = _num_leading(tree)
    tree.body[num_first:num_first] = parse_python(_HEAD.format(prefix=prefix)).body
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def _test_functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    found: list[ast.FunctionDef | ast.AsyncFunctionDef] = []
    places: list[ast.Module | ast.ClassDef] = [tree]
    while places:
        for node in places.pop(0).body:
            if isinstance(node, ast.ClassDef):
                places.append(node)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
                found.append(node)
    return found


def _num_leading(tree: ast.Module) -> int:
    """Statements that must stay first: the docstring and imports from the future."""
    num = 0
    for node in tree.body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_docstring and not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            break
        num += 1
    return num


def _turn(function: ast.FunctionDef | ast.AsyncFunctionDef, prefix: str) -> None:
    begin = parse_python(f"{prefix}begin = {prefix}count[0]").body
    turner = _Turner(prefix)
    body = [turned for node in function.body for turned in turner.turn(node)]
    function.body = [*begin, *body, *turner.end()]


class _Turner(ast.NodeTransformer):
    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def turn(self, node: ast.stmt) -> list[ast.stmt]:
        turned = self.visit(node)
        return turned if isinstance(turned, list) else [turned]

    def end(self) -> list[ast.stmt]:
        return parse_python(f"{self._prefix}end({self._prefix}begin)").body

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        if isinstance(node.test, ast.Compare) and isinstance(node.test.ops[-1], ast.Eq):
            node.test.comparators[-1] = self._other()
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        match node.value:
            case ast.Call(func=ast.Attribute(attr="assertEqual"), args=[_, _, *_]):
                node.value.args[1] = self._other()
        return node

    def visit_Return(self, node: ast.Return) -> list[ast.stmt]:
        return [*self.end(), node]

    def visit_With(self, node: ast.With) -> ast.stmt:
        return node

    def visit_AsyncWith(self, node: ast.AsyncWith) -> ast.stmt:
        return node

    def visit_Try(self, node: ast.Try) -> ast.stmt:
        return node

    def visit_TryStar(self, node: ast.TryStar) -> ast.stmt:
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.stmt:
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.stmt:
        return node

    def _other(self) -> ast.expr:
        return ast.Call(ast.Name(f"{self._prefix}other", ast.Load()), [], [])
