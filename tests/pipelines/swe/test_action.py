"""Actions of the build model: what edits they make, and what is refused."""

import pytest

from m2forge.pipelines.swe.action import NPM, PYPI, Edits, apply_action, read_module, read_requirement, requirement_name
from m2forge.records import JsonValue


def applied(*actions: JsonValue) -> Edits:
    edits = Edits()
    for action in actions:
        edits = apply_action(edits, action, PYPI)
    return edits


def test_later_actions_replace_earlier_ones() -> None:
    edits = applied(
        {"action": "remove", "name": "Foo_Bar"},
        {"action": "add", "requirement": "attrs>=20"},
        {"action": "pin", "requirement": "Attrs==23.1"},
        {"action": "set", "variable": "LANG", "value": "C"},
        {"action": "set", "variable": "LANG", "value": "C.UTF-8"},
    )
    assert edits == Edits(("Attrs==23.1",), ("foo-bar",), ("LANG=C.UTF-8",))
    assert edits.apply(["foo-bar>=1", "attrs", "mock"], requirement_name) == ["mock"]
    assert apply_action(edits, {"action": "add", "requirement": "foo.bar"}, PYPI).removed == ()
    assert apply_action(edits, {"action": "remove", "name": "attrs"}, PYPI).requirements == ()


@pytest.mark.parametrize(
    "text",
    [
        *("", "-r requirements.txt", "--index-url=http://x", "-e .", ".", "./attrs", "../attrs", "/root/attrs"),
        *("attrs @ http://localhost/attrs.whl", "attrs @ file:///root/attrs", "git+https://localhost/attrs"),
        *("attrs.zip", "attrs.tar.gz", "attrs-1.0-py3-none-any.whl", "attrs===1.zip", "attrs; python_version > '3'"),
        *("attrs --pre", "attrs\n-r x", "a" * 300, "attrs>=", "атрс"),
    ],
)
def test_pip_gets_nothing_but_names_and_versions(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        read_requirement(text)


def test_a_requirement_may_have_extras_and_versions() -> None:
    assert read_requirement("Foo[bar]>=1,<2") == "Foo[bar]<2,>=1"


@pytest.mark.parametrize(
    "action",
    [
        *(None, [], "add", {}, {"action": "deselect", "test": "x"}, {"action": "add"}),
        {"action": "add", "requirement": "attrs", "command": "rm -rf /"},
        {"action": "add", "requirement": ["attrs"]},
        {"action": "pin", "requirement": "attrs>=20"},
        {"action": "remove", "name": "pytest"},
        *({"action": "set", "variable": name, "value": "x"} for name in ("PATH", "PYTHONPATH", "LD_PRELOAD", "lang")),
        *({"action": "set", "variable": name, "value": "x"} for name in ("GOFLAGS", "NODE_OPTIONS", "RUSTFLAGS", "CC")),
        *({"action": "set", "variable": name, "value": "-k a"} for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")),
        *({"action": "set", "variable": "A", "value": value} for value in ("a\nRUN x", '"', "$HOME", "`x`", "a" * 300)),
    ],
)
def test_anything_else_is_no_action(action: JsonValue) -> None:
    with pytest.raises(ValueError, match=r"expected|tests need|may not be set"):
        applied(action)


def test_modules_of_npm_are_added_pinned_and_removed() -> None:
    edits = Edits()
    for action in (
        {"action": "add", "requirement": "tape"},
        {"action": "add", "requirement": "@scope/data@^2"},
        {"action": "pin", "requirement": "tape@5.7.1"},
        {"action": "remove", "name": "nyc"},
    ):
        edits = apply_action(edits, action, NPM)
    assert edits == Edits(("@scope/data@^2", "tape@5.7.1"), ("nyc",))
    assert edits.apply(["nyc@1", "@scope/data@1", "mocha@*"], NPM.name_of) == ["mocha@*"]


@pytest.mark.parametrize(
    "text",
    [
        *("", ".", "./x", "../x", "/x", "x/y", "git+https://h/x", "https://h/x.tgz", "x.tgz", "x@file:y", "--prefix=/"),
        *("x@npm:y", "x@github:a/b", "x@latest", "x y", "a" * 300, "@scope"),
    ],
)
def test_npm_gets_nothing_but_names_and_versions(text: str) -> None:
    with pytest.raises(ValueError, match="expected NAME"):
        read_module(text)


def test_without_an_index_only_variables_are_set() -> None:
    flags: JsonValue = {"action": "set", "variable": "CFLAGS", "value": "-std=gnu99 -Wno-error -lm"}
    assert apply_action(Edits(), flags, None).variables == ("CFLAGS=-std=gnu99 -Wno-error -lm",)
    with pytest.raises(ValueError, match=r"with action: set$"):
        apply_action(Edits(), {"action": "add", "requirement": "x"}, None)


@pytest.mark.parametrize("value", ["-DNDEBUG", "-UTEST", "-include x.h", "-Wl,--wrap=main", "x.c", "-B/x"])
def test_options_of_compilers_define_no_macros(value: str) -> None:
    with pytest.raises(ValueError, match="no macros"):
        apply_action(Edits(), {"action": "set", "variable": "CFLAGS", "value": value}, None)
