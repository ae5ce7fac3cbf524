"""The pipeline `swe`: releases, commits, pull requests and injected bugs in, verified task folders out.

    source → candidate → build → repair-N* → reward → consistency → mutants → rewrite* → judge* → verify → write

    candidate     two trees → base, golden patch, test patch; licence; source and tests changed
    build         environment by rules, until the new tree's tests run
    repair-N      with a build model: its N-th action for an environment that rules could not build
    reward        three runs before and after: F2P, P2P, route
    consistency   statement, missing names, leaks
    mutants       faults in the changed lines must be seen by the tests
    rewrite       with a writer: the statement by a model, unless it leaks the patch
    judge         with a judge: statements that contradict the tests or need guessing are rejected
    transform     beside the plain task, others of the same candidate
    testing       of tasks of writing tests: trees that the project's own tests distinguish
    review        of tasks of code review: the change with and without a fault
    balance       half of these tasks get the fault
    verify        lint; the solution has perf 1, an empty attempt perf 0

All stages but the first and the last run the project's code in sandboxes only. Folders are written to `tasks/`.
"""

import json
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from m2forge.errors import DataError, NotFoundError
from m2forge.pipelines.output import WriteFolders
from m2forge.pipelines.stage import (
    Context,
    Item,
    Outcome,
    Passed,
    Pipeline,
    Rejection,
    SetStage,
    Source,
    Stage,
    stamp,
)
from m2forge.pipelines.swe.candidate import Candidate, permissive
from m2forge.pipelines.swe.code_review import Review as CodeReview
from m2forge.pipelines.swe.code_review import find_reviews, review_files
from m2forge.pipelines.swe.config import BuildModelConfig, SweConfig
from m2forge.pipelines.swe.environment import Broken, Built, Runner, build, is_repairable, repair
from m2forge.pipelines.swe.goal import add_goals, goal_statement
from m2forge.pipelines.swe.injection import inject, prepare_release
from m2forge.pipelines.swe.source import (
    Clone,
    debian_candidate,
    named_release,
    normal_name,
    package_version,
    pull_request_candidate,
    read_pull_requests,
    read_release,
    release_files,
    sdist_candidate,
    sdist_path,
)
from m2forge.pipelines.swe.statement import Statement, judge, rewrite, write_statement
from m2forge.pipelines.swe.task import (
    Mutants,
    Observation,
    Route,
    observe,
    route,
    routed_without_change,
    run_mutants,
    task_files,
    verify_files,
)
from m2forge.pipelines.swe.testing import Trees, find_trees, testing_files, testing_statement
from m2forge.pipelines.swe.toolchains.c import without_generated
from m2forge.pipelines.swe.toolchains.python import Python
from m2forge.pipelines.swe.toolchains.toolchain import Environment, Outcomes, TestRun
from m2forge.pipelines.swe.tree import Release, pack_tree, unpack_tree
from m2forge.records import JsonValue
from m2forge.tasks.folders.export import folder_name
from m2forge.tasks.folders.folder import FolderFile
from m2forge.tasks.folders.swe_bench import TEXT_FILES

Data = Mapping[str, JsonValue]


def make_pipeline(config: SweConfig) -> Pipeline:
    runner = Runner(config.sandbox, config.base_image, config.test_timeout_s)
    build_stages = (_Build(runner, config.build_model), *_repairs(config.build_model, runner))
    stages = (
        _Candidates(config, runner),
        *build_stages,
        _Reward(runner, config.routes),
        _Consistency(),
        _Mutants(runner),
    )
    models = ((_Rewrite, config.writer), (_Judge, config.judge))
    reviews = (stage(model) for stage, model in models if model is not None)
    transforms = (_Transform(config.transforms), _Testing(runner), _Review(runner), _Balance())
    last = (_Verify(runner), WriteFolders("tasks", _named_files))
    return Pipeline(_Specs(config), (*stages, *reviews, *transforms, *last))


# -- candidates -------------------------------------------------------------------------------------------------------


class _Specs(Source):
    """One item per release pair, commit, pull request, Debian pair and release to inject bugs into."""

    name = "source"

    def __init__(self, config: SweConfig) -> None:
        self._config = config

    def fingerprint(self) -> str:
        parts = [
            self._config.model_dump_json(
                include={"sdists", "index", "repositories", "debian", "injected", "injected_paths"}
            )
        ]
        for repository in self._config.repositories:
            parts.append(Clone(Path(repository.path), repository.package).commits(1)[0])
            dumps = (repository.pull_requests, repository.issues)
            parts += [_stamp(Path(dump)) for dump in dumps if dump is not None]
        paths = [*(path for pair in self._config.debian for path in pair), *self._config.injected_paths]
        return "\n".join([*parts, *(_stamp(file) for path in paths for file in release_files(Path(path)))])

    def read(self, context: Context) -> Iterator[Item | Rejection]:
        config = self._config
        for text in config.sdists:
            package, old, new = text.split()
            yield Item(f"{normal_name(package)}-{new}", {"reader": "sdist", "package": package, "old": old, "new": new})
        for repository in config.repositories:
            clone = Clone(Path(repository.path), repository.package)
            common: dict[str, JsonValue] = {"path": repository.path, "package": repository.package}
            if repository.pull_requests is None:
                commits = clone.commits(repository.num_commits)
                for commit, base in clone.merged(commits, repository.num_merged):
                    id = f"{repository.package}-{commit[:12]}"
                    yield Item(id, {"reader": "git", **common, "commit": commit, "base": base})
                continue
            issues = None if repository.issues is None else Path(repository.issues)
            for number, record in read_pull_requests(Path(repository.pull_requests), issues):
                id = f"{repository.package}-pull-{number}"
                if isinstance(record, Rejection):
                    yield replace(record, id=id)
                else:
                    yield Item(id, {"reader": "pull request", **common, "record": dict(record)})
        for first, second in config.debian:
            id = "-".join(package_version(Path(second)))
            yield Item(id, {"reader": "debian", "old": first, "new": second})
        for text in config.injected:
            package, version = text.split()
            id = f"{normal_name(package)}-{version}-bugs"
            yield Item(id, {"reader": "injected", "package": package, "new": version})
        for path in config.injected_paths:
            package, version = named_release(Path(path))
            data = {"reader": "injected", "package": package, "new": version, "path": path}
            yield Item(f"{package}-{version}-bugs", data)


def _stamp(path: Path) -> str:
    return f"{path} {stamp(path)}"


class _Sandboxed(Stage):
    runs_in: ClassVar[Literal["main", "threads", "processes"]] = "threads"

    def __init__(self, runner: Runner) -> None:
        self.runner = runner


class _Candidates(_Sandboxed):
    name = "candidate"

    def __init__(self, config: SweConfig, runner: Runner) -> None:
        super().__init__(runner)
        self._config = config

    def process(self, item: Item, context: Context) -> Passed | Rejection:
        data = item.data
        try:
            if data["reader"] == "injected":
                return self._injected(item, context)
            found = self._read(data)
        except (DataError, NotFoundError) as error:
            return Rejection("cannot be read", {"problem": str(error)})
        if isinstance(found, Rejection):
            return found
        kind = routed_without_change(found)
        if (kind is Route.TEST or not found.test_patch) and kind is not None and kind not in self._config.routes:
            return Rejection("route not wanted", {"route": str(kind)})
        return _stored(item.id, found, context)

    def _read(self, data: Data) -> Candidate | Rejection:
        match data["reader"]:
            case "sdist":
                return sdist_candidate(str(data["package"]), str(data["old"]), str(data["new"]), self._config.index)
            case "debian":
                return debian_candidate(Path(str(data["old"])), Path(str(data["new"])))
        clone = Clone(Path(str(data["path"])), str(data["package"]))
        if data["reader"] == "git":
            return clone.candidate(str(data["commit"]), str(data["base"]))
        return pull_request_candidate(clone, cast("Data", data["record"]))

    def _injected(self, item: Item, context: Context) -> Passed | Rejection:
        package, version = str(item.data["package"]), str(item.data["new"])
        local = item.data.get("path")
        path = sdist_path(package, version, self._config.index) if local is None else Path(str(local))
        release = read_release(path)
        release = replace(release, tree=without_generated(release.tree), name=version)
        licence = permissive(release)
        if isinstance(licence, Rejection):
            return licence
        return context.run(self._inject(normal_name(package), release, licence, item, context))

    async def _inject(
        self, package: str, release: Release, licence: str, item: Item, context: Context
    ) -> Passed | Rejection:
        sound = await prepare_release(package, release, licence, self.runner)
        if isinstance(sound, Rejection):
            return sound
        found = await inject(sound, self._config.num_bugs, self.runner, context.random(item))
        if not found:
            return Rejection("no bug", {"problem": "no fault broke some tests and not most"})
        environment = _environment_data(sound.environment)
        return [
            _stored(bug.candidate.id, bug.candidate, context).adding(
                environment=environment,
                before=context.put(_packed_runs(bug.before)),
                after=context.put(_packed_runs(bug.after)),
                known_mutants=context.put(_packed_mutants(bug.mutants)),
            )
            for bug in found
        ]


def _stored(id: str, candidate: Candidate, context: Context) -> Item:
    return Item(id, {"candidate": candidate.to_dict(), "base": context.put(pack_tree(candidate.base))})


def _candidate(item: Item, context: Context) -> Candidate:
    return Candidate.from_dict(cast("Data", item.data["candidate"]), unpack_tree(context.get(item.text("base"))))


# -- gates ------------------------------------------------------------------------------------------------------------


class _Build(_Sandboxed):
    name = "build"

    def __init__(self, runner: Runner, model: BuildModelConfig | None) -> None:
        super().__init__(runner)
        self._model = model

    def process(self, item: Item, context: Context) -> Passed | Rejection:
        if "environment" in item.data:
            return item
        candidate = _candidate(item, context)
        built = context.run(build(candidate, self.runner))
        if isinstance(built, Built):
            return item.adding(environment=_environment_data(built.environment))
        is_repaired = self._model is not None and is_repairable(built, candidate.toolchain)
        return item.adding(repair=Broken.of(built).to_dict()) if is_repaired else built


class _Repair(_Sandboxed):
    """One round. Each is a stage, so that a round's input is stored, and a killed run repeats the same request."""

    def __init__(self, runner: Runner, config: BuildModelConfig, number: int) -> None:
        super().__init__(runner)
        self.name, self._config, self._is_last = f"repair-{number}", config, number == config.max_rounds

    def process(self, item: Item, context: Context) -> Passed | Rejection:
        if "environment" in item.data:
            return item
        broken = Broken.from_dict(cast("Data", item.data["repair"]))
        found = repair(_candidate(item, context), broken, self._config, self.runner, context)
        if isinstance(found, Built):
            return item.adding(environment=_environment_data(found.environment))
        is_over = self._is_last or found.num_tokens > self._config.max_tokens
        return found.rejection() if is_over else item.adding(repair=found.to_dict())


def _repairs(config: BuildModelConfig | None, runner: Runner) -> list[_Repair]:
    return [] if config is None else [_Repair(runner, config, number + 1) for number in range(config.max_rounds)]


class _Reward(_Sandboxed):
    name = "reward"

    def __init__(self, runner: Runner, routes: Collection[str]) -> None:
        super().__init__(runner)
        self._routes = routes

    def process(self, item: Item, context: Context) -> Passed | Rejection:
        candidate = _candidate(item, context)
        known = [_unpacked_runs(context.get(item.text(key))) if key in item.data else [] for key in ("before", "after")]
        found = context.run(self._observe(candidate, _environment(item), *known))
        if isinstance(found, Rejection):
            return found
        kind = route(candidate, found)
        if kind not in self._routes:
            return Rejection("route not wanted", {"route": str(kind)})
        item = item.adding(observation=asdict(found), route=str(kind))
        return self._with_goals(item, candidate, found) if kind is Route.REFACTOR else item

    def _with_goals(self, item: Item, candidate: Candidate, observation: Observation) -> Item | Rejection:
        added = add_goals(candidate)
        if isinstance(added, Rejection):
            return added
        candidate, ids, texts = added
        observation = replace(observation, fail_to_pass=ids)
        return item.adding(candidate=candidate.to_dict(), observation=asdict(observation), goals=list[JsonValue](texts))

    async def _observe(
        self, candidate: Candidate, environment: Environment, before: Sequence[TestRun], after: Sequence[TestRun]
    ) -> Observation | Rejection:
        return await observe(candidate, await self.runner.image(candidate, environment), self.runner, before, after)


class _Consistency(Stage):
    name = "consistency"

    def process(self, item: Item, context: Context) -> Passed | Rejection:
        candidate, observation = _candidate(item, context), _observation(item)
        match Route(item.text("route")):
            case Route.REFACTOR:
                statement = goal_statement(candidate, cast("list[str]", item.data["goals"]))
            case Route.TEST:
                return item.adding(statement=asdict(Statement("", "", ())))  # Its stage writes it.
            case _:
                statement = write_statement(candidate, observation.fail_to_pass, observation.messages)
        return item.adding(statement=asdict(statement))


class _Mutants(_Sandboxed):
    name = "mutants"

    def process(self, item: Item, context: Context) -> Passed | Rejection:
        mutants = context.run(self._run(_candidate(item, context), item, context))
        counts: dict[str, JsonValue] = {
            "killed": mutants.killed,
            "survived": list[JsonValue](mutants.survived),
            "undecided": mutants.undecided,
            "not_run": mutants.not_run,
        }
        return item.adding(mutants=counts) if mutants.is_enough else Rejection("mutants survive", counts)

    async def _run(self, candidate: Candidate, item: Item, context: Context) -> Mutants:
        image = await self.runner.image(candidate, _environment(item))
        known = _unpacked_mutants(context.get(item.text("known_mutants"))) if "known_mutants" in item.data else {}
        return await run_mutants(candidate, _observation(item), image, self.runner, known)


class _Reviewed(Stage):
    runs_in: ClassVar[Literal["main", "threads", "processes"]] = "threads"

    def __init__(self, model: str) -> None:
        self.model = model


_RULED = (Route.REFACTOR, Route.TEST)
"""Routes whose statements name exactly what is verified, by rule."""


class _Rewrite(_Reviewed):
    name = "rewrite"

    def process(self, item: Item, context: Context) -> Passed | Rejection:
        if Route(item.text("route")) in _RULED:
            return item
        seen = _observation(item)
        candidate, before = _candidate(item, context), _statement(item)
        found = rewrite(candidate, before, seen.fail_to_pass, seen.messages, self.model, context)
        return item.adding(statement=asdict(found.statement), writer=found.problem or "used")


class _Judge(_Reviewed):
    name = "judge"

    def process(self, item: Item, context: Context) -> Passed | Rejection:
        if Route(item.text("route")) in _RULED:
            return item
        failing = _observation(item).fail_to_pass
        return judge(_candidate(item, context), _statement(item), failing, self.model, context) or item


# -- transforms -------------------------------------------------------------------------------------------------------


class _Transform(Stage):
    """Adds the items of other tasks of a candidate, each with its name in `transform`."""

    name = "transform"

    def __init__(self, transforms: Sequence[str]) -> None:
        self._transforms = transforms

    def process(self, item: Item, context: Context) -> Passed | Rejection:
        kind = Route(item.text("route"))
        if kind is Route.TEST:
            return item.adding(transform="test")
        is_python = cast("Data", item.data["candidate"])["language"] == Python.name
        if kind not in (Route.BUG, Route.FEATURE) or not is_python:
            return item
        return [item, *(self._transformed(item, name) for name in self._transforms)]

    def _transformed(self, item: Item, name: str) -> Item:
        id = f"{item.id}-{name}"
        return Item(
            id, {**item.data, "candidate": {**cast("Data", item.data["candidate"]), "id": id}, "transform": name}
        )


class _Testing(_Sandboxed):
    name = "testing"

    def process(self, item: Item, context: Context) -> Passed | Rejection:
        if item.data.get("transform") != "test":
            return item
        candidate = _candidate(item, context)
        trees = context.run(self._find(candidate, item))
        if isinstance(trees, Rejection):
            return trees
        statement = testing_statement(candidate, _statement(item), trees)
        stored = context.put(json.dumps(trees.to_dict()).encode())
        return item.adding(statement=asdict(statement), trees=stored)

    async def _find(self, candidate: Candidate, item: Item) -> Trees | Rejection:
        return await find_trees(candidate, await self.runner.image(candidate, _environment(item)), self.runner)


class _Review(_Sandboxed):
    name = "review"

    def process(self, item: Item, context: Context) -> Passed | Rejection:
        if item.data.get("transform") != "review":
            return item
        found = context.run(self._find(_candidate(item, context), item, context))
        if isinstance(found, Rejection):
            return found
        return item.adding(reviews=[context.put(json.dumps(review.to_dict()).encode()) for review in found])

    async def _find(
        self, candidate: Candidate, item: Item, context: Context
    ) -> tuple[CodeReview, CodeReview] | Rejection:
        image = await self.runner.image(candidate, _environment(item))
        kind = Route(item.text("route"))
        return await find_reviews(candidate, _observation(item), kind, image, self.runner, context.random(item))


class _Balance(SetStage):
    """Decides by the run's seed which of two successive reviews gets the fault."""

    name = "balance"

    def process_all(self, items: Iterable[Item], context: Context) -> Iterator[Outcome]:
        number = 0
        for item in items:
            if item.data.get("transform") != "review":
                yield item
                continue
            is_first = random.Random(f"{context.seed} {number // 2}").random() < 0.5
            clean, faulty = cast("list[str]", item.data["reviews"])
            yield item.adding(review=faulty if is_first == (number % 2 == 0) else clean)
            number += 1


class _Verify(_Sandboxed):
    name = "verify"

    def process(self, item: Item, context: Context) -> Passed | Rejection:
        found = context.run(verify_files(_files(item, context), self.runner))
        if found is None or not _is_twin_passing(found):
            return found or item
        # The twin's tests pass with the golden patch, so they say nothing about any other.
        item = item.adding(has_twin=False)
        return context.run(verify_files(_files(item, context), self.runner)) or item


def _is_twin_passing(rejection: Rejection) -> bool:
    sentinel = rejection.evidence.get("sentinel")
    return isinstance(sentinel, Mapping) and bool(sentinel.get("perf"))


def _files(item: Item, context: Context) -> dict[str, FolderFile]:
    facts = {"mutants": item.data["mutants"]}
    found = (_candidate(item, context), _environment(item), _observation(item))
    match item.data.get("transform"):
        case "test":
            return testing_files(*found, _statement(item), json.loads(context.get(item.text("trees"))), facts)
        case "review":
            return review_files(*found, json.loads(context.get(item.text("review"))), facts)
        case _:
            files = task_files(*found, _statement(item), Route(item.text("route")), facts)
            unused = TEXT_FILES["twin_patch"] if "has_twin" in item.data else ""
            return {name: file for name, file in files.items() if name != unused}


def _named_files(item: Item, context: Context) -> tuple[str, Mapping[str, FolderFile]]:
    return folder_name(item.id), _files(item, context)


# -- records in items -------------------------------------------------------------------------------------------------


def _environment_data(environment: Environment) -> dict[str, JsonValue]:
    return asdict(environment)


def _environment(item: Item) -> Environment:
    data = cast("Mapping[str, Any]", item.data["environment"])
    lists = {key: tuple(data[key]) for key in ("requirements", "archives", "variables")}
    return Environment(toolchain=data["toolchain"], version=data["version"], **lists)


def _statement(item: Item) -> Statement:
    data = cast("Mapping[str, Any]", item.data["statement"])
    return Statement(data["text"], data["kind"], tuple(data["names"]))


def _packed_runs(runs: Sequence[TestRun]) -> bytes:
    """Outcomes of runs, without the messages of failing tests."""
    return json.dumps([{"tests": run.tests, "problem": run.problem, "cpu_s": run.cpu_s} for run in runs]).encode()


def _unpacked_runs(data: bytes) -> list[TestRun]:
    return [
        TestRun(
            {id: Outcomes(outcome) for id, outcome in run["tests"].items()}, problem=run["problem"], cpu_s=run["cpu_s"]
        )
        for run in json.loads(data)
    ]


def _packed_mutants(runs: Mapping[str, TestRun]) -> bytes:
    return json.dumps(
        {
            key: {"tests": run.tests, "messages": dict.fromkeys(run.messages, ""), "problem": run.problem}
            for key, run in runs.items()
        }
    ).encode()


def _unpacked_mutants(data: bytes) -> dict[str, TestRun]:
    return {
        key: TestRun(
            {id: Outcomes(outcome) for id, outcome in run["tests"].items()}, run["messages"], problem=run["problem"]
        )
        for key, run in json.loads(data).items()
    }


def _observation(item: Item) -> Observation:
    data = cast("Mapping[str, Any]", item.data["observation"])
    lists = {key: tuple(data[key]) for key in ("fail_to_pass", "pass_to_pass", "quarantined")}
    return Observation(**lists, messages=data["messages"], num_failing=data["num_failing"], cpu_s=data["cpu_s"])
