"""The skeleton of pipelines: kills, speed, near-duplicates.

Kills: `pipelines_program.py` is killed by SIGKILL again and again, at random moments of all its stages; its files must
equal those of a run that was never killed, and no completion that was stored may be asked for again. Speed: items per
second through five rules, each outcome committed to the store. Near-duplicates: pairs of texts with a planted Jaccard
similarity of at least 0.8 among texts that have less.

    python benchmarks/pipelines.py --part skeleton [--json] [--quick]
"""

import hashlib
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pipelines_program
from report import Bar, arguments, finish, print_table

from m2forge.pipelines.config import PipelineConfig, QuestionsConfig
from m2forge.pipelines.run import run_stages
from m2forge.pipelines.shared_stage import Dedup
from m2forge.pipelines.stage import Context, Item, Passed, Pipeline, Rejection, Rule, SetStage, Source, Stage
from m2forge.pipelines.store import StageYield

ROOT = Path(__file__).parent.parent
NUM_KILLS = 20
THRESHOLD = 0.8


@dataclass
class Endpoint:
    """Chat completions that are a function of the request; it counts the requests."""

    url: str = ""
    requests: list[str] = field(default_factory=list)


@contextmanager
def serving() -> Iterator[Endpoint]:
    endpoint, lock = Endpoint(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            text = body["messages"][0]["content"]
            with lock:
                endpoint.requests.append(text)
            time.sleep(0.005)
            message = {"role": "assistant", "content": hashlib.sha256(text.encode()).hexdigest()}
            content = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """The default prints every request."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """The client was killed; the default prints a traceback."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    endpoint.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()


# -- kills -------------------------------------------------------------------------------------------------------------


def accepted(run_dir: Path) -> dict[str, bytes]:
    paths = [run_dir / "lines.jsonl", *(path for path in (run_dir / "tasks").rglob("*") if path.is_file())]
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in paths}


def num_different(one: Path, other: Path) -> int:
    left, right = accepted(one), accepted(other)
    return sum(left.get(name) != right.get(name) for name in left.keys() | right.keys())


def stored(run_dir: Path) -> Counter[str]:
    """How many draws of each prompt a run has stored."""
    return Counter(query(run_dir, "SELECT json_extract(request, '$.messages[0].content') FROM completion"))


def query(run_dir: Path, text: str) -> list[str]:
    """The first column of the rows; none if the run was killed before it had tables."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(run_dir / "pipeline.db")) as connection:
        connection.execute("PRAGMA busy_timeout = 5000")
        try:
            return [str(row[0]) for row in connection.execute(text)]
        except sqlite3.OperationalError:
            return []


def progress_of(run_dir: Path) -> int:
    """Completions and outcomes that a run has stored, and folders that it has written."""
    counts = query(run_dir, "SELECT COUNT(*) FROM completion UNION ALL SELECT COUNT(*) FROM outcome WHERE stage > 2")
    folders = run_dir / "tasks"
    return sum(map(int, counts)) + (len(list(folders.iterdir())) if folders.exists() else 0)


def num_too_many(sent: Counter[str], before: Counter[str]) -> int:
    """Requests of a process for completions that were stored before it began."""
    return sum(max(0, num + before[text] - pipelines_program.num_draws(text)) for text, num in sent.items())


def kill_series(folder: Path, num_items: int, num_kills: int) -> tuple[list[Bar], list[tuple[str, ...]]]:
    rng = random.Random(1)
    program = [sys.executable, str(ROOT / "benchmarks" / "pipelines_program.py")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    whole, killed, rows = folder / "whole", folder / "killed", list[tuple[str, ...]]()
    with serving() as endpoint:
        subprocess.run(
            [*program, str(whole), endpoint.url, str(num_items), "2"], env=env, check=True, stderr=subprocess.DEVNULL
        )
        total, num_asked = progress_of(whole), len(endpoint.requests)
        num_again = num_killed = num_differing = 0
        before = Counter[str]()
        while num_killed < num_kills:
            endpoint.requests.clear()
            words = [*program, str(killed), endpoint.url, str(num_items), str(1 + num_killed % 3)]
            process = subprocess.Popen(words, env=env, stderr=subprocess.DEVNULL)
            # The kills are spread over the run; each lets it go on a little.
            target = max(progress_of(killed) + 1, total * (num_killed + 1) // (num_kills + 1))
            while process.poll() is None and progress_of(killed) < target:
                time.sleep(0.005)
            time.sleep(0.05 * rng.random())
            reached = progress_of(killed)
            if process.poll() is None:
                process.kill()
                num_killed += 1
            process.wait()
            num_again += num_too_many(Counter(endpoint.requests), before)
            before = stored(killed)
            (stage,) = query(killed, "SELECT COALESCE(MAX(stage), 0) FROM outcome") or ["0"]
            end = "done" if process.returncode == 0 else "killed"
            rows.append((str(num_killed), end, f"{reached / total:.0%}", f"{before.total()} of {num_asked}", stage))
            if process.returncode == 0:
                # The next kills hit another run.
                num_differing += num_different(whole, killed)
                shutil.rmtree(killed)
                before = Counter()
        endpoint.requests.clear()
        subprocess.run(
            [*program, str(killed), endpoint.url, str(num_items), "3"], env=env, check=True, stderr=subprocess.DEVNULL
        )
        num_again += num_too_many(Counter(endpoint.requests), before)
    num_differing += num_different(whole, killed)
    bars = [
        Bar.at_least("kill -9", num_killed, num_kills),
        Bar.at_most(f"files that differ after the kills, of {len(accepted(whole))}", num_differing, 0),
        Bar.at_most("stored completions asked again", num_again, 0),
    ]
    return bars, rows


# -- speed and near-duplicates -----------------------------------------------------------------------------------------


class Given(Source):
    name = "given"

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def fingerprint(self) -> str:
        return str(len(self._texts))

    def read(self, context: Context) -> Iterator[Item | Rejection]:
        for number, text in enumerate(self._texts):
            yield Item(f"t{number}", {"text": text, "number": number})


def run_over(folder: Path, texts: list[str], *stages: Stage | SetStage) -> list[StageYield]:
    config = PipelineConfig(name="run", workers=2, questions=QuestionsConfig(source="counters"))
    folder.mkdir()
    return run_stages(Pipeline(Given(texts), stages), config, folder)


def rule(number: int) -> Rule:
    def decide(item: Item) -> Passed | Rejection:
        words = item.text("text").split()
        if sum(len(word) for word in words) % 97 == number:
            return Rejection(f"rule {number}", {"num_words": len(words)})
        return item.adding(**{f"rule{number}": len(words)})

    return Rule(f"rule-{number}", decide)


def speed(folder: Path, num_items: int) -> tuple[Bar, tuple[str, ...]]:
    rng = random.Random(2)
    texts = [" ".join(rng.choices(pipelines_program.WORDS, k=60)) for _ in range(num_items)]
    started_s = time.perf_counter()
    found = run_over(folder, texts, *(rule(number) for number in range(5)))
    taken_s = time.perf_counter() - started_s
    assert found[-1].num_in > 0.9 * num_items
    row = (f"{num_items:,}", f"{taken_s:.2f}", f"{num_items / taken_s:,.0f}")
    return Bar.at_least("items/s through five rules", num_items / taken_s, 2000), row


def planted(rng: random.Random, likeness: float) -> tuple[str, str]:
    """Two texts of 100 runs of three words with at least this Jaccard similarity of their sets of runs."""
    words = [f"w{rng.randrange(10**6)}" for _ in range(102)]
    num = int(100 * (1 - likeness) / (1 + likeness))
    return " ".join(words), " ".join([*words[: 102 - num], *(f"x{rng.randrange(10**6)}" for _ in range(num))])


def near_duplicates(folder: Path, num_pairs: int) -> tuple[list[Bar], tuple[str, ...]]:
    """Pairs of J from 0.8 to 1, pairs of J from 0.4 to 0.79, and as many texts without a partner."""
    rng = random.Random(3)
    alike = [planted(rng, THRESHOLD + 0.2 * rng.random()) for _ in range(num_pairs)]
    apart = [planted(rng, 0.4 + 0.38 * rng.random()) for _ in range(num_pairs)]
    alone = [planted(rng, 1.0)[0] for _ in range(num_pairs)]
    texts = [text for pair in (*alike, *apart) for text in pair] + alone
    started_s = time.perf_counter()
    (_, found) = run_over(folder, texts, Dedup(lambda item: item.text("text"), threshold=THRESHOLD))
    taken_s = time.perf_counter() - started_s
    rejected = {int(id[1:]) for id in query(folder, "SELECT id FROM outcome WHERE stage = 1 AND state = 'rejected'")}
    right = {2 * number + 1 for number in range(num_pairs)}
    share_found = len(rejected & right) / num_pairs
    share_false = len(rejected - right) / (len(texts) - num_pairs)
    assert found.num_rejected == len(rejected)
    bars = [
        Bar.at_least("planted near-duplicates found", share_found, 0.95),
        Bar.at_most("other texts rejected", share_false, 0.01),
    ]
    return bars, (f"{len(texts):,}", f"{taken_s:.2f}", f"{len(texts) / taken_s:,.0f}")


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("skeleton",), default="skeleton", help="what to measure")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        speed_bar, speed_row = speed(folder / "speed", 10_000 if args.quick else 50_000)
        dedup_bars, dedup_row = near_duplicates(folder / "dedup", 500 if args.quick else 5_000)
        print_table("Items", ("part", "items", "s", "items/s"), [("rules", *speed_row), ("dedup", *dedup_row)])
        num_items = 300 if args.quick else 600
        kill_bars, rows = kill_series(folder / "kills", num_items, NUM_KILLS)
        print_table("Kills", ("kills", "end", "progress", "completions stored", "stage reached"), rows)
    finish([*kill_bars, speed_bar, *dedup_bars], args.json)


if __name__ == "__main__":
    main()
