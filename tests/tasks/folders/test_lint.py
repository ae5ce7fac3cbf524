"""The lint of task folders: each rule finds its breach, and a folder as this project writes it has none."""

import importlib
import importlib.util
import shutil
from pathlib import Path

import pytest

from m2forge.config import TomlValue
from m2forge.errors import NotFoundError
from m2forge.tasks.folders.lint import Rule, lint
from tests.tasks.folders.scene import IMAGE, files, new_folder, table, write, write_raw

FROM = f"FROM {IMAGE}\n"
SEPARATE: dict[str, TomlValue] = {"environment_mode": "separate"}

CONFIGS: list[tuple[dict[str, TomlValue], Rule, str]] = [
    ({"agnet": {}}, Rule.UNKNOWN_KEY, "agnet: unknown key; did you mean 'agent'?"),
    ({"verifier": SEPARATE | {"environment": {"memry_mb": 1}}}, Rule.UNKNOWN_KEY, "verifier.environment.memry_mb"),
    ({"artifacts": [{"source": "/a", "form": 1}]}, Rule.UNKNOWN_KEY, "artifacts[0].form"),
    ({"agent": {}}, Rule.ROOT_AGENT, "agent.user"),
    ({"agent": {"user": "0:0"}}, Rule.ROOT_AGENT, "agent.user"),
    ({"verifier": {}}, Rule.SHARED_VERIFIER, "verifier.environment_mode"),
    ({"environment": {}}, Rule.NETWORK, "environment.network_mode: public"),
    ({"environment": {"allow_internet": True}}, Rule.DEPRECATED_KEY, "write environment.network_mode"),
    ({"environment": {"network_mode": "no-network", "gpus": 1}}, Rule.UNSUPPORTED, "environment.gpus"),
    ({"artifacts": []}, Rule.NO_ARTIFACTS, "artifacts: none"),
    ({"artifacts": ["/logs"]}, Rule.ARTIFACT_LOG_OVERLAP, "/logs overlaps"),
    ({"artifacts": ["//logs/agent/x"]}, Rule.ARTIFACT_LOG_OVERLAP, "overlaps the logs"),
    ({"artifacts": ["/a/b", "/a"]}, Rule.OVERLAPPING_ARTIFACTS, "/a/b and /a are copied over each other"),
    ({"artifacts": ["/a", {"source": "/b", "destination": "a"}]}, Rule.OVERLAPPING_ARTIFACTS, "/a and /b"),
    (
        {"artifacts": [{"source": "/a", "destination": "logs/artifacts/x"}]},
        Rule.OVERLAPPING_ARTIFACTS,
        "/logs/artifacts",
    ),
    ({"metadata": {}}, Rule.NO_PROVENANCE, "[metadata.m2forge]"),
    ({"environment": {"docker_image": "debian:13"}}, Rule.UNPINNED_IMAGE, "environment.docker_image: debian:13"),
]

TEXTS: list[tuple[dict[str, str], Rule, str]] = [
    ({"environment__Dockerfile": "FROM debian AS one\nFROM one\n"}, Rule.UNPINNED_IMAGE, "FROM: debian"),
    ({"environment__Dockerfile": FROM + "RUN pip install -U \\\n  requests==2.* \n"}, Rule.UNPINNED_PYTHON, "requests"),
    ({"environment__Dockerfile": FROM + 'RUN ["pip3", "install", "toolz"]\n'}, Rule.UNPINNED_PYTHON, "toolz"),
    ({"environment__Dockerfile": FROM + "RUN A=1 /opt/bin/python3.12 -m pip install x\n"}, Rule.UNPINNED_PYTHON, "x"),
    ({"environment__Dockerfile": FROM + "RUN npm install -g left-pad\n"}, Rule.UNPINNED_PACKAGE, "left-pad"),
    ({"environment__Dockerfile": FROM + "COPY ../tests/test.sh /\n"}, Rule.TEST_LEAK, "tests/test.sh"),
    ({"environment__Dockerfile": FROM + "ADD solution /s\n"}, Rule.TEST_LEAK, "solution"),
    ({"environment__copy_dot_sh": files()["tests/test.sh"]}, Rule.TEST_LEAK, "equal to tests/test.sh"),
    (
        {"tests__test_dot_sh": "#!/bin/sh\nuv pip install pytest==8.4.2\necho 1 > reward.txt\n"},
        Rule.RUNTIME_INSTALL,
        "uv",
    ),
    ({"tests__test_dot_sh": "#!/bin/sh\napt-get install -y curl\necho reward\n"}, Rule.RUNTIME_INSTALL, "apt-get"),
    (
        {"tests__test_dot_sh": "#!/bin/sh\nif curl -LsSf https://astral.sh/uv/install.sh | sh; then echo reward; fi\n"},
        Rule.NETWORK_DOWNLOAD,
        "curl",
    ),
    ({"tests__test_dot_sh": "#!/bin/sh\ngit clone git@host.org:a/b\necho reward\n"}, Rule.NETWORK_DOWNLOAD, "git"),
    ({"tests__test_dot_sh": "#!/bin/sh\nexit 0\n"}, Rule.NO_REWARD, "writes no"),
    ({"tests__test_dot_sh": "echo 1 > reward.txt\n"}, Rule.SCRIPT, "no interpreter"),
    ({"tests__test_dot_sh": "#!/bin/sh\r\necho 1 > reward.txt\r\n"}, Rule.SCRIPT, "Windows line ends"),
    ({"solution__solve_dot_sh": ""}, Rule.NO_SOLUTION, "missing"),
    ({"instruction_dot_md": ""}, Rule.INVALID_FILES, "missing"),
    ({"instruction_dot_md": "\n"}, Rule.INVALID_FILES, "empty"),
    ({"tests__test_dot_sh": ""}, Rule.INVALID_FILES, "missing"),
    ({"environment__Dockerfile": ""}, Rule.INVALID_FILES, "missing"),
    ({"environment__docker-compose_dot_yaml": "services: {}\n"}, Rule.COMPOSE_FILE, "not supported"),
]


def test_a_folder_as_we_write_it_has_no_findings(tmp_path: Path) -> None:
    assert lint(write(tmp_path / "task").path) == []


@pytest.mark.parametrize(("changes", "rule", "message"), CONFIGS, ids=[f"{rule}: {text}" for _, rule, text in CONFIGS])
def test_a_breach_in_the_configuration_is_found(
    tmp_path: Path, changes: dict[str, TomlValue], rule: Rule, message: str
) -> None:
    found = lint(new_folder(tmp_path / "task", table() | changes, files()).path)
    assert [rule] == list({finding.rule for finding in found if message in finding.message})
    assert all(finding.path == str(tmp_path / "task" / "task.toml") for finding in found)


@pytest.mark.parametrize(("changes", "rule", "message"), TEXTS, ids=[f"{rule}: {text}" for _, rule, text in TEXTS])
def test_a_breach_in_a_file_is_found(tmp_path: Path, changes: dict[str, str], rule: Rule, message: str) -> None:
    new_folder(tmp_path / "sound", table(), files())
    shutil.rmtree(tmp_path / "sound" / "tests")
    shutil.copytree(tmp_path / "sound", tmp_path / "task")
    for name in ("instruction.md", "environment/Dockerfile", "solution/solve.sh"):
        (tmp_path / "task" / name).unlink()
    texts = files(**changes)
    for name, text in texts.items():
        (tmp_path / "task" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "task" / name).write_bytes(text.encode())
    found = lint(tmp_path / "task")
    assert [rule] == [finding.rule for finding in found], found
    assert message in found[0].message


def test_pinned_packages_and_local_files_are_not_found(tmp_path: Path) -> None:
    commands = (
        "pip install toolz==1.1.0 'x[y]==2 ; python_version > \"3\"'",
        "pip install -r requirements.txt -e . ./package.whl",
        "pip install --upgrade pip",
        "pip install -c pins.txt toolz",
        "pip install git+https://host.org/a.git@" + "a" * 40,
        'echo "pip install toolz"',
        "cat <<EOF\nRUN pip install toolz\nEOF",
    )
    text = FROM + "".join(f"RUN {command}\n" for command in commands) + "# RUN pip install toolz\n"
    assert lint(write(tmp_path / "task", environment__Dockerfile=text).path) == []


def test_a_rule_is_left_out_where_it_is_ignored(tmp_path: Path) -> None:
    given_table = table(agent={}, metadata={"m2forge": {"source": "s"}, "harbor": {"lint": {"ignore": ["root-agent"]}}})
    assert lint(write(tmp_path / "task", given_table).path) == []
    path = write(tmp_path / "other", table(agent={})).path
    assert lint(path, ignore=[Rule.ROOT_AGENT]) == []
    assert [str(finding.rule) for finding in lint(path)] == ["root-agent"]


def test_a_folder_that_cannot_be_read_has_findings(tmp_path: Path) -> None:
    found = lint(write_raw(tmp_path / "bad", "agnet = 1\n[environment]\ncpus = 'x'\n"))
    assert [finding.rule for finding in found] == [Rule.INVALID_CONFIG, Rule.UNKNOWN_KEY]
    assert "environment.cpus" in found[0].message
    (tmp_path / "bad" / "task.toml").write_text("x =")
    assert [finding.rule for finding in lint(tmp_path / "bad")] == [Rule.INVALID_CONFIG]
    (tmp_path / "bad" / "task.toml").unlink()
    assert [finding.rule for finding in lint(tmp_path / "bad")] == [Rule.INVALID_FILES]
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "task.toml").symlink_to("/etc/passwd")
    assert Rule.INVALID_FILES in {finding.rule for finding in lint(tmp_path / "linked")}
    with pytest.raises(NotFoundError):
        lint(tmp_path / "none")


@pytest.mark.skipif(importlib.util.find_spec("harbor") is None, reason="harbor is not installed")
def test_what_the_lint_of_harbor_finds_is_found_here(tmp_path: Path) -> None:
    harbor = importlib.import_module("harbor.lint")
    for index, (changes, _, _) in enumerate(CONFIGS):
        new_folder(tmp_path / f"config-{index}", table() | changes, files())
    for index, (texts, _, _) in enumerate(TEXTS):
        write_raw(tmp_path / f"text-{index}", "[metadata.m2forge]\nsource = 'x'\n", **texts)
    for path in sorted(tmp_path.iterdir()):
        if (path / "environment" / "docker-compose.yaml").exists():
            continue  # Harbor reads compose files by Docker's program.
        theirs = {str(finding.rule) for finding in harbor.lint_task(path)}
        ours = {str(finding.rule) for finding in lint(path)}
        assert theirs <= ours, path
