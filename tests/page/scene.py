"""Runs for the tests of the page: a pool with the calls of real conversations, metrics and checks, made in a moment."""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np
from sqlalchemy import select

from m2forge.pool.config import PoolConfig, WindowConfig
from m2forge.pool.pool import Pool
from m2forge.pool.record import Append
from m2forge.pool.stored import Lease, Outcome, read_units
from m2forge.pool.tables import unit_table
from m2forge.records import Call, FinishReason, IntArray, JsonValue, PolicyVersion, Reward, Task
from m2forge.rl.importance_ratio import write_ratios
from m2forge.tasks.catalog import family_of, find_family
from m2forge.text.format import MINIMAX_M2_SPECIALS, ChatFormat, make_format
from m2forge.text.message import Message
from m2forge.text.tokenizer import train_tokenizer

Ids: TypeAlias = Sequence[int] | IntArray
START_S = 1_790_000_000.0
FAMILIES = ("chain", "counters", "words")
CONFIG = """
name = "{name}"
model = "runs/base/model"
num_steps = {num_steps}
group_size = {group_size}
a_key_of_another_version = 1

[curriculum]
batch_groups = 4

[agent]
command = ["python", "agent.py"]

[check]
num_tasks = 200

[gateway]
format = "minimax_m2"

[pool]
url = "{url}"
max_attempts = 3

[pool.window]
queue = {queue}
window = {window}
"""


def make_chat_format() -> ChatFormat:
    """Return the chat format of a small tokenizer that knows the words of the tasks."""
    texts = ["I look, then I answer. The tool said: error.", "<b>bold</b> & 'quoted' \"text\" Grüße 你好"]
    for name in FAMILIES:
        for seed in range(8):
            task = find_family(name).draw(2, seed)
            texts += [f"{m.content} {m.thinking}" for m in find_family(name).demonstrate(task, random.Random(seed))]
    return make_format("minimax_m2", train_tokenizer(texts * 2, 600, MINIMAX_M2_SPECIALS))


@dataclass
class Scene:
    """A run that can go on: steps are made one at a time."""

    run_dir: Path
    format: ChatFormat
    url: str = "sqlite:///pool.db"
    num_steps: int = 24
    group_size: int = 4
    queue: int = 24
    window: int = 8
    step: int = 0
    pool: Pool = field(init=False)

    def __post_init__(self) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        fields = {name: getattr(self, name) for name in ("url", "num_steps", "group_size", "queue", "window")}
        (self.run_dir / "config.toml").write_text(CONFIG.format(name=self.run_dir.name, **fields))
        folder = self.run_dir / "weights" / "step-00000000"
        folder.mkdir(parents=True)
        self.format.tokenizer.save(folder)
        url = self.url.replace("sqlite:///", f"sqlite:///{self.run_dir}/")
        window = WindowConfig(queue=self.queue, window=self.window, no_signal="train")
        self._now_s = START_S
        self.pool = Pool(PoolConfig(url=url, window=window), self.format.tokenizer.vocab_size, clock=self._clock)
        self.draw = random.Random(0)
        self._num_tasks = 0

    def _clock(self) -> float:
        self._now_s += 0.01
        return self._now_s

    # -- what a run does -----------------------------------------------------------------------------------------------

    def next_task(self) -> Task:
        self._num_tasks += 1
        return find_family(FAMILIES[self._num_tasks % len(FAMILIES)]).draw(1 + self._num_tasks % 3, self._num_tasks)

    def fill(self) -> None:
        self.pool.put([(self.next_task(), self.group_size) for _ in range(self.pool.room())])

    def attempt(self, lease: Lease) -> None:
        """Solved as likely as the run is far."""
        family = family_of(lease.task)
        messages = family.demonstrate(lease.task, self.draw)
        is_solved = self.draw.random() < 0.25 + 0.7 * self.step / self.num_steps
        if not is_solved:
            messages[-1] = Message("assistant", "no idea", "I do not know.")
        self.record(lease, conversation_calls(self.format, lease.task, messages, self.step, self.draw))
        self.finish(lease, float(is_solved), messages[-1].content)

    def record(self, lease: Lease, calls: Sequence[Call]) -> None:
        writer = lease.writer(self.pool.vocab_size)
        appends = [Append(lease, writer.write(call)) for call in calls]
        assert not any(self.pool.append(appends))
        self._recorded = len(calls)

    def finish(self, lease: Lease, perf: float, answer: str, failure: str | None = None, **verifier: JsonValue) -> None:
        """`verifier`: more of its evidence."""
        evidence: dict[str, JsonValue] = {
            "verifier": {"expected": "42", "received": answer, **verifier},
            "rules": {},
            "time_s": 1.5,
            "base_s": None,
        }
        reward = Reward(0.1, 0.2 * perf, perf, perf + 0.01 + 0.02 * perf, evidence)
        steps = (0.0,) * (self._recorded - 1) + (reward.total,) if self._recorded else ()
        self._now_s += 0.5 + self.draw.random()
        self.pool.finish(lease, Outcome(failure, {"answer": answer}, reward, steps))

    def play(self, share: float = 1.0) -> None:
        """Attempt a share of what waits."""
        leases = self.pool.lease("loop", 10_000)
        for lease in leases[: math.ceil(share * len(leases))]:
            self.attempt(lease)

    def train(self, num_units: int = 4) -> None:
        claim = self.pool.claim(num_units, PolicyVersion("run", self.step))
        assert claim is not None
        self.step += 1
        self.pool.commit(claim, PolicyVersion("run", self.step))
        self.write_metrics(self.step)

    def keep_ratios(self) -> None:
        """Of the last step, as its trainer would."""
        rng, log_ratios = np.random.default_rng(self.step), {}
        with self.pool.database.read() as connection:
            ids = list(connection.execute(select(unit_table.c.id).where(unit_table.c.step == self.step)).scalars())
            units = read_units(connection, ids, self.pool.vocab_size)
        for episode in [episode for unit in units for episode in unit.episodes]:
            for index, sample in enumerate(episode.tree().samples):
                log_ratios[f"{episode.name}/{index}"] = rng.normal(0, 0.4, sample.num_response).astype(np.float32)
        write_ratios(self.run_dir / "ratios", self.step, log_ratios, keep=1)

    def write_metrics(self, step: int, **values: float | str) -> None:
        done = step / self.num_steps
        wave = math.sin(step * 1.7)
        record: dict[str, float | str] = {
            "step": step,
            "time_s": START_S + 3.1 * step,
            "loss": -0.01 * wave,
            "entropy": 2.0 - done + 0.05 * wave,
            "ratio_mean": 1 + 0.01 * wave,
            "ratio_max": 1.5 + 0.3 * abs(wave),
            "clipped_share": 0.01 * abs(wave),
            "kl_k3": 0.001 + 0.002 * done,
            "ratio_share/0.8-0.95": 0.05 + 0.02 * wave,
            "ratio_share/0.95-1.05": 0.9 - 0.04 * wave,
            "ratio_share/1.05-1.25": 0.05 + 0.02 * wave,
            "grad_norm": 0.5 + 0.2 * wave,
            "mtp_loss/1": 0.9 - 0.3 * done,
            "tokens_computed": 4000 + 300 * wave,
            "lr": 1e-4 * (1 - done),
            "reward": 0.25 + 0.65 * done + 0.04 * wave,
            "perf": 0.24 + 0.66 * done + 0.04 * wave,
            "lag": float(step % 5),
            "staleness": float(step % 3),
            "trained_s": 1.9 + 0.2 * wave,
            "published_s": 0.12,
            "waited_s": 0.7 + 0.3 * wave,
        }
        with (self.run_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record | values) + "\n")

    def write_check(self, success: float, step: int | None = None) -> None:
        families = {name: min(1.0, success + 0.03 * index) for index, name in enumerate(FAMILIES)}
        margin = 1.96 * math.sqrt(success * (1 - success) / 200)
        step = self.step if step is None else step
        record = {"step": step, "num_tasks": 200, "success": success, "margin": margin, "by_family": families}
        levels = {name: {"1": {"num_tasks": 50, "success": share}} for name, share in families.items()}
        record |= {"num_broken": 0, "seconds": 4.0, "by_level": levels}
        with (self.run_dir / "checks.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def run(self, num_steps: int) -> None:
        """So many steps, then a queue whose first units are ready and whose others are at work."""
        if not self.step:
            self.write_check(0.31)
        for _ in range(num_steps):
            self.fill()
            self.play()
            self.train()
            if self.step % 6 == 0:
                self.write_check(0.31 + 0.6 * self.step / self.num_steps)
        self.fill()
        self.play(0.6)

    def complete(self) -> None:
        (self.run_dir / "model").mkdir()
        self.format.tokenizer.save(self.run_dir / "model")
        self.write_check(0.93, self.num_steps)


def conversation_calls(
    format: ChatFormat, task: Task, messages: Sequence[Message], step: int, draw: random.Random
) -> list[Call]:
    """The calls that an agent made that had this conversation."""
    tools, calls = family_of(task).tools(task), []
    start_s = START_S + draw.random()
    for index, message in enumerate(messages):
        if message.role != "assistant":
            continue
        prompt = format.render(messages[:index], tools, generation=True).ids
        response = format.render(messages[: index + 1], tools).ids[len(prompt) :]
        calls.append(make_call(prompt, response, step, start_s + index, draw))
    return calls


def make_call(prompt: Ids, response: Ids, step: int, start_s: float, draw: random.Random) -> Call:
    return Call(
        prompt_ids=np.asarray(prompt, np.int32),
        response_ids=np.asarray(response, np.int32),
        logprobs=-np.random.default_rng(draw.getrandbits(32)).exponential(0.5, len(response)).astype(np.float32),
        versions=np.full(len(response), step, np.int32),
        finish_reason=FinishReason.STOP,
        started_s=start_s,
        finished_s=start_s + 0.3,
    )


def long_calls(format: ChatFormat, num_calls: int, context: int = 3000) -> list[Call]:
    """An agent that goes on and on: it looks something up, and drops the middle of its context when that is full."""
    draw = random.Random(1)
    encode, marks = format.tokenizer.encode, format.tokenizer.special_ids
    opening = np.array(format.render([Message("user", "Look everything up.")], generation=True).ids, np.int32)
    again = [marks["[e~["], *encode("\n"), marks["]~b]"], *encode("ai\n"), marks["<think>"], *encode("\n")]
    turns = []
    for n in range(50):
        response = [*encode(f"I look at {n}.\n"), marks["</think>"], *encode("\n\nnext"), marks["[e~["]]
        results = [*encode("\n"), marks["]~b]"], *encode(f"tool\n<response>{n * 7} is at {n}</response>"), *again]
        turns.append((np.array(response, np.int32), np.array(results, np.int32)))
    prompt, calls = opening, []
    for index in range(num_calls):
        answer, told = turns[draw.randrange(len(turns))]
        calls.append(make_call(prompt, answer, 0, START_S + index, draw))
        prompt = np.concatenate((prompt, answer, told))
        if prompt.size > context:
            prompt = np.concatenate((opening, prompt[-context // 4 :]))
    return calls
