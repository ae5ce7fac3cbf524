"""Verification of an attempt at a task folder: what the attempt has left in, a verdict out.

    agent's sandbox ─▶ its changed files, checked (`artifact`) ─▶ fresh sandbox with tests/ on top ─▶ rewards, twice

This process is the supervisor: it is outside of every sandbox, starts the tests by the sandbox's PID 1, reads the
rewards after all processes of the sandbox were killed, and decides. No process of the attempt is alive then; tests and
the runner's configuration are the folder's and the image's.

Tested code often runs inside the runner's process, where it can do all that the runner can. So a score above 0 counts
only if sentinels confirm it:

    must fail   the same tests with wrong expectations, their failing twins, in another fresh sandbox
    must pass   in folders of ours, the script itself: it exits with 0 only for a score above 0, and leaves no process
    must fail   a script that exits with a status drawn for this verification
    must pass   a script that computes a text drawn for this verification

A failing twin is a test file whose tests must all fail whatever the tested code does. Tested code that patches the
runner, skips tests, exits early or writes the reward itself makes the twins pass too: they run under the same names, so
that the tested code does not know in which of both sandboxes it runs. In each test function, the expected value of
`assert x == y` and `self.assertEqual(x, y)` becomes an object that equals nothing, so that also a result that claims to
equal everything is found. A test function without such a comparison, or that reaches its end before one, fails at its
end. Comparisons inside `with` and `try` stay as they are, since a test may expect their failure there.

One rule holds for every failure:

    tests ended without rewards, over time, with invalid or forged rewards     perf 0, with evidence
    a sandbox or this process failed                                           retried, then `EngineError`: no verdict
"""

import ast
import asyncio
import json
import math
import os
import posixpath
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from xml.etree import ElementTree

from m2forge.errors import ConfigError, DataError, EngineError, NotFoundError
from m2forge.protocols import Command, Outcome, OutcomeReason, Sandbox
from m2forge.python_source import parse_python
from m2forge.records import JsonValue, Verdict, VerdictReason
from m2forge.sandbox.backend import open_sandbox
from m2forge.sandbox.config import SandboxConfig
from m2forge.sandbox.image import ImageStore, remove_tree
from m2forge.sandbox.namespace import NamespaceSandbox, run_folder
from m2forge.tasks.folders.artifact import (
    MAX_BYTES,
    ArtifactError,
    Artifacts,
    check_layer,
    evidence_of,
    own_layer,
)
from m2forge.tasks.folders.environment import FolderEnvironment, resolved
from m2forge.tasks.folders.folder import TEST_NAME, TaskFolder
from m2forge.tasks.folders.swe_tests import listed
from m2forge.tasks.folders.task_toml import Step, VerifierMode

TESTS, LOGS = "/tests", "/logs/verifier"
REWARD_JSON, REWARD_TEXT, CTRF_REPORT, JUNIT_REPORT = "reward.json", "reward.txt", "ctrf.json", "junit.xml"
MAIN_REWARD = "reward"
MAX_REPORT_BYTES = 4 << 20
"""Limit of what tests may leave in their log folder."""
MAX_STDOUT_CHARACTERS = 20_000
"""Characters of the tests' output in the evidence, from its end."""
MAX_CRITERIA = 1000
NUM_TRIES = 3
"""Verifications of one attempt, if sandboxes fail."""
SENTINEL_S = 10.0


@dataclass(frozen=True, slots=True)
class _Run:
    """The tests have run once."""

    outcome: Outcome
    rewards: Mapping[str, float] = field(default_factory=dict)
    problem: str | None = None
    """Why there are no rewards."""
    tests: Mapping[str, bool] = field(default_factory=dict)
    """Whether each test passed, by the report of the tests; empty without one."""
    sentinel: str | None = None
    """Which sentinel of the shell was not as it must be."""
    num_left: int = 0
    """Processes that were running when the tests had ended."""

    @property
    def perf(self) -> float:
        if self.problem is not None or not self.rewards:
            return 0.0
        others = list(self.rewards.values())
        return self.rewards.get(MAIN_REWARD, sum(others) / len(others))


async def verify_attempt(environment: FolderEnvironment, sandbox: Sandbox, step: Step | None = None) -> Verdict:
    """Verify what an agent has left in its sandbox, which is closed, unless a later step of the task needs it."""
    folder = environment.folder
    await _run_collect_hooks(folder, sandbox, step)
    async with _scratch() as scratch:
        if isinstance(sandbox, NamespaceSandbox):
            layers = await _changed_layers(environment, sandbox, scratch)
        else:
            layers = [await _download_layer(environment, sandbox, step, scratch / "layer")]
        if step is None or step is folder.steps[-1]:
            await sandbox.close()
        return await verify_layers(environment, layers, step)


async def _changed_layers(environment: FolderEnvironment, sandbox: NamespaceSandbox, scratch: Path) -> list[Path]:
    """Copies of the layers that the attempt has added to its image: one, and more if the sandbox is a fork."""
    snapshot = await sandbox.snapshot()  # Processes are stopped while the layer is read.
    config = environment.config
    image = await asyncio.to_thread(ImageStore().stack, (config.image, *config.layers))
    own = snapshot.image.layers[len(image.layers) : -1]
    if snapshot.image.layers[: len(image.layers)] != image.layers:
        raise ConfigError(f"{environment.folder.path}: the sandbox of an attempt must be one of the folder's image")
    copies = [scratch / f"layer-{index}" for index in range(len(own) + 1)]
    for layer, copy in zip(own, copies, strict=False):
        # A fork may still use it. Whiteouts and owners are part of it.
        await asyncio.to_thread(subprocess.run, ["cp", "-a", str(layer), str(copy)], check=True)
    snapshot.layer.rename(copies[-1])
    return copies


async def _download_layer(environment: FolderEnvironment, sandbox: Sandbox, step: Step | None, dest: Path) -> Path:
    """A layer with the declared artifacts, from a backend whose changed files cannot be had as one."""
    task = environment.folder.config
    if task.mode(step) is VerifierMode.SHARED:
        raise ConfigError('sandbox.backend: a shared verifier needs all files of the attempt; set "namespace"')
    if step is None or step is environment.folder.steps[-1]:
        await sandbox.kill_all()
    dest.mkdir()
    dest.chmod(0o755)
    for artifact in task.artifacts_of(step):
        inside = posixpath.normpath(posixpath.join(sandbox.workspace, artifact.source))
        target, received = dest / inside.lstrip("/"), dest.with_name("received")
        try:
            await sandbox.download(inside, received, MAX_BYTES)
        except NotFoundError:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        only = received / target.name
        is_file = only.is_file() and not only.is_symlink() and len(list(received.iterdir())) == 1
        (only if is_file else received).rename(target)
        shutil.rmtree(received, ignore_errors=True)
    own_layer(dest, environment.config.user)
    return dest


async def verify_layers(environment: FolderEnvironment, layers: Sequence[Path], step: Step | None = None) -> Verdict:
    """Verify the files that an attempt has changed, the last layer on top. What is not verified is removed."""
    task = environment.folder.config
    is_shared = task.mode(step) is VerifierMode.SHARED
    declared = None if is_shared else task.artifacts_of(step)
    base = environment.config
    image = await asyncio.to_thread(ImageStore().stack, (base.image, *base.layers))
    try:
        artifacts = [await asyncio.to_thread(check_layer, layer, declared, base.workspace, image) for layer in layers]
    except ArtifactError as error:
        return Verdict(0.0, {"problem": str(error)})
    except OSError as error:
        raise EngineError(f"{environment.folder.path}: an attempt's files cannot be read: {error}") from error
    for number in range(1, NUM_TRIES + 1):
        try:
            return await _Verification(environment, step, artifacts, is_shared=is_shared).verify()
        except (EngineError, OSError) as error:
            if number == NUM_TRIES:
                raise EngineError(f"{environment.folder.path}: verification failed {number} times: {error}") from error
    raise AssertionError


class _Verification:
    def __init__(
        self, environment: FolderEnvironment, step: Step | None, artifacts: Sequence[Artifacts], *, is_shared: bool
    ) -> None:
        self._environment, self._step, self._artifacts = environment, step, artifacts
        self._folder, self._is_shared = environment.folder, is_shared
        self._timeout_s = environment.folder.config.verifier.timeout_sec
        if step is not None and "timeout_sec" in step.verifier.model_fields_set:
            self._timeout_s = step.verifier.timeout_sec

    async def verify(self) -> Verdict:
        async with _scratch() as scratch:
            real = await self._run(scratch / "tests", is_twin=False)
            problem = real.problem or real.sentinel or self._inconsistency(real)
            twin: _Run | None = None
            if problem is None and real.perf > 0 and _twins(self._folder, self._step):
                twin = await self._run(scratch / "twin", is_twin=True)
        return self._judge(real, twin, problem)

    def _judge(self, real: _Run, twin: _Run | None, problem: str | None) -> Verdict:
        if problem is None and twin is not None:
            is_ours = self._folder.provenance.source is not None
            # A foreign script may also reward what its tests do not see.
            if twin.perf >= real.perf or (is_ours and twin.perf > 0):
                problem = f"tests with wrong expectations have a score of {twin.perf:g}: the result is forged"
        perf = 0.0 if problem is not None else real.perf
        evidence: dict[str, JsonValue] = {
            "stdout": real.outcome.stdout.text()[-MAX_STDOUT_CHARACTERS:],
            "exit_status": real.outcome.status,
            "ended": str(real.outcome.reason),
            "seconds": round(real.outcome.finished_s - real.outcome.started_s, 3),
            "rewards": dict(real.rewards),
            "artifacts": evidence_of(self._artifacts),
        }
        if problem is not None:
            evidence["problem"] = problem
        if twin is not None:
            evidence["sentinel"] = {
                "perf": twin.perf,
                "exit_status": twin.outcome.status,
                "ended": str(twin.outcome.reason),
            }
        elif perf > 0:
            evidence["sentinel"] = "none: no test file from which failing tests can be made"
        if self._is_shared:
            evidence["notice"] = "shared verifier: tests ran over all files that the attempt left, not over artifacts"
        reason = VerdictReason.LIMIT if real.outcome.reason is OutcomeReason.TIMEOUT else VerdictReason.JUDGED
        scores = {name: float(passed) for name, passed in real.tests.items()} or dict(real.rewards)
        criteria = dict(list(scores.items())[:MAX_CRITERIA])
        return Verdict(perf, evidence, reason, criteria)

    def _inconsistency(self, real: _Run) -> str | None:
        """Why a score may not be the tests' own, in a folder of ours: tested code may write the rewards at any moment,
        but it cannot choose the script's exit status, and a process that is alive at the end may have written last."""
        if real.perf == 0 or self._folder.provenance.source is None:
            return None
        if real.outcome.status != 0:
            return f"a score of {real.perf:g}, but the tests' script exited with {real.outcome.status}"
        if real.num_left:
            return f"the tests left {real.num_left} processes running, which could write the reward"
        if real.perf < 1 or not real.tests:
            return None
        wanted = [name for _, source in _test_sources(self._folder, self._step) for name in names_of_tests(source)]
        failed = {_function_name(name) for name, is_passed in real.tests.items() if not is_passed}
        if not_passed := [name for name in wanted if name in failed]:
            return f"a full score, but {not_passed[0]} did not pass"
        passed = {_function_name(name) for name, is_passed in real.tests.items() if is_passed}
        if missing := [name for name in wanted if name not in passed]:
            return f"a full score, but {missing[0]} did not run"
        return None

    async def _run(self, tests: Path, *, is_twin: bool) -> _Run:
        nonce = secrets.token_hex(8)
        status = secrets.randbelow(90) + 10
        await asyncio.to_thread(self._write_tests, tests, nonce, status, is_twin)
        config = self._environment.verifier_config(self._step)
        layers = (*config.layers, *(str(checked.layer) for checked in self._artifacts), str(tests))
        config = SandboxConfig.model_validate(config.model_dump() | {"layers": layers})
        sandbox = await open_sandbox(config, env=self._environment.env)
        try:
            outcome = await sandbox.run(
                Command(
                    (f"{TESTS}/{TEST_NAME}",),
                    env=self._variables(),
                    timeout_s=self._timeout_s,
                    merges_stderr=True,
                )
            )
            num_left = await sandbox.kill_all()
            run = await self._read(sandbox, outcome, tests.with_name(f"{tests.name}-logs"))
            sentinel = await _shell_problem(sandbox, nonce, status) if run.perf > 0 and not is_twin else None
            return replace(run, sentinel=sentinel, num_left=num_left)
        finally:
            await sandbox.close()

    def _variables(self) -> dict[str, str]:
        own = self._folder.config.verifier.env | (self._step.verifier.env if self._step is not None else {})
        # Modules of the user's home come before the runner's own.
        return {"HOME": "/tmp", "PYTHONNOUSERSITE": "1", **resolved(own, self._folder)}

    def _write_tests(self, layer: Path, nonce: str, status: int, is_twin: bool) -> None:
        """A layer with the folder's tests, or their twins, two sentinels and an empty log folder."""
        target = layer / TESTS.lstrip("/")
        target.mkdir(parents=True)
        for source in self._folder.tests(self._step):
            shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
        (target / TWIN_NAME).unlink(missing_ok=True)
        if is_twin:
            for name, text in _twins(self._folder, self._step).items():
                (target / name).unlink()
                (target / name).write_text(text, encoding="utf-8")
        sentinels = target / f".{nonce}"
        sentinels.mkdir()
        (sentinels / "fail.sh").write_text(f"exit {status}\n")
        (sentinels / "pass.sh").write_text(f'text={nonce}\n[ "${{#text}}" = {len(nonce)} ] && echo "$text"\n')
        for path in (target, *target.rglob("*")):
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() or path.suffix == ".sh" else path.stat().st_mode & 0o755 | 0o444)
        logs = layer / LOGS.lstrip("/")
        logs.mkdir(parents=True)
        own_layer(layer, "0:0")
        layer.chmod(0o755)
        logs.chmod(0o777)

    async def _read(self, sandbox: Sandbox, outcome: Outcome, dest: Path) -> _Run:
        match outcome.reason:
            case OutcomeReason.TIMEOUT:
                return _Run(outcome, problem=f"tests ran longer than {self._timeout_s:g} s")
            case OutcomeReason.EXITED | OutcomeReason.SIGNALLED:
                pass
            case _:
                return _Run(outcome, problem=f"tests ended: {outcome.reason}")
        try:
            await sandbox.download(LOGS, dest, MAX_REPORT_BYTES)
        except NotFoundError:
            return _Run(outcome, problem=f"tests removed {LOGS}")
        except DataError as error:
            return _Run(outcome, problem=f"{LOGS}: {error}")
        try:
            return _Run(outcome, read_rewards(dest), None, read_report(dest))
        except DataError as error:
            return _Run(outcome, problem=str(error))


async def _run_collect_hooks(folder: TaskFolder, sandbox: Sandbox, step: Step | None) -> None:
    """Commands of the folder that write artifacts before the attempt's processes end; a failed one writes none."""
    hooks = [*folder.config.verifier.collect, *(step.verifier.collect if step is not None else ())]
    for hook in hooks:
        user = None if hook.user is None else str(hook.user)
        await sandbox.run(Command(("/bin/sh", "-c", hook.command), timeout_s=hook.timeout_sec, user=user))


async def _shell_problem(sandbox: Sandbox, nonce: str, status: int) -> str | None:
    """Run the sentinels of the shell where the tests have run."""
    for name, wanted, text in (("fail.sh", status, ""), ("pass.sh", 0, f"{nonce}\n")):
        script = f"{TESTS}/.{nonce}/{name}"
        outcome = await sandbox.run(Command(("/bin/sh", script), timeout_s=SENTINEL_S))
        if (outcome.status, outcome.stdout.text()) != (wanted, text):
            return f"{script} must exit with {wanted}, and exited with {outcome.status}: the shell is not the image's"
    return None


@asynccontextmanager
async def _scratch() -> AsyncIterator[Path]:
    folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="verify-", dir=run_folder()))
    try:
        yield folder
    finally:
        await asyncio.to_thread(remove_tree, folder)


# -- tests that must fail ---------------------------------------------------------------------------------------------


def _test_sources(folder: TaskFolder, step: Step | None) -> Iterator[tuple[str, str]]:
    """Path in /tests and text of every Python file of the tests."""
    found: dict[str, Path] = {}
    for tests in folder.tests(step):
        found |= {str(path.relative_to(tests)): path for path in sorted(tests.rglob("*.py")) if path.is_file()}
    for name, path in found.items():
        yield name, path.read_text(encoding="utf-8", errors="replace")


def _twins(folder: TaskFolder, step: Step | None) -> dict[str, str]:
    """The files of the tests that differ in the failing twin, by path in /tests."""
    twins = {name: twin for name, source in _test_sources(folder, step) if (twin := failing_twin(source)) is not None}
    for tests in folder.tests(step):
        if (check := _failing_check(tests / CHECK_NAME)) is not None:
            twins[CHECK_NAME] = check
        twins |= _failing_instance(tests)
    return twins


CHECK_NAME = "check.json"
"""The check of an exported folder (`tasks/answer.py`)."""
INSTANCE_NAME, PATCH_NAME, TWIN_NAME = "instance.json", "test.patch", "twin.patch"
"""The tests of a record of SWE-bench (`tasks/folders/swe_tests.py`, `suite_tests.py`). Tested code sees the failing
twin's patch under the name of the real one alone."""
_FAILING_FILE = """diff --git a/{path} b/{path}
new file mode 100644
--- /dev/null
+++ b/{path}
@@ -0,0 +1,2 @@
+def {name}():
+    assert {number} == {number} + 1
"""


def _failing_check(path: Path) -> str | None:
    """A check whose command runs and then fails; other checks run no code of the attempt."""
    try:
        check = json.loads(path.read_text(encoding="utf-8"))
        command = check["command"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return json.dumps(check | {"command": ["sh", "-c", '"$0" "$@"; exit 1', *command]})


def _failing_instance(tests: Path) -> dict[str, str]:
    """The twin's patch that the folder has; else, for pytest, a record with one more test that must pass, and a file in
    which it fails."""
    try:
        if (tests / TWIN_NAME).is_file():
            return {PATCH_NAME: (tests / TWIN_NAME).read_text(encoding="utf-8")}
        instance = json.loads((tests / INSTANCE_NAME).read_text(encoding="utf-8"))
        patch = (tests / PATCH_NAME).read_text(encoding="utf-8")
        if "report" in instance:
            return {}  # A suite of another language finds no test in a file of Python.
        wanted = listed(instance["FAIL_TO_PASS"])
        # A task of speed has no test that must fail before.
        first = [*wanted, *listed(instance.get("PASS_TO_PASS", []))][0]
        folder = posixpath.dirname(first.partition("::")[0])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return {}
    number = secrets.randbelow(1 << 30)
    name = f"test_{number}"
    path = posixpath.join(folder, f"{name}.py")
    text = _FAILING_FILE.format(path=path, name=name, number=number)
    instance["FAIL_TO_PASS"] = [*wanted, f"{path}::{name}"]
    return {INSTANCE_NAME: json.dumps(instance), PATCH_NAME: patch.rstrip("\n") + "\n" + text}


_HEAD = """
class {prefix}Other:
    __hash__ = None
    def __eq__(self, other):
        return False
    def __ne__(self, other):
        return True
{prefix}count = [0]
def {prefix}other():
    {prefix}count[0] += 1
    return {prefix}Other()
def {prefix}end(begin):
    if {prefix}count[0] == begin:
        raise AssertionError
"""


def names_of_tests(source: str) -> list[str]:
    """Names of the test functions of a file, in order; none if it is not Python."""
    try:
        return [function.name for function in _test_functions(parse_python(source))]
    except (SyntaxError, ValueError):
        return []


def failing_twin(source: str) -> str | None:
    """The twin of a test file; None if it has no test function."""
    try:
        tree = parse_python(source)
    except (SyntaxError, ValueError):
        return None
    functions = _test_functions(tree)
    if not functions:
        return None
    prefix = f"_{secrets.choice('abcdefghijklmnop')}{secrets.token_hex(3)}_"
    for function in functions:
        _turn(function, prefix)
    num_first = _num_leading(tree)
    tree.body[num_first:num_first] = parse_python(_HEAD.format(prefix=prefix)).body
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def _test_functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    found: list[ast.FunctionDef | ast.AsyncFunctionDef] = []
    places: list[ast.Module | ast.ClassDef] = [tree]
    while places:
        for node in places.pop(0).body:
            if isinstance(node, ast.ClassDef):
                places.append(node)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
                found.append(node)
    return found


def _num_leading(tree: ast.Module) -> int:
    """Statements that must stay first: the docstring and imports from the future."""
    num = 0
    for node in tree.body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_docstring and not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            break
        num += 1
    return num


def _turn(function: ast.FunctionDef | ast.AsyncFunctionDef, prefix: str) -> None:
    begin = parse_python(f"{prefix}begin = {prefix}count[0]").body
    turner = _Turner(prefix)
    body = [turned for node in function.body for turned in turner.turn(node)]
    function.body = [*begin, *body, *turner.end()]


class _Turner(ast.NodeTransformer):
    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def turn(self, node: ast.stmt) -> list[ast.stmt]:
        turned = self.visit(node)
        return turned if isinstance(turned, list) else [turned]

    def end(self) -> list[ast.stmt]:
        return parse_python(f"{self._prefix}end({self._prefix}begin)").body

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        if isinstance(node.test, ast.Compare) and isinstance(node.test.ops[-1], ast.Eq):
            node.test.comparators[-1] = self._other()
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        match node.value:
            case ast.Call(func=ast.Attribute(attr="assertEqual"), args=[_, _, *_]):
                node.value.args[1] = self._other()
        return node

    def visit_Return(self, node: ast.Return) -> list[ast.stmt]:
        return [*self.end(), node]

    def visit_With(self, node: ast.With) -> ast.stmt:
        return node

    def visit_AsyncWith(self, node: ast.AsyncWith) -> ast.stmt:
        return node

    def visit_Try(self, node: ast.Try) -> ast.stmt:
        return node

    def visit_TryStar(self, node: ast.TryStar) -> ast.stmt:
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.stmt:
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.stmt:
        return node

    def _other(self) -> ast.expr:
        return ast.Call(ast.Name(f"{self._prefix}other", ast.Load()), [], [])


# -- what tests leave -------------------------------------------------------------------------------------------------


def read_rewards(logs: Path) -> dict[str, float]:
    """The rewards that tests have written, each from 0 to 1."""
    try:
        if (logs / REWARD_JSON).is_file():
            found = json.loads(_text(logs / REWARD_JSON))
            rewards = found if isinstance(found, dict) else {MAIN_REWARD: found}
        elif (logs / REWARD_TEXT).is_file():
            rewards = {MAIN_REWARD: float(_text(logs / REWARD_TEXT))}
        else:
            raise DataError(f"tests ended without {LOGS}/{REWARD_TEXT} and {REWARD_JSON}")
    except (ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"the rewards cannot be read: {str(error)[:200]}") from error
    for name, value in rewards.items():
        if not isinstance(value, int | float) or not math.isfinite(value) or not 0 <= value <= 1:
            raise DataError(f"expected rewards from 0 to 1, received {name[:80]!r}: {str(value)[:80]}")
    if not rewards:
        raise DataError("expected rewards, received none")
    return {name: float(value) for name, value in rewards.items()}


def read_report(logs: Path) -> dict[str, bool]:
    """Whether each test passed, by a report in CTRF or JUnit's form; empty without one that can be read."""
    try:
        if (logs / CTRF_REPORT).is_file():
            tests = json.loads(_text(logs / CTRF_REPORT))["results"]["tests"]
            return {str(test["name"]): test["status"] == "passed" for test in tests}
        if (logs / JUNIT_REPORT).is_file():
            return _read_junit(_text(logs / JUNIT_REPORT))
    except (ValueError, KeyError, TypeError, RecursionError, ElementTree.ParseError):
        pass
    return {}


def _read_junit(text: str) -> dict[str, bool]:
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        return {}  # Entities expand without bound.
    tests = {}
    for case in ElementTree.fromstring(text).iter("testcase"):
        name = "::".join(filter(None, (case.get("classname"), case.get("name"))))
        tests[name] = not any(case.find(kind) is not None for kind in ("failure", "error", "skipped"))
    return tests


def _function_name(name: str) -> str:
    return name.rpartition("::")[2].partition("[")[0].rpartition(".")[2]


def _text(path: Path) -> str:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        return file.read().decode()
