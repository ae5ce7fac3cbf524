"""Go: packages of a module, where tests stand, and what is refused."""

import pytest

from m2forge.errors import DataError
from m2forge.pipelines.swe.action import NO_EDITS
from m2forge.pipelines.swe.toolchains.go import Go
from m2forge.pipelines.swe.toolchains.table import detect
from tests.pipelines.swe import projects

MODULE = "module example.com/sums\n\ngo 1.19\n"
TEST = "package a\n\nfunc TestA(t *testing.T) {}\n"
TREE = projects.release(
    {
        "go.mod": MODULE,
        "a_test.go": TEST,
        "inner/deep/a_test.go": TEST,
        "inner/only.go": "package inner\n",
        "vendor/x/a_test.go": TEST,
        "inner/testdata/a_test.go": TEST,
        "other/go.mod": "module example.com/other\n",
        "other/a_test.go": TEST,
    }
).tree


def test_targets_are_the_packages_with_tests() -> None:
    assert detect(TREE).name == "go"
    assert Go().targets(TREE) == ("example.com/sums", "example.com/sums/inner/deep")


def test_data_of_tests_is_hidden() -> None:
    assert Go().is_test("inner/testdata/input.json")
    assert not Go().is_test("inner/testdata.go")


@pytest.mark.parametrize(
    ("id", "place"),
    [
        ("example.com/sums::TestA/sub", ("a_test.go", "TestA")),
        ("example.com/sums/inner/deep::TestA", ("inner/deep/a_test.go", "TestA")),
        ("example.com/sums::TestB", None),
    ],
)
def test_a_test_stands_in_a_file_of_its_package(id: str, place: tuple[str, str] | None) -> None:
    assert Go().locate(id, {"a_test.go": TEST, "inner/deep/a_test.go": TEST}) == place


def test_packages_of_others_must_be_vendored() -> None:
    required = MODULE + "\nrequire (\n\tgithub.com/a/b v1.2.3\n\tgithub.com/c/d v0.1.0 // indirect\n)\n"
    with pytest.raises(DataError, match=r"github\.com/a/b, and the tree has no vendor"):
        Go().environment(projects.release({"go.mod": required}), "1.19", (), NO_EDITS)
    vendored = projects.release({"go.mod": required, "vendor/modules.txt": ""})
    assert Go().environment(vendored, "1.19", (), NO_EDITS).version == "1.19"
    assert (
        b"-mod=vendor"
        in Go().files("sums", vendored, Go().environment(vendored, "1.19", (), NO_EDITS))["Dockerfile"].content
    )
