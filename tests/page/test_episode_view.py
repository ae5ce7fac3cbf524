"""An episode on the page: its tools, without code of users, and the files of its task, within limits."""

from pathlib import Path

from m2forge.page.episode_view import MAX_FILE_CHARS, MAX_FILES, task_files, tools_of
from m2forge.records import Domain, Task
from m2forge.tasks.catalog import find_family


def test_the_page_imports_no_module_of_a_user(tmp_path: Path) -> None:
    marker = tmp_path / "imported"
    (tmp_path / "my_tasks.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    metadata = {"family": "mine", "source": f"{tmp_path}/my_tasks.py:Mine"}
    assert tools_of(Task("t", Domain.AGENT, "Do it.", 1.0, metadata)) is None
    assert not marker.exists()
    task = find_family("chain").draw(1, 0)
    assert tools_of(task) == find_family("chain").tools(task)


def test_texts_of_a_line_are_shown() -> None:
    found = task_files({"files": {"b.txt": "ß", "a/c.txt": "x" * (MAX_FILE_CHARS + 1)}})
    assert found == [
        {"path": "a/c.txt", "num_bytes": MAX_FILE_CHARS + 1, "text": None},
        {"path": "b.txt", "num_bytes": 2, "text": "ß"},
    ]
    assert task_files({}) == task_files({"files": [1], "folder": "/nowhere"}) == []
    assert len(task_files({"files": {str(index): "" for index in range(MAX_FILES + 1)}})) == MAX_FILES


def test_a_task_folder_is_read_without_following_links(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    folder = tmp_path / "task"
    (folder / "tests").mkdir(parents=True)
    (folder / "tests/test.sh").write_text("exit 0\n")
    (folder / "image.bin").write_bytes(b"\xff\xfe")
    (folder / "link").symlink_to(tmp_path / "secret")
    assert task_files({"folder": str(folder)}) == [
        {"path": "image.bin", "num_bytes": 2, "text": None},
        {"path": "tests/test.sh", "num_bytes": 7, "text": "exit 0\n"},
    ]
