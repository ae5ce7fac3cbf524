"""JavaScript, Go, C and Rust by tree-sitter: faults, of the kinds of `mutation`, test files without some tests, and
those whose tests all fail.

    compare     == ↔ !=, === ↔ !==, < ↔ <=, > ↔ >=
    logic       && ↔ ||; a condition negated, `!x` without its `!`
    arithmetic  + ↔ -, * ↔ /, % → *, & ↔ |, << ↔ >>, and their assignments
    constant    a number plus one, true ↔ false
    result      the value of `return` replaced by the zero of its type; a bool negated
    removed     a call, or an assignment that is not of a plain name, replaced by nothing
    argument    the first two arguments of a call swapped

The grammars name these nodes almost alike, so one walk serves all. Types, imports, macros, preprocessor conditions,
tests inside of source files (Rust) and what is thrown are left alone. A function with a syntax error is left alone too.
Every mutant is parsed again: one with more syntax errors than the file had is dropped.
"""

import functools
import importlib
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, TypeAlias

from m2forge.errors import ConfigError

if TYPE_CHECKING:
    from tree_sitter import Node, Parser, Tree

Fault: TypeAlias = tuple[str, int, int, str]
"""Its kind, the range of bytes that is replaced, the new text."""


@dataclass(frozen=True, slots=True)
class Language:
    package: str
    """The module of the grammar."""
    functions: frozenset[str]
    """Nodes that are functions, those without a name included."""
    skipped: frozenset[str]
    """Nodes that tests rarely see."""
    zero: Callable[["Node", "Node"], str | None]
    """What replaces a value that a function returns; None if no value of its type is known."""
    nothing: str
    """An empty statement."""


def _javascript_zero(value: "Node", function: "Node") -> str | None:
    return None if _text(value) in ("undefined", "null") else "undefined"


_C_TYPES = frozenset({"primitive_type", "sized_type_specifier", "type_identifier"})


def _c_zero(value: "Node", function: "Node") -> str | None:
    kind = function.child_by_field_name("type")
    declarator = function.child_by_field_name("declarator")
    is_scalar = (kind is not None and kind.type in _C_TYPES) or (
        declarator is not None and declarator.type == "pointer_declarator"
    )
    return "0" if is_scalar and _text(value) not in ("0", "NULL") else None


_GO_ZEROS: Mapping[str, str] = {
    r"u?int(8|16|32|64|ptr)?|float(32|64)|byte|rune": "0",
    r"string": '""',
    r"\*.*|\[\].*|map\[.*|func\(.*|chan .*|error|any|interface\{\}": "nil",
}
_RUST_ZEROS: Mapping[str, str] = {
    r"[ui](8|16|32|64|128|size)": "0",
    r"f(32|64)": "0.0",
    r"Option<.*": "None",
    r"String": "String::new()",
    r"&('\w+ )?str": '""',
    r"Vec<.*": "Vec::new()",
}


def _zero_of(value: "Node", kind: str, zeros: Mapping[str, str]) -> str | None:
    text = _text(value)
    if kind == "bool":
        return None if text in ("true", "false") else f"!({text})"
    found = next((zero for pattern, zero in zeros.items() if re.fullmatch(pattern, kind, re.DOTALL)), None)
    return None if found == text else found


def _go_zero(value: "Node", function: "Node") -> str | None:
    """The zero value of a result; where a function has several, the type at its index counts."""
    result = function.child_by_field_name("result")
    if result is None:
        return None
    kinds = [_text(result)]
    if result.type == "parameter_list":
        kinds = []
        for declared in result.named_children:
            kind = declared.child_by_field_name("type")
            num_names = len(declared.children_by_field_name("name"))
            kinds += [_text(kind) if kind is not None else ""] * max(1, num_names)
    values = value.parent.named_children if value.parent is not None else [value]
    return _zero_of(value, kinds[values.index(value)], _GO_ZEROS) if len(values) == len(kinds) else None


def _rust_zero(value: "Node", function: "Node") -> str | None:
    kind = function.child_by_field_name("return_type")
    return _zero_of(value, _text(kind), _RUST_ZEROS) if kind is not None else None


JAVASCRIPT = Language(
    "tree_sitter_javascript",
    frozenset(
        {
            *("function_declaration", "function_expression", "arrow_function", "method_definition"),
            *("generator_function", "generator_function_declaration"),
        }
    ),
    frozenset({"import_statement", "throw_statement", "decorator"}),
    _javascript_zero,
    ";",
)
GO = Language(
    "tree_sitter_go",
    frozenset({"function_declaration", "method_declaration", "func_literal"}),
    frozenset({"package_clause", "import_declaration", "type_declaration", "array_type"}),
    _go_zero,
    "",
)
C = Language(
    "tree_sitter_c",
    frozenset({"function_definition"}),
    frozenset(
        {
            *("preproc_include", "preproc_def", "preproc_function_def", "preproc_call", "array_declarator"),
            *("type_definition", "struct_specifier", "union_specifier", "enum_specifier", "attribute_specifier"),
        }
    ),
    _c_zero,
    ";",
)
RUST = Language(
    "tree_sitter_rust",
    frozenset({"function_item", "closure_expression"}),
    frozenset(
        {
            *("use_declaration", "extern_crate_declaration", "attribute_item", "inner_attribute_item"),
            *("macro_definition", "macro_invocation", "struct_item", "enum_item", "union_item", "type_item"),
            *("array_type", "generic_type", "type_arguments", "where_clause"),
        }
    ),
    _rust_zero,
    "",
)
LANGUAGES: Mapping[str, Language] = {
    **dict.fromkeys((".js", ".mjs", ".cjs"), JAVASCRIPT),
    ".go": GO,
    **dict.fromkeys((".c", ".h"), C),
    ".rs": RUST,
}
"""By a file's suffix."""


@functools.cache
def _parser(language: Language) -> "Parser":
    try:
        tree_sitter, grammar = importlib.import_module("tree_sitter"), importlib.import_module(language.package)
    except ImportError as error:
        missing = language.package.replace("_", "-")
        raise ConfigError(
            f"mutations of JavaScript, Go, C and Rust need tree-sitter and {missing}, which are missing: "
            "pip install 'm2forge[pipelines]'"
        ) from error
    parser: Parser = tree_sitter.Parser(tree_sitter.Language(grammar.language()))
    return parser


def faults(path: str, source: str, lines: Collection[int] | None = None) -> Iterator[tuple[int, Fault]]:
    """Faults of a file in one of `LANGUAGES` that start at one of the lines, each with its line."""
    language = LANGUAGES[PurePosixPath(path).suffix]
    data = source.encode()
    starts = [0, *(match.end() for match in re.finditer(b"\n", data))]
    tree = _parser(language).parse(data)
    num_errors = _num_errors(tree.root_node)
    for fault in _faults(tree.root_node, language):
        line = bisect_right(starts, fault[1])
        if (lines is None or line in lines) and _num_errors(_mutant(fault, data, tree, language)) <= num_errors:
            yield line, fault


def functions(path: str, source: str) -> Iterator[tuple[int, int]]:
    """First and last lines of functions that are in no other function."""
    language = LANGUAGES[PurePosixPath(path).suffix]
    pending = [_parser(language).parse(source.encode()).root_node]
    while pending:
        node = pending.pop()
        if node.type in language.functions:
            yield node.start_point[0] + 1, node.end_point[0] + 1
        else:
            pending += node.children


def _mutant(fault: Fault, data: bytes, tree: "Tree", language: Language) -> "Node":
    """The mutant's tree. What the fault does not touch is not parsed again."""
    _, start, old_end, text = fault
    edited, mutant = tree.copy(), data[:start] + text.encode() + data[old_end:]
    end = start + len(text.encode())
    edited.edit(start, old_end, end, _point(data, start), _point(data, old_end), _point(mutant, end))
    return _parser(language).parse(mutant, edited).root_node


def _point(data: bytes, index: int) -> tuple[int, int]:
    return data.count(b"\n", 0, index), index - (data.rfind(b"\n", 0, index) + 1)


def _num_errors(node: "Node") -> int:
    if not node.has_error:
        return 0
    return int(node.is_error or node.is_missing) + sum(_num_errors(child) for child in node.children)


# -- the walk ---------------------------------------------------------------------------------------------------------

_SWAPPED: Mapping[str, tuple[str, str]] = {
    **{old: ("compare", new) for old, new in (("==", "!="), ("===", "!=="), ("<", "<="), (">", ">="))},
    **{new: ("compare", old) for old, new in (("==", "!="), ("===", "!=="), ("<", "<="), (">", ">="))},
    **{old: ("arithmetic", new) for old, new in (("+", "-"), ("*", "/"), ("<<", ">>"))},
    **{new: ("arithmetic", old) for old, new in (("+", "-"), ("*", "/"), ("<<", ">>"))},
    "%": ("arithmetic", "*"),
}
"""Operators that bind as strongly as the one that replaces them."""
_REGROUPED: Mapping[str, tuple[str, str]] = {
    "&&": ("logic", "||"),
    "||": ("logic", "&&"),
    "&": ("arithmetic", "|"),
    "|": ("arithmetic", "&"),
}
"""Operators whose operands need parentheses once they are replaced."""
_STRINGS = frozenset(
    {"string", "string_literal", "interpreted_string_literal", "raw_string_literal", "template_string"}
)
_NUMBERS = frozenset({"number", "number_literal", "int_literal", "float_literal", "integer_literal"})
_ASSIGNMENTS = frozenset(
    {
        *("assignment_expression", "augmented_assignment_expression", "compound_assignment_expr"),
        *("assignment_statement", "inc_statement", "dec_statement"),
    }
)
_PLAIN_NAMES = frozenset({"identifier"})
_NEGATABLE = frozenset(
    {
        *("if_statement", "while_statement", "do_statement", "for_statement", "for_clause", "if_expression"),
        *("while_expression", "ternary_expression", "conditional_expression"),
    }
)
_UNNEGATABLE = frozenset({"let_condition", "let_chain", "true", "false", "boolean_literal", "empty_statement", ";"})
_QUIET = frozenset({"assert", "static_assert", "_Static_assert", "panic", "super", "require"})
"""Functions whose calls are left alone."""


def _faults(root: "Node", language: Language) -> Iterator[Fault]:
    """All faults of a tree. A function is passed down, because it has the type of what is returned in it."""
    pending: list[tuple[Node, Node | None]] = [(root, None)]
    while pending:
        node, function = pending.pop()
        if node.type in language.functions:
            if node.has_error:
                continue
            function = node
        if not node.has_error:
            yield from _expression_faults(node, language)
            yield from _statement_faults(node, function, language)
        pending += [(child, function) for child in _visible(node, language)]


def _visible(node: "Node", language: Language) -> Iterator["Node"]:
    """Children that tests may see."""
    is_test = False
    for index, child in enumerate(node.children):
        if child.type == "attribute_item":
            is_test |= bool(re.search(r"\b(?<!not\()(?:test|bench)\b", _text(child)))
        elif "comment" not in child.type:
            is_condition = node.type.startswith("preproc_") and node.field_name_for_child(index) == "condition"
            if not (is_test or is_condition or child.type in language.skipped or _is_quiet(child)):
                yield child
            is_test = False


def _is_quiet(node: "Node") -> bool:
    called = node.child_by_field_name("function") if node.type == "call_expression" else None
    return called is not None and _text(called) in _QUIET


def _expression_faults(node: "Node", language: Language) -> Iterator[Fault]:
    match node.type:
        case "binary_expression":
            yield from _operator_faults(node)
        case "unary_expression" if node.children[0].type == "!":
            # Where any value can be a condition, the value stays a truth value.
            new = "!!" if language in (JAVASCRIPT, C) else ""
            yield "logic", node.start_byte, node.children[1].start_byte, new
        case "true" | "false":
            yield "constant", node.start_byte, node.end_byte, "false" if node.type == "true" else "true"
        case kind if kind in _NUMBERS and not _is_member(node):
            if (more := _plus_one(_text(node))) is not None:
                yield "constant", node.start_byte, node.end_byte, more
        case "call_expression" | "new_expression":
            arguments = node.child_by_field_name("arguments")
            given = [] if arguments is None else [one for one in arguments.named_children if "comment" not in one.type]
            is_spread = bool({"spread_element", "variadic_argument"} & {one.type for one in given[:2]})
            if len(given) > 1 and not is_spread and _text(given[0]) != _text(given[1]):
                swapped = f"{_text(given[1])}, {_text(given[0])}"
                yield "argument", given[0].start_byte, given[1].end_byte, swapped
    if node.type in _ASSIGNMENTS and (operator := node.child_by_field_name("operator")) is not None:
        kind, new = {**_SWAPPED, **_REGROUPED}.get(_text(operator).removesuffix("="), ("", ""))
        if kind == "arithmetic" and not _has_string(node):
            yield kind, operator.start_byte, operator.end_byte, f"{new}="
    condition = node.child_by_field_name("condition") if node.type in _NEGATABLE else None
    if condition is not None:
        inner = condition.named_children[0] if condition.type == "parenthesized_expression" else condition
        is_negation = inner.type == "unary_expression" and inner.children[0].type == "!"
        if inner.type not in _UNNEGATABLE and not is_negation:
            yield "logic", inner.start_byte, inner.end_byte, f"!({_text(inner)})"


def _operator_faults(node: "Node") -> Iterator[Fault]:
    operator = node.child_by_field_name("operator")
    left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
    if operator is None or left is None or right is None or _has_string(node):
        return
    if (found := _SWAPPED.get(_text(operator))) is not None:
        yield found[0], operator.start_byte, operator.end_byte, found[1]
    elif (found := _REGROUPED.get(_text(operator))) is not None:
        sides = [f"({_text(side)})" if side.type == "binary_expression" else _text(side) for side in (left, right)]
        new = f"{sides[0]} {found[1]} {sides[1]}"
        is_inner = node.parent is not None and node.parent.type == "binary_expression"
        yield found[0], node.start_byte, node.end_byte, f"({new})" if is_inner else new


def _has_string(node: "Node") -> bool:
    """Whether text is put together: no other operator does anything sensible with it."""
    sides = (node.child_by_field_name("left"), node.child_by_field_name("right"))
    return any(side is not None and side.type in _STRINGS for side in sides)


def _is_member(node: "Node") -> bool:
    """Whether a number names a field of a tuple."""
    return node.parent is not None and node.parent.type == "field_expression"


def _plus_one(text: str) -> str | None:
    """A number plus one, in the same base, with the same suffix; of a fraction, its whole part grows."""
    match = re.match(r"(?:(0[xX])([\da-fA-F_]+)|(0|[1-9][\d_]*)(?![\dbBoO]))", text)
    if match is None:
        return None
    prefix, digits = (match[1], match[2]) if match[1] else ("", match[3])
    value = int(digits.replace("_", ""), 16 if prefix else 10) + 1
    return f"{prefix}{value:0{len(digits)}x}{text[match.end() :]}" if prefix else f"{value}{text[match.end() :]}"


def _statement_faults(node: "Node", function: "Node | None", language: Language) -> Iterator[Fault]:
    if _is_removable(node):
        yield "removed", node.start_byte, node.end_byte, language.nothing
    if function is None or function.type == "closure_expression":
        return
    for value in _returned(node, function):
        if (zero := language.zero(value, function)) is not None:
            yield "result", value.start_byte, value.end_byte, zero


def _is_removable(node: "Node") -> bool:
    parent = node.parent
    if parent is None or parent.type in ("for_clause", "for_statement"):
        return False
    done = node.named_children[0] if node.type == "expression_statement" and node.named_children else node
    if done.type == "await_expression":
        done = done.named_children[0]
    if done.type == "call_expression":
        return done is not node and not _is_quiet(done)
    if done.type not in _ASSIGNMENTS or (done is node and parent.type != "statement_list"):
        return False
    left, operator = done.child_by_field_name("left"), done.child_by_field_name("operator")
    is_update = operator is not None and _text(operator) != "="
    targets = left.named_children if left is not None and left.type == "expression_list" else [left]
    is_plain = any(target is not None and target.type in _PLAIN_NAMES for target in targets)
    return left is None or is_update or not is_plain


def _returned(node: "Node", function: "Node") -> list["Node"]:
    """Values that a statement returns; in Rust also the last expression of a function."""
    if node.type in ("return_statement", "return_expression"):
        values = [one for one in node.named_children if "comment" not in one.type]
        return values[0].named_children if values and values[0].type == "expression_list" else values
    is_body = node.type == "block" and node == function.child_by_field_name("body")
    if is_body and function.type == "function_item" and len(node.children) > 2:
        last = node.children[-2]
        if last.is_named and not _text(last).endswith((";", "}")) and "comment" not in last.type:
            return [last]
    return []


def _text(node: "Node") -> str:
    return (node.text or b"").decode()


# -- test files -------------------------------------------------------------------------------------------------------

_C_STUB = "int main(void)\n{\n    return 0;\n}\n"
_CASES = re.compile(r"(?:\w+\.)?(?:test|it|specify)(?:\.\w+)?")
"""Functions that are given a name and a test in JavaScript."""


def without_tests(path: str, source: str, names: Collection[str]) -> str | None:
    """A test file without the tests of these names; None if it has none of them.

    JavaScript, a case that none of its calls has, and C      the file tests nothing: build files list it, so it stays
    Go                                                        also without imports that are no longer used
    Rust                                                      also without the attributes of the functions
    """
    language = LANGUAGES[PurePosixPath(path).suffix]
    if language is C:
        return _C_STUB if re.search(r"\bmain\s*\(", source) else None
    data = source.encode()
    found = [span for node in _nodes(_parser(language).parse(data).root_node) for span in _test_spans(node, names)]
    if not found:
        return "" if language is JAVASCRIPT else None
    pruned = _without(data, found)
    return (_without_imports(pruned, data) if language is GO else pruned).decode()


def failing_tests(path: str, source: str) -> str | None:
    """A test file in which every test runs as it is and then fails, the file's twin; None if it has no test that can be
    made to. Tested code that ends the process, or reports success itself, ends these tests as successfully as others.

    JavaScript     a case throws at its end; assertions of tape all fail; a script without cases throws at its end
    Go             a test is marked as failed at its beginning, and goes on
    C              `main` returns 1, and calls of `exit` in this file exit with 1
    Rust           a value panics when a test drops it at its end; no panic is expected
    """
    language = LANGUAGES.get(PurePosixPath(path).suffix)
    if language is None:
        return None
    data = source.encode()
    root = _parser(language).parse(data).root_node
    edits = [edit for node in _nodes(root) for edit in _FAILING[language.package](node)]
    if not edits and language is JAVASCRIPT and not _NO_SCRIPT.search(source):
        edits = [(len(data), len(data), "\nthrow new Error('this test must fail')\n")]
    for start, end, text in sorted(edits, reverse=True):
        data = data[:start] + text.encode() + data[end:]
    return data.decode() if edits else None


_Edit: TypeAlias = tuple[int, int, str]
"""The range of bytes that is replaced, the new text."""
_NO_SCRIPT = re.compile(rf"\b{_CASES.pattern}\s*\(|\bexports\b|^export\b", re.MULTILINE)
_THROWN = "finally { throw new Error('this test must fail') }"
_FAILING_TAPE = (
    "const assertion = t._assert; "
    "if (assertion) { t._assert = function (ok, options) { return assertion.call(this, false, options) } } "
)
_DROPPED = (
    " struct FailingEnd; impl Drop for FailingEnd { fn drop(&mut self) { "
    'if !std::thread::panicking() { panic!("this test must fail") } } } let _failing_end = FailingEnd;'
)


def _failing_case(node: "Node") -> Iterator[_Edit]:
    call = node.child_by_field_name("function") if node.type == "call_expression" else None
    given = node.child_by_field_name("arguments")
    if call is None or given is None or not _CASES.fullmatch(_text(call)) or not given.named_children:
        return
    function = given.named_children[-1]
    body = function.child_by_field_name("body")
    if function.type not in JAVASCRIPT.functions or body is None:
        return
    # What a test throws does not change the assertions of tape that were reported before.
    given_to = function.child_by_field_name("parameters") or function.child_by_field_name("parameter")
    name = re.fullmatch(r"\(?\s*([A-Za-z_$]\w*)\s*(?:,.*)?\)?", _text(given_to), re.DOTALL) if given_to else None
    begin = _FAILING_TAPE.replace("t.", f"{name[1]}.") if name else ""
    if body.type == "statement_block":
        yield body.start_byte + 1, body.start_byte + 1, f" {begin}try {{"
        yield body.end_byte - 1, body.end_byte - 1, f"}} {_THROWN} "
    else:
        yield body.start_byte, body.start_byte, f"{{ {begin}try {{ return ("
        yield body.end_byte, body.end_byte, f") }} {_THROWN} }}"


def _failing_go(node: "Node") -> Iterator[_Edit]:
    name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
    if node.type != "function_declaration" or name is None or body is None:
        return
    given = re.fullmatch(r"\(\s*(\w+) \*testing\.T\s*\)", _text(node.child_by_field_name("parameters") or node))
    if given and re.match(r"Test(?![a-z])", _text(name)) and given[1] != "_":
        yield body.start_byte + 1, body.start_byte + 1, f" {given[1]}.Fail();"


def _failing_c(node: "Node") -> Iterator[_Edit]:
    called = node.child_by_field_name("function") if node.type == "call_expression" else None
    given = node.child_by_field_name("arguments")
    if called is not None and given is not None and _text(called) == "exit":
        yield given.start_byte, given.end_byte, f"(((void){_text(given)}, 1))"
    declarator = node.child_by_field_name("declarator") if node.type == "function_definition" else None
    body = node.child_by_field_name("body")
    if declarator is None or body is None or not re.match(r"main\s*\(", _text(declarator)):
        return
    for inner in _nodes(body):
        if inner.type == "return_statement" and inner.named_children:
            value = inner.named_children[0]
            yield value.start_byte, value.start_byte, " ((void)("
            yield value.end_byte, value.end_byte, "), 1)"
    yield body.end_byte - 1, body.end_byte - 1, " return 1; "


def _failing_rust(node: "Node") -> Iterator[_Edit]:
    body, attribute = node.child_by_field_name("body"), node.prev_sibling
    if node.type != "function_item" or body is None:
        return
    attributes = []
    while attribute is not None and attribute.type in ("attribute_item", "line_comment"):
        attributes.append(attribute)
        attribute = attribute.prev_sibling
    if not any(re.fullmatch(r"#\[(?:\w+::)?test\]", _text(one)) for one in attributes):
        return
    for one in attributes:
        if re.match(r"#\[\s*should_panic\b", _text(one)):
            yield one.start_byte, one.end_byte, ""
    yield body.start_byte + 1, body.start_byte + 1, _DROPPED


_FAILING: Mapping[str, Callable[["Node"], Iterator[_Edit]]] = {
    JAVASCRIPT.package: _failing_case,
    GO.package: _failing_go,
    C.package: _failing_c,
    RUST.package: _failing_rust,
}


def _nodes(root: "Node") -> Iterator["Node"]:
    pending = [root]
    while pending:
        node = pending.pop()
        yield node
        pending += node.children


def _test_spans(node: "Node", names: Collection[str]) -> Iterator[tuple[int, int]]:
    if node.type in ("function_declaration", "function_item"):
        name, start = node.child_by_field_name("name"), node
        while start.prev_sibling is not None and start.prev_sibling.type == "attribute_item":
            start = start.prev_sibling
        if name is not None and _text(name) in names:
            yield start.start_byte, node.end_byte
    call = node.named_children[0] if node.type == "expression_statement" and node.named_children else None
    if call is not None and call.type == "call_expression":
        function, given = call.child_by_field_name("function"), call.child_by_field_name("arguments")
        first = given.named_children[0] if given is not None and given.named_children else None
        is_case = function is not None and bool(_CASES.fullmatch(_text(function)))
        if is_case and first is not None and _text(first)[1:-1] in names:
            yield node.start_byte, node.end_byte


def _without(data: bytes, spans: Collection[tuple[int, int]]) -> bytes:
    for start, end in sorted(spans, reverse=True):
        data = data[:start] + data[end:]
    return data


def _without_imports(data: bytes, before: bytes) -> bytes:
    """Go refuses imports that nothing uses."""
    spans = []
    for node in _nodes(_parser(GO).parse(data).root_node):
        path = node.child_by_field_name("path") if node.type == "import_spec" else None
        if path is None:
            continue
        alias = node.child_by_field_name("name")
        parts = [part for part in _text(path).strip('"`').split("/") if not re.fullmatch(r"v\d+", part)]
        name = _text(alias) if alias is not None else parts[-1].partition(".")[0].removeprefix("go-")
        used = re.compile(rb"\b" + re.escape(name).encode() + rb"\.")
        if used.search(before) and not used.search(data):
            whole = node.parent if node.parent is not None and node.parent.type == "import_declaration" else node
            spans.append((whole.start_byte, whole.end_byte))
    return _without(data, spans)
