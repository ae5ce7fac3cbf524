"""Task folders: what is read, what is refused, and that nothing is lost when one is written again."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.config import TomlValue
from m2forge.errors import DataError, ExistsError, NotFoundError
from m2forge.tasks.folders.folder import (
    FileKind,
    FolderFile,
    read_files,
    read_folder,
    read_folders,
    unsupported,
    write_folder,
)
from m2forge.tasks.folders.task_toml import NetworkMode, VerifierMode
from tests.tasks.folders.scene import files, table, write, write_raw

NAMES = st.text("abcxyz-_. é", min_size=1, max_size=8).filter(
    lambda name: name.strip() and name not in (".", "..", ".git")
)
FILES = st.dictionaries(
    st.lists(NAMES, min_size=1, max_size=3).map("/".join),
    st.builds(FolderFile, st.binary(max_size=40), st.sampled_from([FileKind.FILE, FileKind.EXECUTABLE])),
    max_size=6,
)
VALUES: st.SearchStrategy[TomlValue] = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=9)
    | st.datetimes(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
UNKNOWN = st.dictionaries(st.text(max_size=6).map("x-".__add__), VALUES, max_size=4)


@given(FILES)
def test_written_files_are_read_again_byte_for_byte(found: dict[str, FolderFile]) -> None:
    # A file cannot be a folder of another.
    found = {
        name: file
        for name, file in found.items()
        if not any(f"{name}/" in f"{other}/" for other in found if other != name)
    }
    found |= {"empty": FolderFile(b"", FileKind.FOLDER)} if not any(name.startswith("empty") for name in found) else {}
    with TemporaryDirectory() as scratch:
        write_folder(Path(scratch) / "one", found)
        assert read_files(Path(scratch) / "one") == found
        write_folder(Path(scratch) / "two", read_files(Path(scratch) / "one"))
        assert read_files(Path(scratch) / "two") == found


@given(UNKNOWN, UNKNOWN)
def test_unknown_keys_are_kept(outer: dict[str, TomlValue], inner: dict[str, TomlValue]) -> None:
    with TemporaryDirectory() as scratch:
        given_table = table(environment={"network_mode": "no-network", **inner}) | outer
        folder = write(Path(scratch) / "one", given_table)
        assert folder.table == given_table


def test_an_unchanged_folder_is_copied_with_its_comments(tmp_path: Path) -> None:
    text = "# why\nversion = '1.0'\n[environment]\nmemory = '2G'  # old\n[verifier.environment]\nstorage = '512M'\n"
    folder = read_folder(write_raw(tmp_path / "one", text, environment__data_dot_bin="\0\1"))
    (tmp_path / "one" / "environment" / "link").symlink_to("data.bin")
    write_folder(tmp_path / "two", read_files(folder.path))
    assert (tmp_path / "two" / "task.toml").read_text() == text
    assert read_files(tmp_path / "two") == read_files(tmp_path / "one")
    assert read_folder(tmp_path / "two").digest() == folder.digest()
    with pytest.raises(ExistsError):
        write_folder(tmp_path / "two", read_files(folder.path))


def test_deprecated_keys_are_read_under_their_new_names(tmp_path: Path) -> None:
    text = """version = "1.0"
[environment]
memory = "2G"
storage = "512M"
allow_internet = false
[verifier]
[verifier.environment]
allow_internet = true
[[steps]]
name = "one"
[steps.verifier.environment]
memory = "1024K"
"""
    folder = read_folder(write_raw(tmp_path / "old", text, steps__one__instruction_dot_md="Do it.\n"))
    config = folder.config
    assert config.schema_version == "1.0"
    assert (config.environment.memory_mb, config.environment.storage_mb) == (2048, 512)
    assert config.environment.network is NetworkMode.NO_NETWORK
    assert config.verifier.environment is not None
    assert config.verifier.environment.network is NetworkMode.PUBLIC
    inner = folder.steps[0].verifier.environment
    assert inner is not None
    assert inner.memory_mb == 1


@pytest.mark.parametrize("version", ["1.0", "1.1", "1.2", "1.3", "1.4"])
def test_every_schema_version_is_read(tmp_path: Path, version: str) -> None:
    assert write(tmp_path / "task", table(schema_version=version)).config.schema_version == version


def test_the_mode_of_a_verifier_is_inherited_by_steps(tmp_path: Path) -> None:
    def mode(verifier: dict[str, TomlValue], step: dict[str, TomlValue]) -> VerifierMode:
        given_table = table(verifier=verifier, steps=[{"name": "one", "verifier": step, "artifacts": ["/out"]}])
        dest = tmp_path / str(len(list(tmp_path.iterdir())))
        folder = write(dest, given_table, steps__one__instruction_dot_md="Do it.\n")
        assert [item.source for item in folder.config.artifacts_of(folder.steps[0])] == [
            "/workspace/answer.txt",
            "/out",
        ]
        return folder.config.mode(folder.steps[0])

    assert mode({}, {}) is VerifierMode.SHARED
    assert mode({"environment_mode": "separate"}, {}) is VerifierMode.SEPARATE
    assert mode({"environment_mode": "separate"}, {"environment_mode": "shared"}) is VerifierMode.SHARED
    assert mode({"environment": {}}, {}) is VerifierMode.SEPARATE
    assert mode({}, {"environment": {}}) is VerifierMode.SEPARATE


BROKEN: list[tuple[str, dict[str, str], str]] = [
    ("schema_version = '2.0'", {}, "task.toml: schema_version: expected '1.0', '1.1', '1.2', '1.3' or '1.4'"),
    ("[environment]\ncpus = 'many'", {}, "task.toml: environment.cpus: .*received 'many'"),
    ("[environment]\nmemory = '2 pounds'", {}, "task.toml: environment.memory: expected a size"),
    ("[environment]\nmemory = '2G'\nmemory_mb = 7", {}, "task.toml: environment: memory = '2G' is 2048 MB, and"),
    ("[environment]\nallowed_hosts = ['a.b']", {}, "task.toml: .*allowed_hosts: needs network_mode"),
    ("[agent]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['http://a.b']", {}, "agent.*expected a host"),
    ("[verifier]\nenvironment_mode = 'shared'\n[verifier.environment]", {}, "verifier.*'shared' has no environment"),
    ("artifacts = [{ source = '/a/../b' }]", {}, "artifacts.0: source: expected a path without '..'"),
    ("artifacts = [{ source = '/a', destination = '/b' }]", {}, "destination: expected a relative path"),
    ("[task]\nname = 'lonely'", {}, "task.toml: task.name: expected ORG/NAME, received 'lonely'"),
    ("[[steps]]\nname = 'a/b'", {}, "steps.0.name: expected the name of a folder"),
    ("[[steps]]\nname = 'a'\n[[steps]]\nname = 'A'", {}, "steps: expected each name once, received 'A' again"),
    ("[[steps]]\nname = 'gone'", {}, "steps/gone/instruction.md: missing"),
    ("[metadata]\nm2forge = 3", {}, "task.toml: metadata.m2forge: expected a table"),
    ("[metadata.m2forge]\ndomain = 'cooking'", {}, "metadata.m2forge: domain: expected 'reasoning'"),
    ("x = ", {}, "task.toml: not valid TOML"),
    ("", {"instruction_dot_md": " \n"}, "instruction.md: empty"),
    ("", {"instruction_dot_md": "<!-- canary 1 -->\n\n"}, "instruction.md: empty"),
    ("", {"tests__test_dot_sh": ""}, "tests/test.sh: missing"),
    ("", {"environment__Dockerfile": ""}, "environment: missing"),
    ("", {"environment__docker-compose_dot_yaml": "services:"}, "environment/docker-compose.yaml: compose files"),
    ("", {"tests__compose_dot_yml": "services:"}, "tests/compose.yml: compose files"),
]


@pytest.mark.parametrize(("toml", "changes", "problem"), BROKEN, ids=[problem for _, _, problem in BROKEN])
def test_a_broken_folder_is_one_message_with_its_place(
    tmp_path: Path, toml: str, changes: dict[str, str], problem: str
) -> None:
    with pytest.raises(DataError, match=problem) as caught:
        read_folder(write_raw(tmp_path / "task", toml, **changes))
    assert str(tmp_path / "task") in str(caught.value)


def test_reading_many_folders_goes_on_after_a_broken_one(tmp_path: Path) -> None:
    write(tmp_path / "set" / "good")
    write(tmp_path / "set" / "inner" / "better")
    write_raw(tmp_path / "set" / "bad", "[environment]\ncpus = -1")
    (tmp_path / "set" / "half").mkdir()
    (tmp_path / "set" / "half" / "instruction.md").write_text("Do it.")
    (tmp_path / "set" / ".hidden").mkdir()
    folders, rejected = read_folders(tmp_path / "set")
    assert [folder.path.name for folder in folders] == ["good", "better"]
    assert [item.path.name for item in rejected] == ["bad", "half"]
    assert "environment.cpus" in rejected[0].problem
    assert "half/task.toml: missing" in rejected[1].problem
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "none"):
        with pytest.raises(NotFoundError):
            read_folders(path)


@pytest.mark.parametrize("target", ["/etc/passwd", "../../secret", "missing", "link"])
def test_a_link_out_of_a_folder_is_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "secret").write_text("key")
    path = write(tmp_path / "task").path
    (path / "environment" / "link").symlink_to(target)
    with pytest.raises(DataError, match="environment/link: a link"):
        read_folder(path)
    with pytest.raises(DataError, match="inside the folder"):
        write_folder(tmp_path / "other", {"../secret": FolderFile(b"")})


def test_an_instruction_that_links_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("key")
    path = write(tmp_path / "task").path
    (path / "instruction.md").unlink()
    (path / "instruction.md").symlink_to("../secret")
    with pytest.raises(DataError, match="leads out"):
        read_folder(path)


def test_canary_lines_do_not_reach_the_agent(tmp_path: Path) -> None:
    text = "<!-- harbor-canary GUID 1 -->\n# CANARY 2\n\nDo it.\n# canary of yours\n"
    assert write(tmp_path / "task", instruction_dot_md=text).instruction() == "Do it.\n# canary of yours\n"


def test_what_is_not_offered_is_named(tmp_path: Path) -> None:
    given_table = table(
        environment={"os": "Windows", "gpus": 1, "mcp_servers": [{"name": "m", "url": "http://a"}]},
        artifacts=[{"source": "/data", "service": "db"}],
    )
    folder = write(tmp_path / "task", given_table, trajectory_dot_json="{}")
    assert unsupported(folder) == [
        "environment.os",
        "environment.gpus",
        "environment.mcp_servers",
        "artifacts: service 'db'",
        "trajectory.json",
    ]
    assert unsupported(write(tmp_path / "plain")) == []


def test_a_folder_whose_verifier_image_has_tests_needs_none(tmp_path: Path) -> None:
    given_table = table(verifier={"environment": {"docker_image": "tests"}})
    folder = write(tmp_path / "task", given_table, tests__test_dot_sh="")
    assert folder.has_bundled_tests()
    other = write(tmp_path / "other", tests__Dockerfile="FROM scratch\n", tests__test_dot_sh="")
    assert other.verifier_dockerfile() == other.path / "tests" / "Dockerfile"
    assert set(files()) > {"instruction.md"}
