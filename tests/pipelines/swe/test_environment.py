"""Runs of tests: what reports decide."""

import pytest

from m2forge.pipelines.swe.environment import read_report
from m2forge.pipelines.swe.toolchains.python import Python
from m2forge.pipelines.swe.toolchains.toolchain import Outcomes


def test_a_report_gives_the_ids_of_the_files_that_were_run() -> None:
    report = b"""<testsuites><testsuite>
<testcase classname="tests.test_a.Case" name="test_x[a::b]" file="tests/base.py"/>
<testcase classname="tests.test_a" name="test_y"><failure message="assert 1 == 2">long</failure></testcase>
<testcase classname="tests.test_a" name="test_z"><skipped/></testcase>
<testcase classname="tests.test_a" name="twice"/>
<testcase classname="tests.test_a" name="twice"><error message="teardown"/></testcase>
<testcase classname="" name="tests.test_b"><error message="collection failure">ImportError: no</error></testcase>
</testsuite></testsuites>"""
    run = read_report(Python(), report, ["tests/test_a.py", "tests/test_b.py"])
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
    assert read_report(Python(), report, ["tests/test_a.py"]).problem is not None
