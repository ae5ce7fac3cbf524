"""Compares the repaired settings with those that were meant; prints 1 or 0."""

import json
import os
import stat

EXPECTED = {
    "listen": {"host": "0.0.0.0", "port": 8443, "backlog": 128},
    "timeouts": {"read_s": 7.5, "write_s": 5},
    "features": ["metrics", "tracing", "drain"],
    "greeting": 'say "hello" // not a comment',
    "pattern": "^[a-z]+\\.example\\.org$",
    "retries": None,
    "verbose": True,
}


def no_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)


descriptor = os.open("/workspace/service.json", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
assert stat.S_ISREG(os.fstat(descriptor).st_mode)
with os.fdopen(descriptor, encoding="utf-8") as file:
    found = json.loads(file.read(1 << 20), object_pairs_hook=no_repeats)
print(int(json.dumps(found, sort_keys=True) == json.dumps(EXPECTED, sort_keys=True)))
