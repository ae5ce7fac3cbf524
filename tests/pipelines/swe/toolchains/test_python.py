"""Python's environments by rule: requirements, repairs from output, pins."""

import pytest

from m2forge.pipelines.swe.toolchains.python import Python, project_requirements, repairs
from m2forge.pipelines.swe.toolchains.toolchain import Environment, TestRun
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
        ("ERROR: Missing required plugins: x @ http://localhost/x.zip, -r/etc/passwd, ./x, x.zip", []),
        ("async def functions are not natively supported.", ["pytest-asyncio"]),
    ],
)
def test_output_asks_for_packages(output: str, packages: list[str]) -> None:
    assert repairs(TestRun(output=output), projects.release(projects.OLD).tree) == packages


def test_pins_are_those_of_the_wheels() -> None:
    environment = Environment("python", (), ("pytest-9.2.0-py3-none-any.whl", "My_Pkg-1.0-py3-none-any.whl"), "3.12")
    assert Python().pins(environment) == ["pytest==9.2.0", "my-pkg==1.0"]
