"""Actions of the build model: what edits they make, and what is refused."""

import pytest

from m2forge.pipelines.swe.action import Edits, apply_action, read_requirement
from m2forge.records import JsonValue


def applied(*actions: JsonValue) -> Edits:
    edits = Edits()
    for action in actions:
        edits = apply_action(edits, action)
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
    assert edits.apply(["foo-bar>=1", "attrs", "mock"]) == ["mock"]
    assert apply_action(edits, {"action": "add", "requirement": "foo.bar"}).removed == ()
    assert apply_action(edits, {"action": "remove", "name": "attrs"}).requirements == ()


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
        *({"action": "set", "variable": name, "value": "-k a"} for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")),
        *({"action": "set", "variable": "A", "value": value} for value in ("a\nRUN x", '"', "$HOME", "`x`", "a" * 300)),
    ],
)
def test_anything_else_is_no_action(action: JsonValue) -> None:
    with pytest.raises(ValueError, match=r"expected|tests need|may not be set"):
        applied(action)
