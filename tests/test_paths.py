"""The reading paths that four files list at their start."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_each_reading_path_lists_files_that_exist_once() -> None:
    """Whether a step runs exactly these files is checked by dev/paths.py itself, which takes a minute."""
    module = runpy.run_path(str(ROOT / "dev" / "paths.py"))
    lists = module["listed"]()
    assert lists.keys() == module["PATHS"].keys()
    for name, files in lists.items():
        assert len(files) == len(set(files)) <= module["MAX_FILES"][name], name
        assert all((ROOT / "m2forge" / file).is_file() for file in files), name
