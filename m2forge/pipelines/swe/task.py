"""Tasks: a candidate with its environment in, a verified task folder out, or a rejection with reason and evidence.

    three runs before, three after ─▶ F2P, P2P ─▶ route ─▶ statement ─▶ mutants ─▶ folder ─▶ oracle 1, nop 0

    F2P     passes in all runs after, and fails or is missing in all runs before
    P2P     passes in all runs
    quarantined     anything that differs between runs of the same tree

A change without F2P whose texts claim a speed-up becomes a task of speed: P2P must pass, and the same tests must take
less CPU time than at the base (`speed_tests`). One whose texts name a refactoring has goals of structure (`goal`),
whose tests are its F2P. One of tests alone becomes a task of writing tests (`testing`). A run that did not finish
decides nothing. Up to `MAX_MUTANTS` mutants of lines that the golden patch adds show whether the tests see the change:
at least `MIN_KILLED` of those that finish must fail a listed test. A task without a single mutable line (data, for
instance) passes this gate.
"""

import asyncio
import random
import re
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

import tomli_w

from m2forge.pipelines.stage import Rejection
from m2forge.pipelines.swe import speed_tests
from m2forge.pipelines.swe.candidate import Candidate, apply_to_tree, names_refactoring, twin_patch
from m2forge.pipelines.swe.environment import Runner, apply_patch, mutant_limit
from m2forge.pipelines.swe.mutation import Mutation, mutant_key, mutations
from m2forge.pipelines.swe.statement import Statement, missing_names
from m2forge.pipelines.swe.toolchains.python import Python
from m2forge.pipelines.swe.toolchains.toolchain import Environment, Outcomes, TestRun, Toolchain
from m2forge.records import JsonValue
from m2forge.tasks.folders import swe_tests
from m2forge.tasks.folders.environment import prepare
from m2forge.tasks.folders.export import folder_name
from m2forge.tasks.folders.folder import CONFIG_NAME, FolderFile, read_folder, write_files
from m2forge.tasks.folders.lint import lint
from m2forge.tasks.folders.swe_bench import record_files
from m2forge.tasks.folders.task_image import TaskImage
from m2forge.tasks.folders.trial import NOP, ORACLE, WANTED, attempt

NUM_RUNS = 3
MAX_MUTANTS = 12
MIN_KILLED = 0.6
MAX_FILE_BYTES = 4 << 20


class Route(StrEnum):
    BUG = "bug"
    FEATURE = "feature"
    PERF = "perf"
    TEST = "test"
    REFACTOR = "refactor"


@dataclass(frozen=True, slots=True)
class Observation:
    """Outcomes of tests before and after the golden patch."""

    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    quarantined: tuple[str, ...]
    messages: Mapping[str, str]
    """Why tests failed before, by id or file."""
    num_failing: int
    """Tests that fail after it too."""
    cpu_s: float = 0.0
    """CPU time of the longest run."""

    @property
    def wanted(self) -> tuple[str, ...]:
        return (*self.fail_to_pass, *self.pass_to_pass)


async def observe(
    candidate: Candidate,
    image: TaskImage,
    runner: Runner,
    known_before: Sequence[TestRun] = (),
    known_after: Sequence[TestRun] = (),
) -> Observation | Rejection:
    """`known_before`, `known_after`: finished runs of the same tests, with the test patch alone and with both."""
    toolchain, targets = candidate.toolchain, candidate.targets
    both = (candidate.patch, candidate.test_patch)
    after = [await runner.run(toolchain, image, both, targets) for _ in range(NUM_RUNS - len(known_after))]
    before = [await runner.run(toolchain, image, both[1:], targets) for _ in range(NUM_RUNS - len(known_before))]
    after, before = [*after, *known_after], [*before, *known_before]
    for run in (*after, *before):
        if run.problem is not None and not (run in before and not run.tests and run.messages):
            return Rejection("unfinished", {"problem": run.problem, "output": run.output[-3000:]})
    found = compare(before, after, allows_no_change=routed_without_change(candidate) is not None)
    return found if isinstance(found, Rejection) else hidden_alone(candidate, found)


def hidden_alone(candidate: Candidate, observation: Observation) -> Observation | Rejection:
    """Without F2P that stand in no test file, or in one that no build file knows before the golden patch: that patch
    brings them, and no other patch would."""
    toolchain = candidate.toolchain
    tree = apply_to_tree(candidate.base, candidate.test_patch)
    tests = {path: file.content.decode(errors="replace") for path, file in tree.items() if toolchain.is_test(path)}
    kept = tuple(
        id
        for id in observation.fail_to_pass
        if (place := toolchain.locate(id, tests)) is not None and toolchain.is_built(place[0], tree)
    )
    if observation.fail_to_pass and not kept:
        evidence: dict[str, JsonValue] = {"by_golden_patch": list[JsonValue](observation.fail_to_pass[:20])}
        return Rejection("no F2P", evidence)
    return replace(observation, fail_to_pass=kept)


def compare(
    before: Sequence[TestRun], after: Sequence[TestRun], *, allows_no_change: bool = False
) -> Observation | Rejection:
    """F2P and P2P of runs before and after a patch. `allows_no_change`: F2P may be empty."""
    ids = sorted({id for run in (*before, *after) for id in run.tests})
    unstable = {id for id in ids for runs in (before, after) if len({run.tests.get(id) for run in runs}) > 1}
    stable = [id for id in ids if id not in unstable and after[0].tests.get(id) is Outcomes.PASSED]
    fails = (None, Outcomes.FAILED)
    fail_to_pass = tuple(id for id in stable if before[0].tests.get(id) in fails)
    pass_to_pass = tuple(id for id in stable if before[0].tests.get(id) is Outcomes.PASSED)
    num_failing = sum(outcome is Outcomes.FAILED for outcome in after[0].tests.values())
    counts: dict[str, JsonValue] = {
        "fail_to_pass": len(fail_to_pass),
        "pass_to_pass": len(pass_to_pass),
        "quarantined": sorted(unstable)[:20],
        "failing_after": [id for id in ids if after[0].tests.get(id) is Outcomes.FAILED][:20],
    }
    if not fail_to_pass and not allows_no_change:
        return Rejection("no F2P", counts)
    if not pass_to_pass:
        return Rejection("no P2P", counts)
    cpu_s = max(run.cpu_s for run in (*before, *after))
    return Observation(fail_to_pass, pass_to_pass, tuple(sorted(unstable)), before[0].messages, num_failing, cpu_s)


# -- route ------------------------------------------------------------------------------------------------------------

_ABSENT = re.compile(r"ImportError|ModuleNotFoundError|AttributeError|unexpected keyword argument|has no attribute")
_FIXES = re.compile(r"\b(?:fix(?:e[sd])?|bug|regression|crash|incorrect|wrong|broken|security|CVE)\b", re.IGNORECASE)
_ADDS = re.compile(r"\b(?:add(?:s|ed)?|new|introduces?|support(?:s|ed)? for|implement(?:s|ed)?|allow(?:s|ed)?)\b", re.I)


_SPEED = re.compile(r"\b(?:faster|speed(?:s|ed)?[ -]?up|performance|optimi[sz]|quadratic|slow)\w*", re.IGNORECASE)


def names_speed(candidate: Candidate) -> bool:
    """Whether what was written about a change says that it makes something faster."""
    return any(_SPEED.search(text.text) for text in candidate.texts)


def routed_without_change(candidate: Candidate) -> Route | None:
    """The route of a candidate that changes no test's outcome, if any. Whether it is faster is measured when the folder
    is verified."""
    if candidate.language != Python.name:
        return None  # Workloads, goals of structure and verification of written tests are made for Python alone.
    if not any(candidate.toolchain.is_source(path) for path in swe_tests.patched_files(candidate.patch)):
        return Route.TEST
    if names_speed(candidate):
        return Route.PERF
    fixes = any(_FIXES.search(text.text) for text in candidate.texts)
    return Route.REFACTOR if names_refactoring(candidate.texts) and not fixes else None


def route(candidate: Candidate, observation: Observation) -> Route:
    """The route of a candidate. A change that makes something possible is a feature."""
    other = routed_without_change(candidate)
    if other is not None and (other is Route.TEST or not observation.fail_to_pass):
        return other
    text = "\n".join(text.text for text in candidate.texts)
    errors = [observation.messages.get(id, "") for id in observation.fail_to_pass]
    num_absent = sum(not error or bool(_ABSENT.search(error)) for error in errors)
    if missing_names(candidate) or num_absent * 2 > len(errors):
        return Route.FEATURE
    return Route.FEATURE if _ADDS.search(text) and not _FIXES.search(text) else Route.BUG


# -- mutants ----------------------------------------------------------------------------------------------------------


def added_lines(patch: str) -> dict[str, set[int]]:
    """Numbers of the lines that a patch adds, by file, as they are after it."""
    found: dict[str, set[int]] = {}
    path, number = "", 0
    for line in patch.splitlines():
        if line.startswith("+++ "):
            path = re.sub(r"^b/|\t.*$", "", line[4:])
        elif match := re.match(r"@@ -\d+(?:,\d+)? \+(\d+)", line):
            number = int(match[1])
        elif line.startswith("+") and path:
            found.setdefault(path, set()).add(number)
            number += 1
        elif line.startswith(" ") or not line:
            number += 1
    return found


@dataclass(frozen=True, slots=True)
class Mutants:
    killed: int
    survived: tuple[str, ...]
    """File, line and kind."""
    undecided: int
    not_run: int = 0

    @property
    def is_enough(self) -> bool:
        return _is_enough(self.killed, len(self.survived))

    @property
    def is_decided(self) -> bool:
        """Whether mutants that have not run cannot change whether enough die."""
        num = len(self.survived)
        return _is_enough(self.killed, num + self.not_run) == _is_enough(self.killed + self.not_run, num)


def _is_enough(killed: int, survived: int) -> bool:
    return not killed + survived or killed >= MIN_KILLED * (killed + survived)


async def run_mutants(
    candidate: Candidate,
    observation: Observation,
    image: TaskImage,
    runner: Runner,
    known: Mapping[str, TestRun] = MappingProxyType({}),
) -> Mutants:
    """Run mutants until it is decided whether enough die. `known`: runs of mutants by `mutant_key`."""
    undone = any(id in observation.messages for id in observation.fail_to_pass)
    async with runner.opened(image) as sandbox:
        for patch in (candidate.patch, candidate.test_patch):
            await apply_patch(sandbox, patch)
        lines = added_lines(candidate.patch)
        sources = {}
        for path in sorted(lines):
            # A version number states nothing that a test could check.
            if candidate.toolchain.is_source(path) and "version" not in path.rpartition("/")[2]:
                sources[path] = (await sandbox.read(path, MAX_FILE_BYTES)).decode(errors="replace")
        chosen = choose_mutants(sources, lines, candidate.id)
        mutants = [(path, mutation, mutation.apply(sources[path])) for path, mutation in chosen]
        free = {
            text: (undone and _undoes(candidate, path, text)) or mutant_key(path, text) in known
            for path, _, text in mutants
        }
        found = Mutants(0, (), 0, len(mutants))
        for path, mutation, text in sorted(mutants, key=lambda one: not free[one[2]]):
            if found.is_decided:
                break
            found = replace(found, not_run=found.not_run - 1)
            if undone and _undoes(candidate, path, text):
                found = replace(found, killed=found.killed + 1)
                continue
            if (run := known.get(mutant_key(path, text))) is None:
                await sandbox.write(path, text.encode())
                run = await runner.run_in(
                    candidate.toolchain,
                    sandbox,
                    ordered_targets(observation),
                    max_failures=observation.num_failing + 1,
                    limit=mutant_limit(observation.cpu_s),
                )
                await sandbox.write(path, sources[path].encode())
            if (run.problem or "").startswith("unfinished") or is_uncompiled(run, observation, candidate.toolchain):
                found = replace(found, undecided=found.undecided + 1)
            elif is_killed(run, observation):
                found = replace(found, killed=found.killed + 1)
            else:
                found = replace(found, survived=(*found.survived, f"{path}:{mutation.line}: {mutation.kind}"))
    return found


def _undoes(candidate: Candidate, path: str, mutant: str) -> bool:
    """Whether a mutant is the tree before the golden patch, whose tests have run."""
    is_alone = swe_tests.patched_files(candidate.patch) == [path]
    return is_alone and path in candidate.base and candidate.base[path].content == mutant.encode()


def choose_mutants(sources: Mapping[str, str], lines: Mapping[str, set[int]], seed: str) -> list[tuple[str, Mutation]]:
    """Up to `MAX_MUTANTS` mutations, spread over lines: a second one of a line only if all lines have one."""
    generator = random.Random(seed)
    by_line: list[list[tuple[str, Mutation]]] = []
    for path, source in sources.items():
        found: dict[int, list[tuple[str, Mutation]]] = {}
        for mutation in mutations(path, source, lines[path]):
            found.setdefault(mutation.line, []).append((path, mutation))
        by_line += found.values()
    for group in by_line:
        generator.shuffle(group)
    generator.shuffle(by_line)
    rounds = max(map(len, by_line), default=0)
    spread = [group[index] for index in range(rounds) for group in by_line if index < len(group)]
    return spread[:MAX_MUTANTS]


def is_killed(run: TestRun, observation: Observation) -> bool:
    """Whether a listed test failed, or its target could not be compiled or imported."""
    if run.problem is not None:
        return True
    wanted = set(observation.wanted)
    targets = {name for id in wanted for name in _names_of_target(id.partition("::")[0])}
    return any(
        (id in wanted and run.tests.get(id) is Outcomes.FAILED) or (id not in run.tests and id in targets)
        for id in run.messages
    )


def is_uncompiled(run: TestRun, observation: Observation, toolchain: Toolchain) -> bool:
    """Whether a compiler has refused a mutant: no test has seen it."""
    has_failed = any(run.tests.get(id) is Outcomes.FAILED for id in observation.wanted)
    return toolchain.is_compiled and not has_failed and is_killed(run, observation)


def _names_of_target(target: str) -> tuple[str, str]:
    """The names under which a report lists a target that could not be compiled; pytest names a file's module."""
    return target, target.removesuffix(".py").replace("/", ".")


def ordered_targets(observation: Observation) -> list[str]:
    """Targets with F2P first, where most mutants die."""
    return list(dict.fromkeys(id.partition("::")[0] for id in observation.wanted))


# -- folders ----------------------------------------------------------------------------------------------------------


def task_files(
    candidate: Candidate,
    environment: Environment,
    observation: Observation,
    statement: Statement,
    kind: Route,
    facts: Mapping[str, JsonValue],
) -> dict[str, FolderFile]:
    """The files of the task folder. `facts`: more provenance."""
    record: dict[str, JsonValue] = {
        "instance_id": candidate.id,
        "repo": f"{candidate.origin.get('kind', 'swe')}/{candidate.package}",
        "base_commit": candidate.base_commit,
        "problem_statement": statement.text,
        "patch": candidate.patch,
        "test_patch": candidate.test_patch,
        "FAIL_TO_PASS": list(observation.fail_to_pass),
        "PASS_TO_PASS": list(observation.pass_to_pass),
        "test_paths": candidate.toolchain.test_path,
    }
    toolchain, targets = candidate.toolchain, ordered_targets(observation)
    if candidate.language != Python.name:
        record |= {"language": candidate.language, "report": toolchain.report}
        record["command"] = list[JsonValue](toolchain.command(targets))
        record["twin_patch"] = twin_patch(candidate)
    if kind is Route.PERF:
        record["workload"] = list[JsonValue](toolchain.workload(targets))
    files = dict(record_files(record))
    if kind is Route.PERF:
        files |= _speed_files(files)
    table = tomllib.loads(files[CONFIG_NAME].content.decode())
    table["task"] = {"name": f"swe/{folder_name(candidate.id)}", "keywords": [str(kind)]}
    table["metadata"]["m2forge"] = {
        "source": "swe",
        "package": candidate.package,
        "domain": "coding",
        "kind": str(kind),
        "licence": candidate.licence,
        "statement": statement.kind,
        "origin": dict(candidate.origin),
        toolchain.name: environment.version,
        "pins": toolchain.pins(environment),
        **facts,
    }
    files[CONFIG_NAME] = FolderFile(tomli_w.dumps(table).encode())
    own = toolchain.files(candidate.package, candidate.release, environment, candidate.targets)
    return files | {f"environment/{name}": file for name, file in own.items()}


def _speed_files(files: Mapping[str, FolderFile]) -> dict[str, FolderFile]:
    """The tests' script with the program that also measures, and that program."""
    path = Path(speed_tests.__file__)
    script = files["tests/test.sh"]
    by_speed = script.content.replace(Path(swe_tests.__file__).name.encode(), path.name.encode())
    return {
        "tests/test.sh": replace(script, content=by_speed),
        f"tests/{path.name}": FolderFile(path.read_bytes()),
    }


async def verify_files(files: Mapping[str, FolderFile], runner: Runner) -> Rejection | None:
    """Run the solution and nothing by this project's own verification, and lint; None if the folder is sound."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "task"
        await asyncio.to_thread(write_files, path, files)
        if findings := await asyncio.to_thread(lint, path):
            shown = [str(finding).replace(f"{path}/", "") for finding in findings]
            return Rejection("lint", {"findings": list[JsonValue](shown[:20])})
        environment = await prepare(read_folder(path), runner.config, runner.base_image)
        for agent in (ORACLE, NOP):
            verdict = await attempt(environment, agent)
            if verdict.perf != WANTED[agent]:
                keys = ("problem", "ended", "exit_status", "sentinel")
                shown_evidence = {key: verdict.evidence.get(key) for key in keys}
                output = str(verdict.evidence.get("stdout", ""))[-3000:]
                return Rejection(f"{agent} verdict", {"perf": verdict.perf, "output": output, **shown_evidence})
    return None
