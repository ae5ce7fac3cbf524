"""A small network that has seen demonstrations and no reward, and what runs of the loop make of it.

It is made as `examples/demo.py` makes its own; a run is one of `m2forge rl`, through the gateway, with
examples/task_agent.py as the agent. What lies complete in the folder is taken as it is.
"""

import asyncio
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # where examples/ lies

from examples.demo import CONFIGS, ROOT, Course, Demo, Lesson, Pages, set_options
from m2forge.config import load
from m2forge.records import Task
from m2forge.rl.config import RLConfig
from m2forge.rl.eval import held_out_tasks
from m2forge.rl.loop import run_rl
from m2forge.tasks.agent import KEYS
from m2forge.tasks.runner import TaskRunner

PAGES = Pages(KEYS, num_items=(2, 10), num_lines=(2, 4), num_pages=4000)
COURSE_CONFIG = "keys-demo.toml"
QUICK_SCALE = 0.03
QUICK_RUN = {
    "num_steps": 2,
    "group_size": 2,
    "warmup_steps": 1,
    "curriculum__batch_groups": 2,
    "pool__window__queue": 4,
    "agent__budget__max_calls": 2,
    "agent__budget__max_tokens": 32,
}
"""What makes a run short, to see that it runs."""


class Policy:
    def __init__(self, folder: Path, lesson: Lesson, config: str, seed: int, *, is_quick: bool) -> None:
        """`config`: of the runs, a file in configs/rl."""
        self._folder, self._seed, self._path = folder, seed, CONFIGS / "rl" / config
        self._settings: dict[str, object] = dict(QUICK_RUN) if is_quick else {}
        self._started_s = time.monotonic()
        demo = Demo(
            folder, seed, scale=QUICK_SCALE if is_quick else 1.0, course=Course(PAGES, (lesson,), COURSE_CONFIG)
        )
        self.model = demo.make_agent()
        """Before any reward."""
        self._tell("made from demonstrations")

    def config(self, **settings: object) -> RLConfig:
        """The config of a run: the file's, overridden by `settings` (nested keys are joined by __)."""
        own = {
            "model": str(self.model),
            "agent__command": [sys.executable, str(ROOT / "examples" / "task_agent.py")],
            "curriculum__seed": self._seed,
            "eval__num_tasks": 0,
        }
        return load(RLConfig, self._path, set_options(**own | self._settings | settings))

    def trained(self, name: str, **settings: object) -> Path:
        """The folder of the model that a run makes."""
        model, _ = run_rl(self.config(name=name, **settings), self._folder)
        self._tell(f"trained: {name}")
        return model

    def held_out(self, num_tasks: int) -> list[Task]:
        """Tasks as difficult as a run's; none is shared with training."""
        config = self.config(eval__num_tasks=num_tasks)

        async def draw() -> list[Task]:
            async with TaskRunner(config.verify, self._folder / "held_out") as runner:
                return await held_out_tasks(config, runner)

        return asyncio.run(draw())

    def _tell(self, what: str) -> None:
        print(f"  {what}, after {time.monotonic() - self._started_s:.0f} s", flush=True)
