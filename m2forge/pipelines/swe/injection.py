"""Bug injection: a release whose tests pass in, candidates with one small fault each out.

A mutation of a source file is tried in a sandbox. It is a bug if tests that passed three times without it fail with it,
and no more than `MAX_BROKEN` of all: a fault that breaks everything teaches nothing. Where the language reports
coverage, only targets that execute the fault run. The candidate's base is the faulty tree without the test functions
that failed; its golden patch undoes the fault, its test patch restores the functions. Both together make the release
again, so the runs after the golden patch are those of the release, and three of them serve all bugs. The run in which
the fault was tried is one of the three before the patch. Faults of one line are mutants of one another's golden patch,
so their runs serve the gate of mutants too.
"""

import ast
import asyncio
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from m2forge.pipelines.stage import Rejection
from m2forge.pipelines.swe import grammar
from m2forge.pipelines.swe.candidate import Candidate, make_candidate
from m2forge.pipelines.swe.environment import MutantLimit, Runner, build, mutant_limit
from m2forge.pipelines.swe.mutation import Mutation, functions, mutant_key, mutations
from m2forge.pipelines.swe.toolchains.table import detect
from m2forge.pipelines.swe.toolchains.toolchain import Coverage, Environment, Outcomes, TestRun, Toolchain
from m2forge.pipelines.swe.tree import Release, Tree
from m2forge.python_source import parse_python
from m2forge.records import JsonValue
from m2forge.tasks.folders.task_image import TaskImage

NUM_RUNS = 3
MAX_BROKEN = 0.5
MAX_TRIES = 4
"""Mutations that are tried per requested bug."""
NUM_SANDBOXES = 3
"""Mutations that are tried at once; which become bugs does not depend on it."""


@dataclass(frozen=True, slots=True)
class Sound:
    """A release with its environment and the tests that always pass."""

    package: str
    release: Release
    licence: str
    toolchain: Toolchain
    environment: Environment
    image: TaskImage
    runs: tuple[TestRun, ...]
    """Three finished runs of all tests."""
    trial_image: TaskImage | None = None
    """The image in which faults are tried; None: `image`."""

    @property
    def passing(self) -> frozenset[str]:
        return frozenset.intersection(*(frozenset(run.passed) for run in self.runs))


async def prepare_release(package: str, release: Release, licence: str, runner: Runner) -> Sound | Rejection:
    toolchain = detect(release.tree)
    targets = toolchain.targets(release.tree)
    if not targets:
        return Rejection("no test file", {"package": package})
    whole = Candidate(
        *(package, package, toolchain.name, {}, release.tree, release.metadata, licence, "", "", "", (), targets, {})
    )
    built = await build(whole, runner)
    if isinstance(built, Rejection):
        return built
    # A test that stands in a source file, or in its documentation, cannot be hidden.
    targets = _targets(places(toolchain, release.tree, sorted(built.run.passed)))
    if not targets:
        return Rejection("no P2P", {"output": built.run.output[-3000:]})
    repeated = await _repeat(toolchain, built.image, targets, NUM_RUNS - 1, runner)
    runs = (restricted(built.run, targets), *repeated)
    if problem := next((run.problem for run in runs if run.problem is not None), None):
        return Rejection("unfinished", {"problem": problem})
    trial_image = await runner.image(replace(whole, targets=targets), toolchain.trial_environment(built.environment))
    sound = Sound(package, release, licence, toolchain, built.environment, built.image, runs, trial_image)
    return sound if sound.passing else Rejection("no P2P", {"output": built.run.output[-3000:]})


@dataclass(frozen=True, slots=True)
class Bug:
    candidate: Candidate
    before: tuple[TestRun, ...]
    """Runs of the candidate's targets in the faulty tree with all tests."""
    after: tuple[TestRun, ...]
    """Runs of the candidate's targets in the release, which is the tree that its patches make."""
    mutants: Mapping[str, TestRun] = field(default_factory=dict)
    """Runs with other faults of the same line, by `mutant_key`."""


async def inject(sound: Sound, num: int, runner: Runner, generator: random.Random) -> list[Bug]:
    """Up to `num` bugs, each with another fault."""
    faults = _faults(sound, generator, num * MAX_TRIES)
    cpu_s = await _longest_run(sound, faults[0][0], runner) if faults else 0.0
    reach = await _measure_reach(sound, runner)
    image = sound.trial_image or sound.image
    waiting, found, tried = iter(enumerate(faults)), dict[int, Bug](), dict[int, TestRun]()

    async def work() -> None:
        for number, (path, mutation) in waiting:
            source = sound.release.tree[path].content.decode()
            targets = _reaching(reach, path, source, mutation)
            if not targets:
                continue
            limit = _limit(cpu_s, [reach[target] for target in targets])
            run = tried[number] = await _try(sound, image, path, mutation.apply(source), targets, runner, limit)
            # Tests that never reach the fault have the same outcomes as in the release.
            others = {id: Outcomes.PASSED for id in sound.passing if id.partition("::")[0] not in targets}
            if (broken := broken_tests(sound.passing, replace(run, tests={**run.tests, **others}))) is not None:
                candidate = await asyncio.to_thread(_candidate, sound, path, mutation, broken)
                if isinstance(candidate, Candidate):
                    # Limits of later runs go by it, and the images of bugs compile what the release's own compiles.
                    run = replace(run, cpu_s=max(run.cpu_s, cpu_s)) if sound.toolchain.is_compiled else run
                    before, *after = (restricted(one, candidate.targets) for one in (run, *sound.runs))
                    found[number] = Bug(candidate, (before,), tuple(after))
            if len(found) >= num:
                return

    await asyncio.gather(*(work() for _ in range(NUM_SANDBOXES)))
    # All faults before the last one were tried, so those that count are the first ones.
    bugs = sorted(found)[:num]
    keys = {number: _key(sound, *faults[number]) for number in tried if number <= max(bugs, default=-1)}
    lines = {number: (faults[number][0], faults[number][1].line) for number in keys}
    return [
        replace(found[bug], mutants={keys[one]: tried[one] for one in keys if one != bug and lines[one] == lines[bug]})
        for bug in bugs
    ]


def _key(sound: Sound, path: str, mutation: Mutation) -> str:
    return mutant_key(path, mutation.apply(sound.release.tree[path].content.decode()))


async def _measure_reach(sound: Sound, runner: Runner) -> dict[str, Coverage | None]:
    """Coverage of the release by target, where the language reports it."""
    targets, slots = _targets(sound.passing), asyncio.Semaphore(NUM_SANDBOXES)

    async def measure(target: str) -> Coverage | None:
        async with slots:
            return await runner.coverage(sound.toolchain, sound.image, target)

    return dict(zip(targets, await asyncio.gather(*map(measure, targets)), strict=True))


def _reaching(reach: Mapping[str, Coverage | None], path: str, source: str, mutation: Mutation) -> tuple[str, ...]:
    """Targets whose tests may execute a fault."""
    return tuple(
        target
        for target, coverage in reach.items()
        if coverage is None or coverage.reaches(path, source, mutation.start, mutation.end)
    )


def _limit(cpu_s: float, reach: Sequence[Coverage | None]) -> MutantLimit:
    """The limit of a run of some targets. `cpu_s`: CPU time of a run of all."""
    known = [coverage.cpu_s for coverage in reach if coverage is not None]
    return mutant_limit(cpu_s if len(known) < len(reach) else min(cpu_s, sum(known)))


async def _longest_run(sound: Sound, path: str, runner: Runner) -> float:
    """CPU time of a run of all tests. Where a compiler has the release's own files in its cache, a run with another
    line end takes as long as one with a fault."""
    runs = sound.runs
    if sound.toolchain.is_compiled:
        text = sound.release.tree[path].content.decode() + "\n"
        runs += (await _try(sound, sound.image, path, text, _targets(sound.passing), runner),)
    return max(run.cpu_s for run in runs)


async def _try(
    sound: Sound,
    image: TaskImage,
    path: str,
    text: str,
    targets: Sequence[str],
    runner: Runner,
    limit: MutantLimit | None = None,
) -> TestRun:
    """Run the tests of targets with another text of one file."""
    async with runner.opened(image) as sandbox:
        await sandbox.write(path, text.encode())
        return await runner.run_in(sound.toolchain, sandbox, targets, limit=limit)


def restricted(run: TestRun, targets: Sequence[str]) -> TestRun:
    """The tests of these targets alone."""
    return replace(run, tests={id: outcome for id, outcome in run.tests.items() if id.partition("::")[0] in targets})


async def _repeat(
    toolchain: Toolchain, image: TaskImage, targets: Sequence[str], num: int, runner: Runner
) -> tuple[TestRun, ...]:
    return tuple(await asyncio.gather(*(runner.run(toolchain, image, (), targets) for _ in range(num))))


def broken_tests(passing: Collection[str], run: TestRun) -> list[str] | None:
    """Tests that a fault breaks; None if it breaks none, too many, or the run decides nothing."""
    if run.problem is not None:
        return None
    broken = sorted(id for id in passing if run.tests.get(id) is Outcomes.FAILED)
    num_gone = sum(id not in run.tests for id in passing)
    return broken if broken and not num_gone and len(broken) <= MAX_BROKEN * len(passing) else None


def _faults(sound: Sound, generator: random.Random, num: int) -> list[tuple[str, Mutation]]:
    """Mutations spread over files and functions: one of each function before a second one of any."""
    groups: list[list[tuple[str, Mutation]]] = []
    for path, file in sorted(sound.release.tree.items()):
        if sound.toolchain.is_source(path) and "version" not in path.rpartition("/")[2]:
            try:
                source = file.content.decode()
            except UnicodeDecodeError:
                continue
            found = mutations(path, source)
            for start, end in functions(path, source):
                group = [(path, mutation) for mutation in found if start <= mutation.line <= end]
                generator.shuffle(group)
                groups += [group] if group else []
    generator.shuffle(groups)
    rounds = max(map(len, groups), default=0)
    return [group[index] for index in range(rounds) for group in groups if index < len(group)][:num]


def _candidate(sound: Sound, path: str, mutation: Mutation, broken: Sequence[str]) -> Candidate | Rejection:
    tree = dict(sound.release.tree)
    tree[path] = replace(tree[path], content=mutation.apply(tree[path].content.decode()).encode())
    located = places(sound.toolchain, sound.release.tree, broken)
    names: dict[str, set[str]] = {}
    for file, function in located.values():
        names.setdefault(file, set()).add(function)
    for file, hidden in names.items():
        pruned = without_tests(file, tree[file].content.decode(errors="surrogateescape"), hidden)
        if pruned is None:
            return Rejection("tests unchanged", {"file": file, "tests": list[JsonValue](sorted(hidden))})
        tree[file] = replace(tree[file], content=pruned.encode(errors="surrogateescape"))
    origin: dict[str, JsonValue] = {
        "kind": "injected",
        "release": sound.release.name,
        "file": path,
        "line": mutation.line,
        "mutation": mutation.kind,
    }
    place = path.rpartition(".")[0].replace("/", "-")
    id = f"{sound.package}-{sound.release.name}-{place}-{mutation.start}-{mutation.kind}"
    old = Release(tree, sound.release.metadata, sound.release.name)
    candidate = make_candidate(id, sound.package, old, sound.release, origin)
    if isinstance(candidate, Rejection):
        return candidate
    # Tests of other targets say nothing about this fault, and make every gate slower.
    return replace(candidate, targets=_targets(located))


def places(toolchain: Toolchain, tree: Tree, ids: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Test files and functions of tests. Tests that stand in source files have none."""
    tests = {path: file.content.decode(errors="replace") for path, file in tree.items() if toolchain.is_test(path)}
    located = {id: toolchain.locate(id, tests) for id in ids}
    return {id: place for id, place in located.items() if place is not None}


def _targets(ids: Collection[str]) -> tuple[str, ...]:
    return tuple(sorted({id.partition("::")[0] for id in ids}))


def without_tests(path: str, source: str, names: Collection[str]) -> str | None:
    """A test file without the tests of these names; None if they cannot be taken out."""
    suffix = PurePosixPath(path).suffix
    if suffix == ".py":
        return without_functions(source, names)
    return grammar.without_tests(path, source, names) if suffix in grammar.LANGUAGES else None


def without_functions(source: str, names: Collection[str]) -> str:
    """A test file without the functions of these names; a class or file stays valid."""
    try:
        tree = parse_python(source)
    except (SyntaxError, ValueError):
        return source
    lines = source.splitlines(keepends=True)
    for owner in ast.walk(tree):
        if not isinstance(owner, ast.Module | ast.ClassDef):
            continue
        functions = [node for node in owner.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        removed = [node for node in functions if node.name in names]
        for number, node in enumerate(removed):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            is_whole = len(removed) == len(owner.body) and number == 0
            indent = " " * node.col_offset
            lines[first - 1 : node.end_lineno] = [f"{indent}pass\n" if is_whole else ""] + [""] * (
                (node.end_lineno or first) - first
            )
    return "".join(lines)
