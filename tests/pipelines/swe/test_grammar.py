"""Mutants of JavaScript, Go, C and Rust: each is one fault that parses, and what tests cannot see is left alone."""

import importlib
import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.errors import ConfigError
from m2forge.pipelines.swe import grammar
from m2forge.pipelines.swe.mutation import functions, mutations

tree_sitter = pytest.importorskip("tree_sitter")

WRAPPED = {
    "js": "function f(a, b) {{ {} }}\n",
    "go": "package p\n\nfunc f(a, b int) (int, error) {{\n\t{}\n}}\n",
    "c": "int f(int a, int b) {{ {} }}\n",
    "rs": "fn f(a: u8, b: u8) -> u8 {{ {} }}\n",
}
"""A function of each language around a body."""


def mutants(language: str, body: str) -> list[str]:
    source = WRAPPED[language].format(body)
    head, tail = WRAPPED[language].format("\0").split("\0")
    made = [one.apply(source) for one in mutations(f"a.{language}", source)]
    return [mutant.removeprefix(head).removesuffix(tail) for mutant in made if mutant.startswith(head)]


@pytest.mark.parametrize("language", WRAPPED)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a == b", "a != b"),
        ("a < b", "a <= b"),
        ("a >= b", "a > b"),
        ("a + b", "a - b"),
        ("a % b", "a * b"),
        ("a << b", "a >> b"),
        ("a && b", "a || b"),
        ("a || b && a", "a || (b || a)"),
        ("a || b || a", "(a || b) && a"),
        ("a & b", "a | b"),
        ("7", "8"),
        ("0x0f", "0x10"),
        ("1.5", "2.5"),
        ("true", "false"),
        ("g(a, b)", "g(b, a)"),
    ],
)
def test_an_expression_gets_a_fault(language: str, old: str, new: str) -> None:
    form = {"js": "x = {};", "go": "x := {}", "c": "x = {};", "rs": "let x = {};"}[language]
    assert form.format(new) in mutants(language, form.format(old))


@pytest.mark.parametrize(
    ("language", "old", "new"),
    [
        ("js", "x = a === b;", "x = a !== b;"),
        ("js", "x = !a;", "x = !!a;"),
        ("js", "if (a) b();", "if (!(a)) b();"),
        ("js", "return a;", "return undefined;"),
        ("js", "g(a);", ";"),
        ("js", "o.x = a;", ";"),
        ("js", "x += a;", "x -= a;"),
        ("js", "x = /* ä */ new G(a, b);", "x = /* ä */ new G(b, a);"),
        ("go", "x := !a", "x := a"),
        ("go", "if a {\n}", "if !(a) {\n}"),
        ("go", "return a, err", "return 0, err"),
        ("go", "return a, err", "return a, nil"),
        ("go", "g(a)", ""),
        ("go", "o.x = a", ""),
        ("c", "while (a) b();", "while (!(a)) b();"),
        ("c", "return a;", "return 0;"),
        ("c", "p->x = a;", ";"),
        ("c", "x = 10UL;", "x = 11UL;"),
        ("rs", "if a { 1 } else { 2 }", "if !(a) { 1 } else { 2 }"),
        ("rs", "return a;", "return 0;"),
        ("rs", "b; a.len()", "b; 0"),
        ("rs", "let x = 1_000u32;", "let x = 1001u32;"),
        ("rs", "g(a);", ""),
        ("rs", "x.0[1] += a;", "x.0[1] -= a;"),
    ],
)
def test_a_statement_gets_a_fault(language: str, old: str, new: str) -> None:
    assert new in mutants(language, old)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("a.js", "import { a } from 'b';\n"),
        ("a.js", "throw new Error(a + 1);\n"),
        ("a.js", "x = 'a' + b;\n"),
        ("a.js", "i++;\n"),
        ("a.go", "package p\n\ntype T struct {\n\ta [3]int\n}\n"),
        ("a.go", 'package p\n\nfunc f() {\n\tpanic("a" + b)\n}\n'),
        ("a.c", "#if A > 3\n#define B 4\n#endif\n"),
        ("a.c", "struct s { char a[3]; int b : 2; };\nextern char t[10];\n"),
        ("a.c", "void f(void) { assert(a == b); }\n"),
        ("a.rs", "#[cfg(test)]\nmod tests { fn f() { g(a == b); } }\n"),
        ("a.rs", "#[test]\n/// Text.\nfn f() { g(a == b); }\n"),
        ("a.rs", "fn f() { assert_eq!(a + 1, b); x.0; }\n"),
        ("a.rs", "fn f(a: [u8; 3]) { if let Some(x) = y {} }\n"),
        ("a.c", "int f(void) { return 1 + ; }\n"),
        ("a.txt", "a == b\n"),
    ],
)
def test_what_tests_do_not_see_is_left_alone(path: str, source: str) -> None:
    assert mutations(path, source) == []


def test_a_broken_function_leaves_the_others_alone() -> None:
    source = "int f(void) { return 1 + ; }\n\nint g(int a) { return a; }\n"
    assert [one.apply(source).splitlines()[2] for one in mutations("a.c", source)] == ["int g(int a) { return 0; }"]
    assert functions("a.c", source) == [(3, 3), (1, 1)]


def test_lines_are_those_of_the_file() -> None:
    source = "x = 1;\r\ny = 'ä' ; z = 2;\r\nw = 3;\r\n"
    assert {one.line for one in mutations("a.js", source)} == {1, 2, 3}
    assert [one.apply(source) for one in mutations("a.js", source, {2})] == [source.replace("2", "3")]


def test_without_the_grammars_one_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tree_sitter_go", None)
    grammar._parser.cache_clear()
    with pytest.raises(ConfigError, match=r"m2forge\[pipelines\]"):
        mutations("a.go", "package p\n")
    assert mutations("a.py", "x = 1\n")


# -- random programs --------------------------------------------------------------------------------------------------

OPERATORS = ("==", "!=", "<", "<=", ">", ">=", "+", "-", "*", "/", "%", "&", "|", "<<", ">>", "&&", "||")


def write_expression(generator: random.Random, depth: int) -> str:
    """A random expression that all four languages have."""
    match generator.randrange(8) if depth else 0:
        case 1 | 2 | 3:
            left, right = (write_expression(generator, depth - 1) for _ in range(2))
            text = f"{left} {generator.choice(OPERATORS)} {right}"
            return f"({text})" if generator.random() < 0.7 else text
        case 4:
            return f"!({write_expression(generator, depth - 1)})"
        case 5 | 6:
            arguments = [write_expression(generator, depth - 1) for _ in range(generator.randrange(4))]
            return f"{generator.choice(('g', 'o.m'))}({', '.join(arguments)})"
        case 7:
            return f"o.l[{write_expression(generator, depth - 1)}]"
    return generator.choice(("a", "b", "0", "1", "41", "0xff", "2.5", "true", "false", "o.x", '"ä"'))


def write_statement(generator: random.Random, language: str, depth: int) -> str:
    value, end = write_expression(generator, 3), "" if language == "go" else ";"
    match generator.randrange(6) if depth else generator.randrange(4):
        case 0:
            return f"o.x = {value}{end}"
        case 1:
            return f"g({value}){end}"
        case 2:
            return f"return {value}{', nil' if language == 'go' else ''}{end}"
        case 3:
            return f"a {generator.choice(('+=', '-=', '*='))} {value}{end}"
    body = "\n".join(write_statement(generator, language, depth - 1) for _ in range(generator.randrange(1, 3)))
    condition = value if language in ("go", "rs") else f"({value})"
    return f"if {condition} {{\n{body}\n}}"


def leaves(language: str, source: str) -> tuple[list[tuple[str, bytes]], bool]:
    """The tokens of a file, and whether it has a syntax error."""
    package = importlib.import_module(grammar.LANGUAGES[f".{language}"].package)
    root = tree_sitter.Parser(tree_sitter.Language(package.language())).parse(source.encode()).root_node
    found, pending = [], [root]
    while pending:
        node = pending.pop()
        if not node.children:
            found.append((node.type, node.text))
        pending += node.children
    return found, root.has_error


@given(seed=st.integers(0, 2**32), language=st.sampled_from(sorted(WRAPPED)))
def test_every_mutant_parses_and_has_another_tree(seed: int, language: str) -> None:
    generator = random.Random(seed)
    body = "\n".join(write_statement(generator, language, 2) for _ in range(4))
    source = WRAPPED[language].format(body)
    tokens, has_error = leaves(language, source)
    for one in mutations(f"a.{language}", source):
        mutant = one.apply(source)
        own_tokens, has_own_error = leaves(language, mutant)
        assert has_own_error <= has_error
        assert own_tokens != tokens
        assert mutant.encode()[: one.start] == source.encode()[: one.start]
        assert source.encode().count(b"\n", 0, one.start) + 1 == one.line


def test_random_programs_parse_and_have_all_kinds() -> None:
    generator, kinds, num_sound = random.Random(0), dict[str, set[str]](), 0
    for language in WRAPPED:
        for _ in range(20):
            body = "\n".join(write_statement(generator, language, 2) for _ in range(4))
            source = WRAPPED[language].format(body)
            num_sound += not leaves(language, source)[1]
            kinds.setdefault(language, set()).update(one.kind for one in mutations(f"a.{language}", source))
    every = {"compare", "logic", "arithmetic", "constant", "result", "removed", "argument"}
    assert kinds == dict.fromkeys(WRAPPED, every)
    assert num_sound > 60


@pytest.mark.parametrize(
    ("path", "source", "wanted"),
    [
        ("a_test.go", "package a\n\nfunc TestA(t *testing.T) {\n}\n", "{ t.Fail();"),
        ("a_test.go", "package a\n\nfunc Testable(t *testing.T) {\n}\n", None),
        ("tests/a.rs", "#[test]\n#[should_panic]\nfn a() {}\n", "#[test]\n\nfn a() { struct FailingEnd;"),
        ("tests/a.rs", "fn a() {}\n", None),
        ("tests/a.c", "int main(void)\n{\n    return run();\n}\n", "return  ((void)(run()), 1);\n return 1; }"),
        ("tests/a.c", "void check(void) { exit(0); }\n", "exit(((void)(0), 1));"),
        ("tests/a.c", "void check(void) {}\n", None),
        ("test/a.js", "it('adds', async () => { await f() })\n", "{ try { await f() } finally { throw"),
        ("test/a.js", "test('adds', t => t.ok(f()))\n", "try { return (t.ok(f())) } finally { throw"),
        ("test/a.js", "test('adds', (t) => {})\n", "const assertion = t._assert;"),
        ("test/a.js", "assert(f())\n", "assert(f())\n\nthrow new Error("),
        ("test/a.js", "exports.f = 1\n", None),
        ("tests/a.sh", "exit 0\n", None),
    ],
)
def test_every_test_of_a_twin_fails_at_its_end(path: str, source: str, wanted: str | None) -> None:
    found = grammar.failing_tests(path, source)
    assert (found is None) if wanted is None else (found is not None and wanted in found), found
