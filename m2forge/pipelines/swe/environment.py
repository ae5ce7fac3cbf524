"""The environment of a candidate, built by rules: its toolchain and what its tests print in, an image and runs of its
tests out.

    toolchain ─▶ environment ─▶ image ─▶ tests ─┐
                     ▲                          │
                     └── what they ask for ◀────┘

Packages are downloaded outside of sandboxes and never run there. Tests run in fresh sandboxes without a network.
"""

import re
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from m2forge.errors import DataError, NotFoundError
from m2forge.pipelines.stage import Rejection
from m2forge.pipelines.swe.action import NO_EDITS, Edits, requirement_name
from m2forge.pipelines.swe.candidate import Candidate
from m2forge.pipelines.swe.toolchains.table import TOOLCHAINS
from m2forge.pipelines.swe.toolchains.toolchain import LOGS, REPORT_PATH, Environment, Outcomes, TestRun, Toolchain
from m2forge.protocols import Command, Outcome, OutcomeReason, Sandbox
from m2forge.records import JsonValue
from m2forge.sandbox.backend import open_sandbox
from m2forge.sandbox.config import SandboxConfig
from m2forge.tasks.folders.folder import write_folder
from m2forge.tasks.folders.suite_tests import REPORT, VARIABLE, parse
from m2forge.tasks.folders.swe_bench import TESTBED, USER
from m2forge.tasks.folders.task_image import TaskImage, task_image

MAX_ROUNDS = 5
"""Images that are built for one candidate before it is given up."""
MAX_REPORT_BYTES = 64 << 20
MAX_MUTANT_S = 60.0


def limit_s(cpu_s: float) -> float:
    """Limit of the tests of a mutant, of which many never end, where those of the sound tree take this CPU time."""
    return min(MAX_MUTANT_S, 10.0 + 10.0 * cpu_s)


@dataclass(frozen=True, slots=True)
class Runner:
    """Builds images and runs tests in them."""

    config: SandboxConfig
    """Backend and limits of sandboxes."""
    base_image: str
    """The image that stands for the Dockerfile's base: a name of the store, or `host`."""
    timeout_s: float
    """Limit of one run of a project's tests."""

    async def version(self, toolchain: Toolchain) -> str:
        """The version of the base image's language: 3.12."""
        async with self.opened(TaskImage(self.base_image)) as sandbox:
            outcome = await sandbox.run(Command(toolchain.version_command, timeout_s=30.0))
        found = re.search(r"\d+(?:\.\d+)+", outcome.stdout.text()) if outcome.is_success else None
        if found is None:
            program, problem = toolchain.version_command[0], outcome.stderr.text()[-300:]
            raise NotFoundError(f"base_image: {self.base_image!r} has no {program}: {problem}")
        return found[0]

    async def image(self, candidate: Candidate, environment: Environment) -> TaskImage:
        """The image of the files that the task folder will have, built once."""
        files = TOOLCHAINS[environment.toolchain].files(candidate.package, candidate.release, environment)
        with tempfile.TemporaryDirectory() as scratch:
            context = Path(scratch) / "environment"
            write_folder(context, files)
            try:
                return await task_image(context, None, self.config, self.base_image)
            except DataError as error:
                raise DataError(str(error).replace(f"{scratch}/", "")) from error

    async def run(
        self, toolchain: Toolchain, image: TaskImage, patches: Sequence[str], targets: Sequence[str]
    ) -> TestRun:
        """Run the tests of targets in a fresh sandbox of the image, after patches were applied."""
        async with self.opened(image) as sandbox:
            for patch in patches:
                done = await apply_patch(sandbox, patch)
                if not done.is_success:
                    return TestRun(problem="a patch does not apply", output=done.stdout.text()[-2000:])
            return await self.run_in(toolchain, sandbox, targets)

    async def run_in(
        self,
        toolchain: Toolchain,
        sandbox: Sandbox,
        targets: Sequence[str],
        *,
        max_failures: int | None = None,
        timeout_s: float | None = None,
    ) -> TestRun:
        """Run the tests of targets in a sandbox as it is."""
        # A run that ends before it writes a report must not be read as the one before it.
        await sandbox.run(Command(("rm", "-f", REPORT_PATH)))
        argv = toolchain.command(targets, max_failures)
        command = Command(argv, {VARIABLE: REPORT_PATH}, merges_stderr=True, timeout_s=timeout_s)
        outcome = await sandbox.run(command)
        await sandbox.kill_all()
        output = outcome.stdout.text()
        if outcome.reason not in (OutcomeReason.EXITED, OutcomeReason.SIGNALLED):
            return TestRun(problem=f"unfinished: {outcome.reason}", output=output[-4000:], cpu_s=outcome.cpu_s)
        with tempfile.TemporaryDirectory() as scratch:
            try:
                await sandbox.download(LOGS, Path(scratch), MAX_REPORT_BYTES)
                report = (Path(scratch) / REPORT).read_bytes()
            except (NotFoundError, DataError, OSError) as error:
                return TestRun(problem=f"no report: {error}", output=output[-20_000:], cpu_s=outcome.cpu_s)
        # Without output of its own, a command has written all of it to the report.
        shown = output or report[-20_000:].decode(errors="replace")
        return read_report(toolchain, report, targets, shown[-20_000:], outcome.cpu_s)

    @asynccontextmanager
    async def opened(self, image: TaskImage) -> AsyncIterator[Sandbox]:
        """A sandbox of the image without a network."""
        sandbox = await open_sandbox(self._sandbox_config(image), env=image.env)
        try:
            yield sandbox
        finally:
            await sandbox.close()

    def _sandbox_config(self, image: TaskImage) -> SandboxConfig:
        own = {
            "image": image.base,
            "layers": (*image.layers, *self.config.layers),
            "workspace": TESTBED,
            "user": f"{USER}:{USER}",
            "network": "none",
            "allow": (),
            "timeout_s": self.timeout_s,
        }
        return SandboxConfig.model_validate(self.config.model_dump() | own)


async def apply_patch(sandbox: Sandbox, patch: str) -> Outcome:
    """Apply a patch to the sandbox's repository."""
    command = ("git", "-c", "safe.directory=*", "apply", "--whitespace=nowarn", "--allow-empty", "-")
    return await sandbox.run(Command(command, stdin=patch.encode(), merges_stderr=True))


def read_report(
    toolchain: Toolchain, report: bytes, targets: Sequence[str], output: str = "", cpu_s: float = 0.0
) -> TestRun:
    """The outcome of every test of the targets that were run."""
    try:
        found = parse(toolchain.report, report, targets)
    except ValueError as error:
        return TestRun(problem=f"no report: {error}", output=output, cpu_s=cpu_s)
    tests = {id: Outcomes(outcome) for id, outcome in found.tests.items()}
    return TestRun(tests, found.messages, output, None if tests else "no test was reported", cpu_s)


@dataclass(frozen=True, slots=True)
class Built:
    environment: Environment
    image: TaskImage
    run: TestRun
    """Tests of the new tree, with the golden patch."""


async def build(candidate: Candidate, runner: Runner, edits: Edits = NO_EDITS) -> Built | Rejection:
    """The environment in which the new tree's tests run, repaired by rules until they ask for nothing more. `edits`:
    what a model changed about their requirements."""
    toolchain, release = candidate.toolchain, candidate.release
    version, asked = "", list[str]()
    for number in range(MAX_ROUNDS):
        try:
            version = version or await runner.version(toolchain)
            environment = toolchain.environment(release, version, asked, edits)
            image = await runner.image(candidate, environment)
        except (NotFoundError, DataError) as error:
            named: list[JsonValue] = [*toolchain.requirements(release, edits), *asked]
            return Rejection("environment", {"problem": str(error), "requirements": named})
        run = await runner.run(toolchain, image, (candidate.patch, candidate.test_patch), candidate.targets)
        asks = toolchain.asks(run, release, environment)
        # Only Python's requirements are edited.
        more = [text for text in asks if not edits.removed or requirement_name(text) not in edits.removed]
        if not more or number == MAX_ROUNDS - 1:
            break
        asked += more
    if run.problem is not None:
        evidence: dict[str, JsonValue] = {"problem": run.problem, "output": run.output[-3000:]}
        evidence |= {"asked": list[JsonValue](asked), "requirements": list[JsonValue](environment.requirements)}
        return Rejection("unfinished" if run.problem.startswith("unfinished") else "no test parsed", evidence)
    return Built(environment, image, run)
