"""Bugs in small functions of real packages: pinned sdists in, a task file and demonstrations out.

    python -m examples.bug_tasks DEST [--packages examples/bugs/packages.txt] [--seed 0] [--jobs 2]

    DEST/bugs.jsonl             tasks for `m2forge rl`, those of some packages held out
    DEST/demonstrations.jsonl   trajectories of training tasks for `m2forge sft`
    DEST/summary.json           packages, functions, kinds of bugs, and why packages and functions were left out

A function of 4 to 15 lines is taken if it uses only the builtins, a few modules of the standard library and constants
of its module, and if arguments are found for which it returns values. Its file is the function as `ast.unparse` prints
it, one statement a line, without comments and docstring, after the imports and constants it uses. A bug is a mutation
(`m2forge/pipelines/swe/mutation.py`) that changes one line of the file and the result of some of the calls.

The demonstrator reads and tests, then edits and tests until the tests pass. Each edit is right with probability
`RIGHT_SHARE`; else it is another mutation of the file, which does not pass. After `MAX_WRONG` wrong edits it is right.

Code of packages runs in `namespace` sandboxes alone.
"""

import argparse
import ast
import asyncio
import builtins
import hashlib
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from examples.bug_agent import CHECK, CODE, TESTS, TOOLS, edit, first_messages, number_lines
from m2forge.errors import EngineError, M2ForgeError
from m2forge.files import write_atomic
from m2forge.pipelines.stage import Rejection
from m2forge.pipelines.swe.candidate import permissive
from m2forge.pipelines.swe.mutation import mutations
from m2forge.pipelines.swe.source import read_archive, sdist_path
from m2forge.pipelines.swe.toolchains.python import Python
from m2forge.pipelines.swe.tree import Release
from m2forge.protocols import Command, Sandbox
from m2forge.records import JsonValue
from m2forge.sandbox.backend import open_sandbox
from m2forge.sandbox.config import SandboxConfig

BUGS = Path(__file__).parent / "bugs"
NUM_HELD_OUT = 400
NUM_LINES = (4, 15)
MAX_FILE_LINES, MAX_LINE = 20, 100
MAX_CALLS, NUM_SHOWN, NUM_FAILING = 16, 4, 2
"""Examples of a function; those in the agent's tests, and how many of these fail where others pass."""
MAX_BUGS = 6
"""Bugs of one function."""
MAX_HELD_OUT_SHARE, MIN_LIMIT = 0.1, 8
"""Share of the held-out tasks that one package may have; so many it may always have."""
MAX_PACKAGE_FUNCTIONS = 150
RIGHT_SHARE, MAX_WRONG = 0.5, 3
NUM_DEMONSTRATIONS = 3000
NUM_JOBS = 2
"""Processes that read packages, and sandboxes that run their code."""
_MODULES = (
    "math re itertools functools collections string operator datetime decimal fractions bisect heapq textwrap "
    "unicodedata json struct statistics copy html base64 binascii hashlib zlib colorsys calendar cmath numbers typing "
    "urllib.parse collections.abc"
)
_FORBIDDEN = (
    "open exec eval compile input print __import__ globals locals vars breakpoint exit quit help id hash dir super "
    "delattr setattr memoryview __file__ __name__ __doc__"
)
MODULES, FORBIDDEN = frozenset(_MODULES.split()), frozenset(_FORBIDDEN.split())
"""Modules that functions may use, and builtins that they may not: these act on the process or differ between runs."""
BUILTINS = frozenset(dir(builtins)) - FORBIDDEN
KINDS = (
    "int",
    "float",
    "str",
    "bool",
    "none",
    "bytes",
    "ints",
    "floats",
    "strs",
    "tuple",
    "lists",
    "pairs",
    "dict",
    "set",
)
HINTS: Mapping[str, tuple[str, ...]] = {
    "n k i j m num count size length len index width height year month day hour minute second digits bits base p q":
        ("int",),
    "x y z a b c t u v r d lat lon alpha beta value val t1 t2 h s": ("int", "float"),
    "s string text word name line str sep prefix suffix path url key char source target s1 s2 string1 string2":
        ("str",),
    "iterable seq sequence items lst l arr array list values xs nums numbers data elements it iterator iterables":
        ("ints", "strs", "floats"),
    "matrix grid rows table lists": ("lists", "pairs"),
    "dict mapping dct obj graph dictionary kwargs params options": ("dict",),
    "func f fn function pred predicate callback key_func callable": ("function",),
    "bytes buf buffer b": ("bytes",),
    "rgb point vector coords pair color p1 p2 vec": ("tuple",),
}  # fmt: skip
"""Names of parameters, and the kinds of their values that are tried more often."""
ANNOTATED: Mapping[str, tuple[str, ...]] = {
    "int": ("int",),
    "float": ("float", "int"),
    "str": ("str",),
    "bool": ("bool",),
    "bytes": ("bytes",),
    "iter": ("ints", "strs"),
    "sequence": ("ints", "strs"),
    "list": ("ints", "strs", "floats"),
    "tuple": ("tuple",),
    "dict": ("dict",),
    "mapping": ("dict",),
    "callable": ("function",),
}
HINT_WEIGHT = 5
NO_RESULT = "nothing: the code did not end, or ended its process"
"""As `bugs/check.py` says it."""


@dataclass(frozen=True)
class Function:
    package: str
    name: str
    source: str
    """Its file."""
    kinds: tuple[tuple[str, ...], ...]
    """Kinds of values of each parameter; repeated where they are likelier."""
    num_required: int

    @property
    def key(self) -> str:
        """Equal for copies of a function in several packages."""
        tree = ast.parse(self.source)
        node = next(node for node in tree.body if isinstance(node, ast.FunctionDef))
        return ast.dump(ast.Module(node.body, []))


@dataclass(frozen=True)
class Bug:
    function: Function
    kind: str
    source: str
    """The file with the bug."""
    line: int
    """The line that differs, from 1."""
    right: str
    """That line without the bug."""
    shown: tuple[tuple[str, str], ...]
    """Examples in the agent's tests: call and result."""
    hidden: tuple[tuple[str, str], ...]

    @property
    def instruction(self) -> str:
        return f"The tests of {self.function.name} ({self.function.package}) fail. Repair code.py."

    @property
    def id(self) -> str:
        digest = hashlib.blake2b(self.source.encode(), digest_size=4).hexdigest()
        return f"{self.function.package}-{self.function.name}-{self.kind}-{digest}"

    def task(self, split: str, check: str) -> dict[str, JsonValue]:
        """A line of the task file."""
        hidden = {"hidden.json": json.dumps(self.hidden), CHECK: check}
        verifier: dict[str, JsonValue] = {
            "command": ["python3", "-I", "-S", CHECK, "hidden.json", "--once"],
            "files": hidden,
            "timeout_s": 10.0,
        }
        repaired = edit(self.source, self.line, self.right)
        assert repaired is not None
        return {
            "id": self.id,
            "instruction": self.instruction,
            "files": {CODE: self.source, TESTS: json.dumps(self.shown), CHECK: check},
            "domain": "coding",
            "split": split,
            "reference": "repaired",
            "reference_files": {CODE: repaired},
            "verifier": verifier,
        }


# -- functions --------------------------------------------------------------------------------------------------------


def functions(package: str, release: Release) -> Iterator[Function]:
    """Functions that may be taken, each with the imports and constants it uses."""
    toolchain = Python()
    for path, file in sorted(release.tree.items()):
        if not (path.endswith(".py") and toolchain.is_source(path)):
            continue
        try:
            tree = ast.parse(file.content)
        except (SyntaxError, ValueError, RecursionError):
            continue
        heads = _heads(tree)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and (found := _function(package, node, heads)) is not None:
                yield found


def _heads(tree: ast.Module) -> dict[str, str]:
    """Statements that define a name outside of functions, where a task's file may hold them."""
    heads: dict[str, str] = {}
    for node in tree.body:
        match node:
            case ast.Import(names=names):
                heads |= {
                    alias.asname or alias.name: ast.unparse(ast.Import([alias]))
                    for alias in names
                    if alias.name in MODULES and ("." not in alias.name or alias.asname)
                }
            case ast.ImportFrom(module=str(module), names=names, level=0) if module in MODULES:
                heads |= {
                    alias.asname or alias.name: ast.unparse(ast.ImportFrom(module, [alias], 0))
                    for alias in names
                    if alias.name != "*"
                }
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if _is_constant(value):
                heads[name] = ast.unparse(node)
    return heads


def _is_constant(value: ast.expr) -> bool:
    match value:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr="compile"), args=args, keywords=[]):
            return all(isinstance(arg, ast.Constant) for arg in args)
    try:
        ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _function(package: str, node: ast.FunctionDef, heads: Mapping[str, str]) -> Function | None:
    args = node.args
    if node.decorator_list or any(default is None for default in args.kw_defaults):
        return None
    if any(isinstance(inner, ast.Global | ast.Await | ast.Import | ast.ImportFrom) for inner in ast.walk(node)):
        return None
    parameters = [*args.posonlyargs, *args.args]
    if not parameters or parameters[0].arg in ("self", "cls"):
        return None
    kinds = tuple(_kinds(parameter) for parameter in parameters)
    plain = _plain(node)
    used = _free_names(plain) - {node.name}
    needed = sorted(name for name in used if name in heads)
    if used - BUILTINS - set(needed):
        return None
    heading = list(dict.fromkeys(heads[name] for name in needed))
    if any("re.compile" in line for line in heading):
        heading = list(dict.fromkeys(["import re", *heading]))
    heading.sort(key=lambda line: not line.startswith(("import", "from")))
    body = ast.unparse(plain)
    lines = [*heading, *body.splitlines()]
    is_short = len(lines) <= MAX_FILE_LINES and all(len(line) <= MAX_LINE and line.isascii() for line in lines)
    if not is_short or not NUM_LINES[0] <= len(body.splitlines()) <= NUM_LINES[1]:
        return None
    return Function(package, node.name, "\n".join(lines) + "\n", kinds, len(parameters) - len(args.defaults))


def _plain(node: ast.FunctionDef) -> ast.FunctionDef:
    """The function without docstrings and annotations."""
    plain = ast.parse(ast.unparse(node)).body[0]
    assert isinstance(plain, ast.FunctionDef)
    for inner in ast.walk(plain):
        if isinstance(inner, ast.FunctionDef):
            inner.returns = None
            if ast.get_docstring(inner, clean=False) is not None:
                inner.body = inner.body[1:] or [ast.Pass()]
        if isinstance(inner, ast.arg):
            inner.annotation = None
    return plain


def _free_names(node: ast.FunctionDef) -> set[str]:
    bound = {inner.arg for inner in ast.walk(node) if isinstance(inner, ast.arg)}
    bound |= {inner.name for inner in ast.walk(node) if isinstance(inner, ast.FunctionDef) and inner is not node}
    names = [inner for inner in ast.walk(node) if isinstance(inner, ast.Name)]
    bound |= {inner.id for inner in names if not isinstance(inner.ctx, ast.Load)}
    bound |= {inner.name for inner in ast.walk(node) if isinstance(inner, ast.ExceptHandler) and inner.name}
    return {inner.id for inner in names} - bound


def _kinds(parameter: ast.arg) -> tuple[str, ...]:
    hints: list[str] = []
    if parameter.annotation is not None:
        text = ast.unparse(parameter.annotation).lower()
        hints = [kind for word, kinds in ANNOTATED.items() if word in text for kind in kinds]
    if not hints:
        name = parameter.arg.lower().strip("_")
        hints = [kind for words, kinds in HINTS.items() if name in words.split() for kind in kinds]
    return (*KINDS, *(hints * HINT_WEIGHT))


# -- bugs -------------------------------------------------------------------------------------------------------------


class Lab:
    """Runs code of packages in sandboxes: jobs of `bugs/search.py` in, their results out, in order."""

    def __init__(self, num_sandboxes: int) -> None:
        self._num = num_sandboxes

    def run(self, jobs: Sequence[dict[str, JsonValue]]) -> list[JsonValue]:
        return asyncio.run(self._run(jobs)) if jobs else []

    async def _run(self, jobs: Sequence[dict[str, JsonValue]]) -> list[JsonValue]:
        parts = [jobs[start :: self._num] for start in range(self._num)]
        results = await asyncio.gather(*(self._work(part) for part in parts))
        return [results[index % self._num][index // self._num] for index in range(len(jobs))]

    async def _work(self, jobs: Sequence[dict[str, JsonValue]]) -> list[JsonValue]:
        config = SandboxConfig(backend="namespace", timeout_s=3600.0, max_output_bytes=1 << 30)
        sandbox: Sandbox = await open_sandbox(config)
        try:
            for name in ("check.py", "search.py"):
                await sandbox.write(name, (BUGS / name).read_bytes())
            lines = "".join(json.dumps(job) + "\n" for job in jobs)
            outcome = await sandbox.run(Command(("python3", "-S", "search.py"), stdin=lines.encode()))
            results = [json.loads(line) for line in outcome.stdout.text().splitlines()]
            if len(results) != len(jobs):
                raise EngineError(
                    f"bugs/search.py ended after {len(results)} of {len(jobs)} jobs: {outcome.stderr.text()}"
                )
            return results
        finally:
            await sandbox.close()


def find_examples(found: Sequence[Function], lab: Lab, seed: int) -> list[tuple[Function, dict[str, str]]]:
    """Functions with calls and their results, where these differ enough and are the same in every process."""
    jobs: list[dict[str, JsonValue]] = [
        {
            "source": function.source,
            "name": function.name,
            "kinds": [list(kinds) for kinds in function.kinds],
            "num_required": function.num_required,
            "seed": f"{seed}/{function.package}/{function.name}",
        }
        for function in found
    ]
    chosen = []
    for function, result in zip(found, lab.run(jobs), strict=True):
        examples = dict(result) if isinstance(result, list) else {}
        if examples := _choose(examples):
            chosen.append((function, examples))
    # A second process has another hash seed, and runs each call once.
    again = lab.run([{"source": function.source, "calls": list(examples)} for function, examples in chosen])
    return [pair for pair, results in zip(chosen, again, strict=True) if results == list(pair[1].values())]


def _choose(examples: Mapping[str, str]) -> dict[str, str]:
    """Up to `MAX_CALLS` examples, with as many different results as there are; none if there are too few."""
    by_result: dict[str, list[str]] = {}
    for call, result in examples.items():
        by_result.setdefault(result, []).append(call)
    if len(by_result) < 2 or len(examples) < NUM_SHOWN or (len(by_result) == 2 and "None" in by_result):
        return {}
    depth = max(map(len, by_result.values()))
    calls = [calls[index] for index in range(depth) for calls in by_result.values() if index < len(calls)]
    return {call: examples[call] for call in calls[:MAX_CALLS]}


def one_line_mutations(source: str) -> list[tuple[str, str, int]]:
    """Kind, file and line of every mutation that changes one line of a function's file."""
    found: dict[str, tuple[str, str, int]] = {}
    lines = source.splitlines()
    first = next(number for number, line in enumerate(lines, start=1) if line.startswith("def "))
    for mutation in mutations(CODE, source, range(first + 1, len(lines) + 1)):
        try:
            changed = ast.unparse(ast.parse(mutation.apply(source))) + "\n"
        except (SyntaxError, ValueError):
            continue
        changed_lines = [line for line in changed.splitlines() if line]
        if len(changed_lines) != len(lines):
            continue
        differing = [
            number for number, pair in enumerate(zip(lines, changed_lines, strict=True), start=1) if pair[0] != pair[1]
        ]
        if len(differing) == 1:
            text = "\n".join(changed_lines) + "\n"
            found.setdefault(text, (mutation.kind, text, differing[0]))
    return list(found.values())


def make_bugs(
    taken: Sequence[tuple[Function, dict[str, str]]], lab: Lab, pool: Executor, rng: random.Random
) -> list[Bug]:
    mutants = pool.map(one_line_mutations, [function.source for function, _ in taken], chunksize=8)
    tried = [(*pair, mutant) for pair, own in zip(taken, mutants, strict=True) for mutant in own]
    results = lab.run([{"source": mutant[1], "calls": list(examples)} for _, examples, mutant in tried])
    bugs: dict[Function, list[Bug]] = {}
    for (function, examples, (kind, source, line)), result in zip(tried, results, strict=True):
        calls = list(examples)
        # A bug that never ends has no result, and is left out.
        results_of = dict(zip(calls, result, strict=True)) if isinstance(result, list) else examples
        failing = [call for call in calls if results_of[call] != examples[call]]
        if not failing:
            continue
        shown = failing[:NUM_FAILING]
        shown += [call for call in calls if call not in failing][: NUM_SHOWN - len(shown)]
        shown += failing[NUM_FAILING : NUM_FAILING + NUM_SHOWN - len(shown)]
        pairs = tuple((call, examples[call]) for call in shown)
        right = function.source.splitlines()[line - 1].strip()
        bugs.setdefault(function, []).append(Bug(function, kind, source, line, right, pairs, tuple(examples.items())))
    return [bug for found in bugs.values() for bug in rng.sample(found, min(len(found), MAX_BUGS))]


# -- demonstrations ---------------------------------------------------------------------------------------------------


def demonstrate(bugs: Sequence[Bug], lab: Lab, pool: Executor, rng: random.Random) -> list[dict[str, JsonValue]]:
    """One trajectory of each bug, its wrong edits tried in sandboxes."""
    mutants = pool.map(one_line_mutations, [bug.source for bug in bugs], chunksize=8)
    plans = [(bug, *_plan(bug, own, rng)) for bug, own in zip(bugs, mutants, strict=True)]
    jobs = [(bug, source) for bug, _, sources in plans for source in (bug.source, *sources)]
    results = iter(lab.run([{"source": source, "calls": [call for call, _ in bug.shown]} for bug, source in jobs]))
    rows: list[dict[str, JsonValue]] = []
    for bug, edits, sources in plans:
        outputs = [test_output(bug.shown, next(results)) for _ in (bug.source, *sources)]
        # A wrong edit that passes would end the attempt.
        kept = [pair for pair, output in zip(edits, outputs[1:], strict=True) if output.startswith("failed")]
        failed = [output for output in outputs[1:] if output.startswith("failed")]
        rows.append(_trajectory(bug, [*kept, (bug.line, bug.right)], [outputs[0], *failed]))
    return rows


def _plan(
    bug: Bug, mutants: Sequence[tuple[str, str, int]], rng: random.Random
) -> tuple[list[tuple[int, str]], list[str]]:
    """Wrong edits, and the files that they leave."""
    right = edit(bug.source, bug.line, bug.right)
    others = [(line, source) for _, source, line in mutants if source != right]
    rng.shuffle(others)
    num_wrong = next((number for number in range(MAX_WRONG) if rng.random() < RIGHT_SHARE), MAX_WRONG)
    chosen = others[:num_wrong]
    return [(line, source.splitlines()[line - 1].strip()) for line, source in chosen], [source for _, source in chosen]


def test_output(examples: Sequence[tuple[str, str]], results: JsonValue) -> str:
    """What `bugs/check.py` prints."""
    given = results if isinstance(results, list) else [NO_RESULT] * len(examples)
    for (call, expected), received in zip(examples, given, strict=True):
        if received != expected:
            return f"failed: {call}\nexpected {expected}\nreceived {received}"
    return f"passed {len(examples)} tests"


def _trajectory(bug: Bug, edits: Sequence[tuple[int, str]], failures: Sequence[str]) -> dict[str, JsonValue]:
    messages: list[dict[str, JsonValue]] = [*first_messages(bug.instruction)]

    def turn(*calls: tuple[str, dict[str, JsonValue], str]) -> None:
        start = len(messages)
        ids = [f"call_{start + index}" for index in range(len(calls))]
        made: list[JsonValue] = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for id, (name, arguments, _) in zip(ids, calls, strict=True)
        ]
        messages.append({"role": "assistant", "content": "", "tool_calls": made})
        for id, (_, _, output) in zip(ids, calls, strict=True):
            messages.append({"role": "tool", "tool_call_id": id, "content": output})

    turn(("read", {}, number_lines(bug.source)), ("test", {}, failures[0]))
    outputs = [*failures[1:], f"passed {len(bug.shown)} tests"]
    for (line, text), output in zip(edits, outputs, strict=True):
        turn(("edit", {"line": line, "text": text}, "edited"), ("test", {}, output))
    return {"messages": list[JsonValue](messages), "tools": list[JsonValue](TOOLS)}


# -- the files --------------------------------------------------------------------------------------------------------


@dataclass
class Made:
    bugs: list[Bug] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    """Packages and functions, by reason."""
    licences: dict[str, str] = field(default_factory=dict)


def read_packages(path: Path) -> list[tuple[str, str]]:
    """Names and versions, `name==version` a line."""
    lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return [(name, version) for name, _, version in (line.partition("==") for line in lines if line)]


def read_functions(package: tuple[str, str], seed: int) -> tuple[str, list[Function]] | str:
    """The licence and the functions of a release; or why there are none."""
    name, version = package
    try:
        release = read_archive(sdist_path(name, version))
    except M2ForgeError as error:
        print(f"{name} {version}: {error}", file=sys.stderr)
        return "package: cannot be read"
    licence = permissive(release)
    if isinstance(licence, Rejection):
        return "package: licence"
    found = list({function.key: function for function in functions(name, release)}.values())
    random.Random(f"{seed}/{name}").shuffle(found)
    return licence, found


def collect(packages: Sequence[tuple[str, str]], seed: int, lab: Lab, pool: Executor) -> Made:
    made, found = Made(), dict[str, Function]()
    for (name, _), read in zip(packages, pool.map(partial(read_functions, seed=seed), packages), strict=True):
        if isinstance(read, str):
            made.left_out[read] += 1
            continue
        made.licences[name] = read[0]
        fresh = {function.key: function for function in read[1] if function.key not in found}
        found |= dict(list(fresh.items())[:MAX_PACKAGE_FUNCTIONS])
    taken = find_examples(list(found.values()), lab, seed)
    made.left_out["function: no examples"] = len(found) - len(taken)
    made.bugs = make_bugs(taken, lab, pool, random.Random(f"{seed}/bugs"))
    return made


def split(bugs: Sequence[Bug], num_held_out: int, seed: int) -> tuple[list[Bug], list[Bug]]:
    """Training and held-out bugs, of different packages."""
    by_package: dict[str, list[Bug]] = {}
    for bug in bugs:
        by_package.setdefault(bug.function.package, []).append(bug)
    rng = random.Random(f"{seed}/split")
    packages = sorted(by_package)
    rng.shuffle(packages)
    limit = max(MIN_LIMIT, int(MAX_HELD_OUT_SHARE * num_held_out))
    held_out: list[Bug] = []
    train: list[Bug] = []
    for package in packages:
        own = by_package[package]
        if len(held_out) < num_held_out and len(own) <= 2 * limit:
            held_out += rng.sample(own, min(len(own), limit))
        else:
            train += own
    return train, held_out[:num_held_out]


def write_tasks(
    dest: Path,
    packages: Sequence[tuple[str, str]],
    seed: int,
    num_held_out: int = NUM_HELD_OUT,
    num_jobs: int = NUM_JOBS,
) -> None:
    lab, check = Lab(num_jobs), (BUGS / "check.py").read_text(encoding="utf-8")
    rng = random.Random(f"{seed}/demonstrations")
    with ProcessPoolExecutor(num_jobs, get_context("spawn")) as pool:
        made = collect(packages, seed, lab, pool)
        train, held_out = split(made.bugs, num_held_out, seed)
        rows = demonstrate(rng.sample(train, min(len(train), NUM_DEMONSTRATIONS)), lab, pool, rng)
    tasks = [bug.task("train", check) for bug in train] + [bug.task("held_out", check) for bug in held_out]
    dest.mkdir(parents=True, exist_ok=True)
    write_atomic(dest / "bugs.jsonl", "".join(json.dumps(task) + "\n" for task in tasks))
    write_atomic(dest / "demonstrations.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    summary: dict[str, JsonValue] = {
        "left_out": dict(made.left_out),
        "licences": dict(made.licences),
        "train": _counts(train),
        "held_out": _counts(held_out),
        "demonstrations": len(rows),
    }
    write_atomic(dest / "summary.json", json.dumps(summary, indent=1) + "\n")


def _counts(bugs: Sequence[Bug]) -> dict[str, JsonValue]:
    return {
        "tasks": len(bugs),
        "functions": len({bug.function.key for bug in bugs}),
        "packages": dict(Counter(bug.function.package for bug in bugs)),
        "kinds": dict(Counter(bug.kind for bug in bugs)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Bugs in small functions of real packages, as tasks.")
    parser.add_argument("dest", type=Path, metavar="DEST")
    parser.add_argument("--packages", type=Path, default=BUGS / "packages.txt", help="name==version, one a line")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out", type=int, default=NUM_HELD_OUT)
    parser.add_argument("--jobs", type=int, default=NUM_JOBS, help="processes and sandboxes")
    args = parser.parse_args()
    try:
        write_tasks(args.dest, read_packages(args.packages), args.seed, args.held_out, args.jobs)
    except (M2ForgeError, OSError) as error:
        sys.exit(f"bug_tasks: error: {error}")
    print((args.dest / "summary.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
