"""The queue is filled so that training keeps ratios and stages, whatever is dropped."""

import asyncio
import random
from collections import Counter
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from m2forge.pool.batch import Claim
from m2forge.pool.lifecycle import UnitState, move_units
from m2forge.pool.pool import Pool, PoolWriter
from m2forge.pool.stored import Lease, make_label
from m2forge.pool.tables import unit_table
from m2forge.records import Domain, PolicyVersion, Task
from m2forge.rl.config import RLConfig
from m2forge.rl.loop import Supply
from m2forge.rl.trainer import SizedQuotas, batch_quotas
from m2forge.tasks.curriculum import Curriculum
from tests.pool.scene import VOCAB_SIZE, play
from tests.rl.scene import make_config
from tests.tasks.stream import draw_batch, draw_here

NUM_EARLY, NUM_STEPS = 5, 10
FLAT = {Domain.REASONING: 0.8, Domain.AGENT: 0.3}
"""How often a group of the domain teaches nothing."""


def domain(name: str, ratio: float, levels: tuple[int, int]) -> dict[str, Any]:
    return {"ratio": ratio, "context": 512, "families": [{"source": name, "difficulty": list(levels)}]}


def two_stages(**fields: Any) -> RLConfig:
    """Reasoning and agents at 2 : 1, which 4 groups cannot hold exactly; then agents alone."""
    early = {"reasoning": domain("counters", 2, (1, 2)), "agent": domain("chain", 1, (1, 2))}
    stages = [
        {"name": "early", "num_batches": NUM_EARLY, "domains": early},
        {"name": "late", "domains": {"agent": domain("chain", 1, (3, 4))}},
    ]
    given = {"num_steps": NUM_STEPS, "curriculum": {"batch_groups": 4, "stages": stages}} | fields
    return make_config(Path("unused"), **given)


class Run:
    """The loop and the trainer without a network: attempts end in any order, and some groups teach nothing."""

    def __init__(self, config: RLConfig, folder: Path, seed: int) -> None:
        self.config, self.rng = config, random.Random(seed)
        url = {"url": f"sqlite:///{folder / 'pool.db'}"}
        self.pool = Pool(config.pool.model_copy(update=url), VOCAB_SIZE)
        self.curriculum = Curriculum(config.curriculum)
        self.flat: dict[str, bool] = {}
        self.running: list[Lease] = []

    async def turn(self, supply: Supply) -> None:
        await supply.fill()
        self.running += self.pool.lease("loop", self.rng.randrange(1, 6))
        self.rng.shuffle(self.running)
        for lease in [self.running.pop() for _ in range(self.rng.randrange(len(self.running) + 1))]:
            if self.rng.random() < 0.05:
                self.pool.fail(lease, "broken")
                continue
            is_flat = self.flat.setdefault(lease.group, self.rng.random() < FLAT[lease.task.domain])
            play(self.pool, lease, 0.0 if is_flat else float(lease.episode % 2), num_calls=1)

    def claim(self, step: int, sizes: list[int]) -> Claim | None:
        version, per_group = PolicyVersion("run", step), self.config.units_per_group
        if self.config.batch_tokens is not None:
            sized = SizedQuotas(self.config.curriculum, sizes, per_group)
            return self.pool.claim_within(self.config.batch_tokens, sized.max_units, version, sized.quotas)
        quotas = next(islice(batch_quotas(self.config.curriculum, per_group), step, None))
        return self.pool.claim(sum(quotas.values()), version, quotas)

    async def train(self) -> list[Counter[str]]:
        """Labels of the units of every batch."""
        batches: list[Counter[str]] = []
        async with PoolWriter(self.pool) as writer:
            supply = Supply(self.config, self.pool, writer, self.curriculum, draw_here, lambda: "note")
            for _ in range(3000):
                await self.turn(supply)
                claimed = self.claim(len(batches), [batch.total() for batch in batches])
                if claimed is None:
                    continue
                batches.append(self.labels(claimed))
                self.pool.commit(claimed, PolicyVersion("run", len(batches)))
                if len(batches) == NUM_STEPS:
                    break
        self.pool.close()
        return batches

    def labels(self, claimed: Claim) -> Counter[str]:
        with self.pool.database.read() as connection:
            query = unit_table.select().where(unit_table.c.id.in_(claimed.units))
            return Counter(make_label(row.stage, row.domain) for row in connection.execute(query))


@pytest.mark.parametrize(
    ("unit", "seed"),
    [
        ("group", 0),
        ("episode", 1),
        pytest.param("group", 1, marks=pytest.mark.long),
        pytest.param("episode", 0, marks=pytest.mark.long),
    ],
)
def test_skipped_groups_change_neither_ratios_nor_stages(tmp_path: Path, unit: str, seed: int) -> None:
    config = two_stages(pool={"window": {"queue": 16, "window": 4, "unit": unit}})
    batches = asyncio.run(Run(config, tmp_path, seed).train())
    quotas = list(islice(batch_quotas(config.curriculum, config.units_per_group), NUM_STEPS))
    assert [dict(batch) for batch in batches] == quotas
    assert [{label.split("/")[0] for label in batch} for batch in batches] == [{"early"}] * NUM_EARLY + [{"late"}] * (
        NUM_STEPS - NUM_EARLY
    )
    trained = Counter[str]()
    for step, batch in enumerate(batches[:NUM_EARLY], 1):
        trained.update(batch)
        due = Fraction(2, 3) * config.batch_units * step
        assert abs(trained["early/reasoning"] - due) < config.units_per_group


def test_token_limited_batches_train_a_stage_with_its_own_units(tmp_path: Path) -> None:
    config = two_stages(batch_tokens=250, pool={"window": {"queue": 16, "window": 4}})
    batches = asyncio.run(Run(config, tmp_path, 0).train())
    assert len(batches) == NUM_STEPS
    early = sum((batch for batch in batches if any(label.startswith("early") for label in batch)), Counter[str]())
    drawn = sum((Counter(quotas) for quotas in islice(batch_quotas(config.curriculum), NUM_EARLY)), Counter[str]())
    assert early == drawn
    assert any(batch.total() < 4 for batch in batches), "no batch was bounded"
    trained = Counter[str]()
    for batch in batches:
        trained.update(batch)
        due = Fraction(2, 3) * min(20, trained.total())
        assert abs(trained["early/reasoning"] - due) <= 1


def test_a_domain_without_signal_slows_but_never_stops_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FLAT, Domain.REASONING, 1.0)
    config = two_stages(pool={"window": {"queue": 8, "window": 4, "max_skips": 3}})
    batches = asyncio.run(Run(config, tmp_path, 0).train())
    assert [dict(batch) for batch in batches] == list(islice(batch_quotas(config.curriculum), NUM_STEPS))


def test_a_batch_that_finds_no_room_is_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units that a restore returns fill the queue between the look at its room and the batch."""
    config = two_stages()
    run = Run(config, tmp_path, 0)

    async def fill() -> None:
        async with PoolWriter(run.pool) as writer:
            supply = Supply(config, run.pool, writer, run.curriculum, draw_here, lambda: "note")
            with monkeypatch.context() as patch:
                patch.setattr(run.pool, "room", lambda: 4)
                await supply.fill()
            run.pool.release("nobody")
            while run.pool.room() < 8:
                for lease in run.pool.lease("loop", 2):
                    play(run.pool, lease, float(lease.episode % 2), num_calls=1)
                if (claimed := run.pool.claim(1, PolicyVersion("run", 0))) is not None:
                    run.pool.commit(claimed, PolicyVersion("run", run.pool.tally().total("trained") + 1))
            await supply.fill()

    asyncio.run(fill())
    expected = Curriculum(config.curriculum)
    ids = [item.task.id for _ in range(4) for item in draw_batch(expected)]
    with run.pool.database.read() as connection:
        rows = connection.execute(unit_table.select().order_by(unit_table.c.place)).all()
    assert [row.task.split('"')[3] for row in rows] == ids
    run.pool.close()


def test_replacements_are_redrawn_when_the_trainer_drops_more(tmp_path: Path) -> None:
    """Another unit of the same group, which a restore had returned, becomes owed while the replacement is drawn."""
    config = two_stages(pool={"window": {"queue": 8, "unit": "episode"}})
    run = Run(config, tmp_path, 0)
    own = (unit_table.c.group_name == "g0", unit_table.c.state == UnitState.OPEN)
    drops = [True]

    async def draw(*given: Any) -> Task:
        if drops.pop():
            drop(0)
        return await draw_here(*given)

    def drop(index: int) -> None:
        with run.pool.database.write() as connection:
            ids = connection.execute(select(unit_table.c.id).where(*own).order_by(unit_table.c.place)).scalars().all()
            unreplaced = {"is_owed": True, "is_queued": False}
            move_units(connection, UnitState.DROPPED, unit_table.c.id == ids[index], **unreplaced)

    async def fill() -> tuple[bool, bool]:
        async with PoolWriter(run.pool) as writer:
            supply = Supply(config, run.pool, writer, run.curriculum, draw_here, lambda: "note")
            await supply.fill()
            drop(0)
            supply = Supply(config, run.pool, writer, run.curriculum, draw, lambda: "note")
            before = run.curriculum.state()
            refused = await supply._replace()
            assert run.curriculum.state() == before, "the task that was not queued is given again"
            drops.append(False)
            return refused, await supply._replace()

    assert asyncio.run(fill()) == (False, True)
    assert not run.pool.unreplaced()
    run.pool.close()


def test_a_queue_that_cannot_hold_a_batch_is_refused(tmp_path: Path) -> None:
    for fields in ({"pool": {"window": {"queue": 7, "unit": "episode"}}}, {"batch_tokens": 9}):
        with pytest.raises(Exception, match="must hold 8 units"):
            two_stages(**({"pool": {"window": {"queue": 7}}} | fields))
