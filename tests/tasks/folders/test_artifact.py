"""What leaves an attempt: declared files, bounded, without links that leave and without what decides how tests run."""

from pathlib import Path

import pytest

from m2forge.sandbox.image import Image
from m2forge.tasks.folders import artifact
from m2forge.tasks.folders.artifact import ArtifactError, check_layer
from m2forge.tasks.folders.task_toml import Artifact


def write(root: Path, *files: str, text: str = "x\n") -> Path:
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def names(layer: Path) -> list[str]:
    return sorted(str(path.relative_to(layer)) for path in layer.rglob("*") if path.is_symlink() or path.is_file())


def test_only_declared_paths_stay(tmp_path: Path) -> None:
    layer = write(tmp_path, "app/a/x", "app/b", "app/a.log", "logs/artifacts/y", "tests/z", "etc/passwd", "bin/sh")
    write(layer, "logs/verifier/reward.txt", "solution/s")
    declared = [Artifact(source="a"), Artifact(source="/tests"), Artifact(source="/app/b")]
    assert check_layer(layer, declared, "/app", Image(())).num_files == 5
    assert names(layer) == ["app/a/x", "app/b", "logs/artifacts/y"]


def test_excluded_names_are_removed(tmp_path: Path) -> None:
    layer = write(tmp_path, "app/x.py", "app/build/y", "app/deep/z.log")
    check_layer(layer, [Artifact(source="/app", exclude=("build", "*.log"))], "/app", Image(()))
    assert names(layer) == ["app/x.py"]


def test_links_that_leave_are_removed(tmp_path: Path) -> None:
    layer = write(tmp_path / "layer", "app/x", "app/sub/y")
    links = {
        "inside": "sub/y",
        "sub/up": "../x",
        "top": ".",
        "absolute": "/app/x",
        "out": "../tests/x",
        "composed": "top/top/../../tests/x",
        "loop": "loop",
    }
    for name, target in links.items():
        (layer / "app" / name).symlink_to(target)
    checked = check_layer(layer, [Artifact(source="/app")], "/app", Image(()))
    assert sorted(checked.left_out) == ["/app/absolute", "/app/composed", "/app/out"]
    assert names(layer) == ["app/inside", "app/loop", "app/sub/up", "app/sub/y", "app/top", "app/x"]


def test_an_artifact_that_is_a_link_is_removed(tmp_path: Path) -> None:
    layer = write(tmp_path / "layer", "app/x")
    (layer / "app" / "answer").symlink_to("x")
    checked = check_layer(layer, [Artifact(source="/app/answer")], "/app", Image(()))
    assert checked.left_out == ["/app/answer"]
    assert names(layer) == []


def test_files_that_decide_how_tests_run_are_removed(tmp_path: Path) -> None:
    planted = ("conftest.py", "sub/conftest.py", "pytest.ini", "sitecustomize.py", "x.pth", "pytest.py", "_pytest/x.py")
    layer = write(tmp_path / "layer", "app/calc.py", *(f"app/{name}" for name in planted))
    write(layer, "app/__pycache__/calc.cpython-311.pyc", "app/own.dist-info/entry_points.txt")
    write(layer, "app/evil.dist-info/entry_points.txt", text="[pytest11]\nevil = evil\n")
    checked = check_layer(layer, [Artifact(source="/app")], "/app", Image(()))
    assert names(layer) == ["app/calc.py", "app/own.dist-info/entry_points.txt"]
    assert "/app/sub/conftest.py" in checked.dropped


def test_a_module_of_the_runner_may_be_the_task(tmp_path: Path) -> None:
    image = Image((write(tmp_path / "image", "app/src/_pytest/runner.py"),))
    layer = write(tmp_path / "layer", "app/src/_pytest/runner.py", "app/_pytest/runner.py")
    check_layer(layer, [Artifact(source="/app")], "/app", image)
    assert names(layer) == ["app/src/_pytest/runner.py"]


@pytest.mark.parametrize(
    ("name", "text", "image_text", "wanted"),
    [
        ("pyproject.toml", '[project]\nname = "a"\n', "", '[project]\nname = "a"\n'),
        ("pyproject.toml", '[tool.pytest.ini_options]\naddopts = "-p evil"\n', "", "[tool]\n"),
        ("pyproject.toml", "[tool]\npytest.ini_options.addopts = 1\n[tool.x]\ny = 2\n", "", "[tool.x]\ny = 2\n"),
        (
            "pyproject.toml",
            "[tool.pytest.ini_options]\na = 1\n",
            "[tool.pytest.ini_options]\nb = 2\n",
            "[tool.pytest.ini_options]\nb = 2\n",
        ),
        ("setup.cfg", "[tool:pytest]\naddopts = -p evil\n[metadata]\nname = a\n", "", "[metadata]\nname = a\n\n"),
        ("tox.ini", "[pytest]\na = 1\n", "[pytest]\na = 1\n", "[pytest]\na = 1\n"),
    ],
)
def test_the_image_configures_pytest(name: str, text: str, image_text: str, wanted: str, tmp_path: Path) -> None:
    image = Image((write(tmp_path / "image", f"app/{name}", text=image_text),))
    layer = write(tmp_path / "layer", f"app/{name}", text=text)
    checked = check_layer(layer, [Artifact(source="/app")], "/app", image)
    assert (layer / "app" / name).read_text() == wanted
    assert bool(checked.dropped) == (text != wanted)


def test_too_many_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = write(tmp_path, "app/a", "app/b", "app/c", text="12345")
    for limit, most in (("MAX_FILES", 3), ("MAX_BYTES", 14)):
        with monkeypatch.context() as patch:
            patch.setattr(artifact, limit, most)
            with pytest.raises(ArtifactError, match="declare what tests need"):
                check_layer(layer, [Artifact(source="/app")], "/app", Image(()))
