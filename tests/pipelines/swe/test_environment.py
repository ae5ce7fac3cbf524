"""Environments by rule: requirements, repairs from output, reports of tests."""

import pytest

from m2forge.pipelines.swe.environment import (
    Environment,
    Outcomes,
    TestRun,
    parse_report,
    project_requirements,
    repairs,
)
from tests.pipelines.swe import projects

METADATA = """Metadata-Version: 2.1
Name: sums
Requires-Dist: attrs>=20
Requires-Dist: tomli; python_version < "3"
Requires-Dist: sphinx; extra == "docs"
Requires-Dist: hypothesis; extra == "test"
"""
FILES = {
    "tox.ini": "[testenv]\ndeps =\n    pytest>=7\n    py39: mock\n    -rrequirements.txt\n    {env:X}\n    flake8\n",
    "requirements-test.txt": "# for tests\nfreezegun==1.5 # pinned\n-e .\n",
    "pyproject.toml": '[dependency-groups]\ntests = ["pyyaml", {include-group = "a"}]\n',
}


def test_requirements_come_from_metadata_and_test_settings() -> None:
    runtime, wanted = project_requirements(projects.release(FILES).tree, METADATA)
    assert runtime == ["attrs>=20"]
    assert sorted(wanted) == ["freezegun==1.5", "hypothesis", "mock", "pytest", "pyyaml"]


@pytest.mark.parametrize(
    ("output", "packages"),
    [
        ("ModuleNotFoundError: No module named 'yaml'", ["PyYAML"]),
        ("ModuleNotFoundError: No module named 'foo_bar.baz'", ["foo-bar"]),
        ("ModuleNotFoundError: No module named 'sums.extra'", []),
        ("__main__.py: error: unrecognized arguments: --cov=sums --cov-report=term", ["pytest-cov"]),
        ("E       fixture 'mocker' not found", ["pytest-mock"]),
        ("PytestConfigWarning: Unknown config option: asyncio_mode", ["pytest-asyncio"]),
        ("ERROR: Missing required plugins: pytest-randomly, pytest-env", ["pytest-randomly", "pytest-env"]),
        ("async def functions are not natively supported.", ["pytest-asyncio"]),
        ("ERROR: Missing required plugins: x @ http://localhost/x.zip, -r/etc/passwd, ./x, x.zip", []),
    ],
)
def test_output_asks_for_packages(output: str, packages: list[str]) -> None:
    assert repairs(TestRun(output=output), projects.release(projects.OLD).tree) == packages


def test_pins_are_those_of_the_wheels() -> None:
    environment = Environment((), ("pytest-9.2.0-py3-none-any.whl", "My_Pkg-1.0-py3-none-any.whl"), "3.12")
    assert environment.pins == ["pytest==9.2.0", "my-pkg==1.0"]


def test_a_report_gives_the_ids_of_the_files_that_were_run() -> None:
    report = b"""<testsuites><testsuite>
<testcase classname="tests.test_a.Case" name="test_x[a::b]" file="tests/base.py"/>
<testcase classname="tests.test_a" name="test_y"><failure message="assert 1 == 2">long</failure></testcase>
<testcase classname="tests.test_a" name="test_z"><skipped/></testcase>
<testcase classname="tests.test_a" name="twice"/>
<testcase classname="tests.test_a" name="twice"><error message="teardown"/></testcase>
<testcase classname="" name="tests.test_b"><error message="collection failure">ImportError: no</error></testcase>
</testsuite></testsuites>"""
    run = parse_report(report, "", ["tests/test_a.py", "tests/test_b.py"])
    assert run.problem is None
    assert run.tests == {
        "tests/test_a.py::Case::test_x[a::b]": Outcomes.PASSED,
        "tests/test_a.py::test_y": Outcomes.FAILED,
        "tests/test_a.py::test_z": Outcomes.SKIPPED,
        "tests/test_a.py::twice": Outcomes.FAILED,
    }
    assert run.messages["tests/test_a.py::test_y"] == "assert 1 == 2"
    assert run.messages["tests.test_b"] == "collection failure"


@pytest.mark.parametrize("report", [b"", b"<testsuites/>", b"<!DOCTYPE a [<!ENTITY b 'c'>]><testsuites/>", b"<cut"])
def test_a_report_without_tests_decides_nothing(report: bytes) -> None:
    assert parse_report(report, "", ["tests/test_a.py"]).problem is not None
