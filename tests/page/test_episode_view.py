"""The tools of an episode on the page, whose process runs no code of users."""

from pathlib import Path

from m2forge.page.episode_view import tools_of
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
