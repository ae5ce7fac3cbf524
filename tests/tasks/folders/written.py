"""Five task folders written by hand, one for each way to be verified.

repair-module     tests of a module, by unittest
count-errors      a file that must equal another
summarise-table   several rewards, and an artifact in /logs/artifacts
rename-files      a shared verifier, which sees all files of the attempt
grow-program      two steps
"""

from pathlib import Path

from m2forge.config import TomlValue
from m2forge.tasks.folders.folder import TaskFolder
from tests.tasks.folders.scene import new_folder

BASE = "python:3.12-slim"
DOCKERFILE = f"""FROM {BASE}@sha256:78387bc3881b8273120a12ebe6c1ab22b018ccc2c9adf565ae1ac9b536e184ea
COPY --chown=1000:1000 files/ /app/
WORKDIR /app
"""
BY_STATUS = """if [ $? -eq 0 ]; then reward=1; else reward=0; fi
echo "$reward" > /logs/verifier/reward.txt
[ "$reward" = 1 ]
"""


def table(name: str, artifacts: list[str], mode: str = "separate", **others: TomlValue) -> dict[str, TomlValue]:
    return {
        "schema_version": "1.4",
        "artifacts": [*artifacts],
        "task": {"name": f"m2forge/{name}"},
        "metadata": {"m2forge": {"source": "written", "package": name, "domain": "agent"}},
        "agent": {"timeout_sec": 60.0, "user": 1000},
        "verifier": {"environment_mode": mode, "timeout_sec": 60.0, "user": 1000},
        "environment": {"network_mode": "no-network", "workdir": "/app", "memory_mb": 1024, "storage_mb": 1024},
        **others,
    }


REPAIR_MODULE = {
    "instruction.md": "`merge` of /app/interval.py loses intervals that touch or lie inside another. Repair it: it "
    "returns sorted intervals, none of which touch.\n",
    "environment/files/interval.py": '''"""Closed intervals of integers."""


def merge(intervals):
    merged = []
    for begin, end in sorted(intervals):
        if merged and begin < merged[-1][1]:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return merged
''',
    "tests/test.sh": f"#!/bin/sh\ncd /tests && PYTHONPATH=/app python3 -m unittest test_interval\n{BY_STATUS}",
    "tests/test_interval.py": """import unittest

from interval import merge


class MergeTest(unittest.TestCase):
    def test_apart(self):
        self.assertEqual(merge([(5, 6), (1, 2)]), [(1, 2), (5, 6)])

    def test_touching(self):
        self.assertEqual(merge([(1, 2), (2, 4)]), [(1, 4)])

    def test_inside(self):
        self.assertEqual(merge([(1, 9), (2, 3), (4, 5)]), [(1, 9)])
""",
    "solution/solve.sh": r"""#!/bin/sh
sed -i -e 's/begin < merged/begin <= merged/' -e 's/0\], end)/0], max(end, merged[-1][1]))/' /app/interval.py
""",
}

NUM_LINES, NUM_HOSTS, ERROR_EVERY = 200, 5, 7
LOG = [f"{'ERROR' if i % ERROR_EVERY == 0 else 'INFO'} host-{i % NUM_HOSTS} request {i}" for i in range(NUM_LINES)]
COUNTS = [sum(f"ERROR host-{host} " in line for line in LOG) for host in range(NUM_HOSTS)]
COUNT_ERRORS = {
    "instruction.md": "Count the lines with ERROR of each host in /app/server.log. Write `HOST COUNT` lines, sorted by "
    "host, to /app/report.txt.\n",
    "environment/files/server.log": "\n".join(LOG) + "\n",
    "tests/test.sh": "#!/bin/sh\ncmp /tests/expected.txt /app/report.txt\n" + BY_STATUS,
    "tests/expected.txt": "".join(f"host-{host} {count}\n" for host, count in enumerate(COUNTS)),
    "solution/solve.sh": """#!/bin/sh
grep '^ERROR ' /app/server.log | cut -d' ' -f2 | sort | uniq -c | while read -r count host; do
    echo "$host $count"
done > /app/report.txt
""",
}

SUMMARISE_TABLE = {
    "instruction.md": "/app/sales.csv has the columns region, units and price. Write a JSON object to "
    "/logs/artifacts/summary.json: `revenue`, the sum of units times price, and `best_region`, the region with the "
    "highest revenue.\n",
    "environment/files/sales.csv": "region,units,price\nnorth,3,20\nsouth,10,4\nnorth,1,15\neast,8,9\n",
    "tests/test.sh": "#!/bin/sh\npython3 -E -s /tests/check.py > /logs/verifier/reward.json\n",
    "tests/check.py": """import json

try:
    with open("/logs/artifacts/summary.json") as file:
        found = json.load(file)
    revenue, region = found["revenue"] == 187, found["best_region"] == "north"
except (OSError, ValueError, KeyError, TypeError):
    revenue = region = False
print(json.dumps({"reward": (revenue + region) / 2, "revenue": float(revenue), "best_region": float(region)}))
""",
    "solution/solve.sh": """#!/bin/sh
python3 - <<'END'
import collections, csv, json
revenue = collections.Counter()
with open("/app/sales.csv") as file:
    for row in csv.DictReader(file):
        revenue[row["region"]] += int(row["units"]) * int(row["price"])
with open("/logs/artifacts/summary.json", "w") as file:
    json.dump({"revenue": sum(revenue.values()), "best_region": revenue.most_common(1)[0][0]}, file)
END
""",
}

NUMBERS = (1, 7, 12, 130)
RENAME_FILES = {
    "instruction.md": "Rename every /app/photos/IMG_N.jpg to /app/photos/holiday-N.jpg, with N as three digits.\n",
    **{f"environment/files/photos/IMG_{number}.jpg": f"picture {number}\n" for number in NUMBERS},
    "tests/test.sh": f"""#!/bin/sh
reward=1
for number in {" ".join(map(str, NUMBERS))}; do
    name=$(printf 'holiday-%03d.jpg' "$number")
    [ "$(cat "/app/photos/$name" 2>/dev/null)" = "picture $number" ] || reward=0
    [ ! -e "/app/photos/IMG_$number.jpg" ] || reward=0
done
echo "$reward" > /logs/verifier/reward.txt
[ "$reward" = 1 ]
""",
    "solution/solve.sh": """#!/bin/sh
cd /app/photos && for file in IMG_*.jpg; do
    number=${file#IMG_}
    mv "$file" "$(printf 'holiday-%03d.jpg' "${number%.jpg}")"
done
""",
}

CONVERT = """#!/bin/sh
cat > /app/convert.py <<'END'
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--kelvin", action="store_true")
parser.add_argument("fahrenheit", type=float)
args = parser.parse_args()
print(round((args.fahrenheit - 32) * 5 / 9 + (273.15 if args.kelvin else 0)))
END
"""
TEST_CONVERT = """#!/bin/sh
[ "$(python3 /app/convert.py {arguments})" = {expected} ]
"""
GROW_PROGRAM = {
    "environment/files/README.md": "A program that converts temperatures.\n",
    "steps/celsius/instruction.md": "Write /app/convert.py: `python3 convert.py 212` prints degrees Celsius.\n",
    "steps/kelvin/instruction.md": "`python3 convert.py --kelvin 212` prints kelvins; without it nothing changes.\n",
    "steps/celsius/tests/test.sh": TEST_CONVERT.format(arguments="212", expected=100) + BY_STATUS,
    "steps/kelvin/tests/test.sh": TEST_CONVERT.format(arguments="--kelvin 32", expected=273) + BY_STATUS,
    "steps/celsius/solution/solve.sh": CONVERT.replace("(273.15 if args.kelvin else 0)", "0"),
    "steps/kelvin/solution/solve.sh": CONVERT,
}

FOLDERS = {
    "repair-module": (table("repair-module", ["/app"]), REPAIR_MODULE),
    "count-errors": (table("count-errors", ["/app/report.txt"]), COUNT_ERRORS),
    "summarise-table": (table("summarise-table", []), SUMMARISE_TABLE),
    "rename-files": (table("rename-files", [], "shared"), RENAME_FILES),
    "grow-program": (
        table("grow-program", ["/app/convert.py"], steps=[{"name": "celsius"}, {"name": "kelvin"}]),
        GROW_PROGRAM,
    ),
}


def write_all(dest: Path) -> list[TaskFolder]:
    files = {"environment/Dockerfile": DOCKERFILE}
    return [new_folder(dest / name, own, files | texts) for name, (own, texts) in FOLDERS.items()]
