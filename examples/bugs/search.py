"""Finds arguments for functions, and runs calls: jobs as lines of JSON in, their results out. Runs in a sandbox.

    {"source": "…", "name": "clamp", "kinds": [["int"], …], "num_required": 2}      examples: [[call, result], …]
    {"source": "…", "calls": ["clamp(5, 1, 3)"]}                                    results of the calls

`kinds` lists the kinds of values that each parameter may take. Combinations are drawn at random; those that returned a
value are drawn more often. A job that ends its process or takes too long has the result null.
"""

import json
import os
import random
import signal
import sys

from check import confine, load, run, show

NUM_DRAWS, NUM_HOPELESS = 240, 80
"""Calls that are tried, and those after which a function is given up if none returned a value."""
CALL_S, JOB_S = 0.02, 2.0
"""CPU time of a call, and of a job."""
MAX_CALL, MAX_RESULT = 80, 60
"""Characters."""

INTS = (*range(13), 15, 16, 17, 20, 24, 31, 50, 64, 100, 255, 1000, 2000, 2024, -1, -2, -7)
FLOATS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 7.25, 10.0, 12.5, 45.0, 90.0, 273.15, 1000.0, -0.5, -3.0)
VALUES = {
    "int": list(map(repr, INTS)),
    "float": list(map(repr, FLOATS)),
    "str": [
        *("''", "'a'", "'abc'", "'Hello World'", "'foo_bar_baz'", "'fooBarBaz'", "'12'", "'3.5'", "'-7'", "'a,b,c'"),
        *("'key=value'", "'the quick brown fox'", "'2024-02-29'", "'#ff8000'", "' pad '", "'aabbbc'", "'level'"),
        *("'a-b c'", "'/usr/lib/x.py'", "'http://a.org/p?q=1'", "'ATGCCA'", "'x\\ny'", "'[1]'", "'A1'", "'.'", "'é'"),
    ],
    "bool": ["True", "False"],
    "none": ["None"],
    "bytes": ["b''", "b'a'", "b'abc'", "b'\\x00\\x01\\xff'", "b'hello world'", "b'12'"],
    "ints": ["[]", "[1]", "[1, 2, 3]", "[3, 1, 2]", "[5, 5, 1]", "[4, 8, 15, 16, 23]", "[0, -1, 7, 2]", "[1, 0, 1, 1]"],
    "floats": ["[0.5]", "[1.0, 2.0, 4.0]", "[0.2, 0.3, 0.5]", "[3.5, -1.0, 2.25]", "[10.0, 20.0, 25.0, 40.0]"],
    "strs": ["[]", "['a']", "['a', 'b', 'c']", "['foo', 'bar', 'foo']", "['b', 'aa', 'ccc']", "['x y', '', 'Z']"],
    "tuple": ["(1, 2)", "(0, 0)", "(3, 4, 5)", "(255, 128, 0)", "(0.5, 0.25, 1.0)", "(2, 1)", "(1.5, -2.0)", "(7,)"],
    "lists": ["[[1, 2], [3, 4]]", "[[1], [2, 3], []]", "[[0, 1, 0], [1, 0, 1], [0, 1, 0]]", "[['a', 'b'], ['c']]"],
    "pairs": ["[(1, 2), (3, 4)]", "[('a', 1), ('b', 2)]", "[(1, 5), (2, 3), (8, 10)]", "[(0.0, 1.0), (2.0, 3.0)]"],
    "dict": [
        *("{}", "{'a': 1}", "{'a': 1, 'b': 2, 'c': 3}", "{'x': 'y', 'z': None}", "{'a': {'b': 1}, 'c': [1, 2]}"),
        *("{1: 'one', 2: 'two'}", "{'a': ['b', 'c'], 'b': ['c'], 'c': []}", "{'b': 2.5, 'a': 0.5}"),
    ],
    "set": ["set()", "{1, 2, 3}", "{2, 3, 4}", "{'a', 'b'}"],
    "function": ["abs", "str", "len", "lambda x: x", "lambda x: x > 1", "lambda x: x * 2", "lambda a, b: a + b"],
}


def search(source: str, name: str, kinds: "list[list[str]]", num_required: int, seed: str) -> "list[list[str]]":
    rng, names = random.Random(seed), load(source)
    found: dict[str, str] = {}
    worked: list[tuple[str, ...]] = []
    for number in range(NUM_DRAWS):
        if number == NUM_HOPELESS and not found:
            break
        if worked and rng.random() < 0.8:
            drawn = rng.choice(worked)
        else:
            num_given = rng.randint(num_required, len(kinds))
            drawn = tuple(rng.choice(allowed) for allowed in kinds[:num_given])
        call = f"{name}({', '.join(rng.choice(VALUES[kind]) for kind in drawn)})"
        if len(call) > MAX_CALL or call in found:
            continue
        signal.setitimer(signal.ITIMER_VIRTUAL, CALL_S)
        try:
            result = show(eval(call, names))
        except Exception:  # noqa: BLE001  (these arguments do not fit)
            continue
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        if len(result) <= MAX_RESULT:
            found[call] = result
            worked.append(drawn)
    return [[call, result] for call, result in found.items()]


def interrupt(number: int, frame: object) -> None:
    raise TimeoutError


def answer(line: str) -> str:
    results_in, results_out = os.pipe()
    child = os.fork()
    if child == 0:
        confine(JOB_S)
        signal.signal(signal.SIGVTALRM, interrupt)
        job = json.loads(line)
        result = run(**job) if "calls" in job else search(**job)
        with os.fdopen(results_out, "w") as pipe:
            json.dump(result, pipe)
        os._exit(0)
    os.close(results_out)
    with os.fdopen(results_in) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    try:
        json.loads(text)
    except ValueError:
        return "null"
    return text


if __name__ == "__main__":
    for line in sys.stdin:
        print(answer(line), flush=True)
