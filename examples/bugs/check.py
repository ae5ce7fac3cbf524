"""Runs examples on code.py: a file of [call, expected result] in, the first one that fails out, and exit status 0 or 1.

    python3 -I -S check.py tests.json [--once]

A child process loads the code. It is forked before the examples are read and receives the calls alone; `--once` removes
the file before the code is loaded. So the code finds no expected result, and ending its process passes no test.
"""

# ruff: noqa: PTH108, PTH123  (pathlib takes longer to load than most tests take to run)

import json
import os
import resource
import signal
import sys
from itertools import islice

MAX_ITEMS = 50
"""Items of an iterator that are compared."""
CPU_S, MEMORY_BYTES = 0.3, 1 << 29


def show(value: object) -> str:
    """A text that is the same in every process: sets are sorted, floats rounded; refuses objects without a value."""
    if type(value) is float:
        return repr(float(format(value, ".9g")))
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(show, value))) + "}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{show(key)}: {show(inner)}" for key, inner in value.items()) + "}"
    if type(value) is list or hasattr(value, "__next__"):
        return "[" + ", ".join(map(show, islice(iter(value), MAX_ITEMS))) + "]"  # type: ignore[call-overload]
    if isinstance(value, tuple):
        return "(" + ", ".join(map(show, value)) + ")"
    text = repr(value)
    if " at 0x" in text:
        raise TypeError(f"no value: {text}")
    return text


def load(source: str) -> "dict[str, object]":
    names: dict[str, object] = {"__name__": "code"}
    exec(compile(source, "code.py", "exec"), names)
    return names


def run(source: str, calls: "list[str]") -> "list[str]":
    """The result of each call as text, or its error."""
    try:
        names = load(source)
    except Exception as error:  # noqa: BLE001  (whatever the code raises is its result)
        return [explain(error)] * len(calls)
    results = []
    for call in calls:
        try:
            results.append(show(eval(call, names)))
        except Exception as error:  # noqa: BLE001
            results.append(explain(error))
    return results


def explain(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def confine(cpu_s: float) -> None:
    """Limit this process: the kernel ends it after so much CPU time."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)


def main() -> int:
    calls_in, calls_out = os.pipe()
    results_in, results_out = os.pipe()
    if os.fork() == 0:
        os.close(calls_out)
        os.close(results_in)
        with open(calls_in) as pipe:
            calls = json.load(pipe)
        confine(CPU_S)
        with open("code.py") as file, open(results_out, "w") as pipe:
            json.dump(run(file.read(), calls), pipe)
        os._exit(0)
    os.close(calls_in)
    os.close(results_out)
    with open(sys.argv[1]) as file:
        examples = json.load(file)
    if "--once" in sys.argv:
        os.unlink(sys.argv[1])
    with open(calls_out, "w") as pipe:
        json.dump([call for call, _ in examples], pipe)
    with open(results_in, "rb") as pipe:
        text = pipe.read()
    try:
        results = json.loads(text)
    except ValueError:
        results = ["nothing: the code did not end, or ended its process"] * len(examples)
    for (call, expected), received in zip(examples, results, strict=True):
        if received != expected:
            print(f"failed: {call}\nexpected {expected}\nreceived {received}")
            return 1
    print(f"passed {len(examples)} tests")
    return 0


if __name__ == "__main__":
    sys.exit(main())
