"""The curriculum: stages, ratios, difficulty that follows success, and going on from a checkpoint."""

import json
import textwrap
import tomllib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.config import build, dump
from m2forge.errors import ConfigError, NotFoundError, RecordError
from m2forge.records import Domain
from m2forge.tasks import config as config_module
from m2forge.tasks.config import CurriculumConfig, PaceConfig
from m2forge.tasks.curriculum import Curriculum, Pace
from m2forge.tasks.family import family_name
from m2forge.tasks.task_set import split_of
from tests.tasks.stream import draw_batch

DOCUMENTED = textwrap.dedent(str(config_module.__doc__).partition("\n\n")[2].partition("\n\nRatios")[0])


def make(text: str = DOCUMENTED, *overrides: str) -> CurriculumConfig:
    return build(CurriculumConfig, tomllib.loads(text)["curriculum"], overrides)


def test_the_documented_example_loads_and_survives_toml() -> None:
    config = make()
    assert build(CurriculumConfig, tomllib.loads(dump(config))) == config
    assert [stage.name for stage in config.stages] == ["early", "late"]


def test_every_batch_holds_its_stages_domains_in_stage_order() -> None:
    curriculum = Curriculum(make())
    for _ in range(40):
        batch = draw_batch(curriculum)
        counts = Counter(item.task.domain for item in batch)
        assert counts == {Domain.REASONING: 12, Domain.AGENT: 4}
        assert {(item.stage, item.context) for item in batch} == {("early", 512), ("early", 1024)}
        assert {split_of(item.task) for item in batch} == {"train"}
        families = [family_name(item.task) for item in batch if item.task.domain == Domain.AGENT]
        assert families == ["chain", "gather"] * 2
        # Mixed wherever it is cut: every quarter has one of the rarer domain.
        quarters = [batch[start : start + 4] for start in range(0, 16, 4)]
        assert all(sum(item.task.domain == Domain.AGENT for item in quarter) == 1 for quarter in quarters)
    late = draw_batch(curriculum)
    assert {(item.task.domain, item.stage, item.context) for item in late} == {(Domain.AGENT, "late", 2048)}
    # The chain was at level 1, below what this stage allows.
    assert curriculum.levels() == {"chain": (2, 3)}


def test_difficulty_follows_the_pass_rate_of_each_family() -> None:
    curriculum = Curriculum(make())
    assert curriculum.levels() == {"counters": (1, 2), "chain": (1, 2), "gather": (1, 2)}
    for _ in range(6):
        for item in draw_batch(curriculum):
            curriculum.record(item.task, 1.0 if item.task.domain == Domain.REASONING else 0.5)
    assert curriculum.levels() == {"counters": (3, 4), "chain": (1, 2), "gather": (1, 2)}
    difficulties = {item.task.difficulty for item in draw_batch(curriculum) if item.task.domain == Domain.REASONING}
    assert difficulties == {3.0, 4.0}


@given(
    rates=st.lists(st.sampled_from((0.0, 0.25, 0.5, 1.0)), max_size=20),
    num_before=st.integers(0, 12),
    seed=st.integers(0, 2**31),
)
def test_a_curriculum_goes_on_from_its_state(rates: list[float], num_before: int, seed: int) -> None:
    config = make(
        DOCUMENTED, f"seed={seed}", "stages.0.num_batches=6", "pace.num_groups=3", "stages.0.domains.agent.ratio=0.3"
    )
    curriculum = Curriculum(config)

    def advance(curriculum: Curriculum, batch: int) -> list[str]:
        assignments = draw_batch(curriculum)
        for number, item in enumerate(assignments):
            if rates:
                curriculum.record(item.task, rates[(batch + number) % len(rates)])
        return [item.task.id for item in assignments]

    for batch in range(num_before):
        advance(curriculum, batch)
    again = Curriculum(config, state=json.loads(json.dumps(curriculum.state())))
    assert again.state() == curriculum.state()
    assert again.levels() == curriculum.levels()
    for batch in range(8):
        assert advance(again, batch) == advance(curriculum, batch)


@given(
    bounds=st.tuples(st.integers(0, 6), st.integers(0, 6)).map(lambda pair: (min(pair), max(pair))),
    width=st.integers(1, 4),
    num_groups=st.integers(1, 4),
    rates=st.lists(st.floats(0, 1), max_size=60),
)
def test_levels_stay_within_bounds_and_move_one_at_a_time(
    bounds: tuple[int, int], width: int, num_groups: int, rates: list[float]
) -> None:
    config = PaceConfig(num_groups=num_groups, width=width)
    pace = Pace(config, bounds)
    for rate in rates:
        before = pace.levels
        seen_before = pace.state()["rates"]
        pace.record(before[1], rate)
        lowest, highest = pace.levels
        assert bounds[0] <= lowest <= highest <= bounds[1]
        assert highest - lowest + 1 == min(width, bounds[1] - bounds[0] + 1)
        assert abs(lowest - before[0]) <= 1
        assert isinstance(seen_before, list)
        mean = sum([*seen_before, rate][-num_groups:]) / num_groups
        if lowest > before[0]:
            assert mean > config.raise_above
        if lowest < before[0]:
            assert mean < config.lower_below
        again = Pace(config, bounds)
        again.restore(pace.state())
        assert (again.levels, again.state()) == (pace.levels, pace.state())


def test_a_pace_climbs_stops_at_the_top_and_comes_back() -> None:
    pace = Pace(PaceConfig(num_groups=2, width=1), (1, 3))
    climbed = []
    for rate in (1, 1, 1, 1, 1, 1, 0, 0, 0.5, 0.5, 0, 0):
        pace.record(pace.levels[0], rate)
        climbed.append(pace.levels[0])
    assert climbed == [1, 2, 2, 3, 3, 3, 3, 2, 2, 2, 2, 1]


def test_groups_begun_before_the_last_move_are_not_counted() -> None:
    pace = Pace(PaceConfig(num_groups=2, width=1), (1, 5))
    for _ in range(2):
        pace.record(1, 1.0)
    assert pace.levels == (2, 2)
    for _ in range(9):
        pace.record(1, 1.0)
    assert (pace.levels, pace.state()["rates"]) == ((2, 2), [])
    with pytest.raises(RecordError, match=r"pass_rate: expected a number from 0 to 1, received 1\.5"):
        pace.record(2, 1.5)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("batch_groups=3", "a batch of 3 groups cannot hold agent at 0.25 of it"),
        ("stages.0.domains.agent.ratio=0.0", "greater than 0"),
        ("stages.1.num_batches=5", "late: the last stage has no end"),
        ("stages.1.name=early", "expected a different name for each"),
        ("pace.lower_below=0.9", r"raise_above \(0.8\) must exceed lower_below \(0.9\)"),
        ("stages.1.domains.agent.families.0.start=9", r"start \(9\) must lie within difficulty \[2, 8\]"),
        ("stages.1.domains.agent.families.0.difficulty=[3, 2]", "the lowest level comes first"),
        ("stages.0.domains.agent.families.1.source=chain", "expected each once"),
        ("stages.0.domains.agents={ratio=1.0}", "agents"),
    ],
)
def test_a_curriculum_that_cannot_be_kept_is_refused(override: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make(DOCUMENTED, override)


def test_only_the_last_stage_may_leave_its_length_out() -> None:
    with pytest.raises(ConfigError, match="early: num_batches is missing"):
        make(DOCUMENTED.replace("num_batches = 40\n", ""))


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("stages.1.domains.agent.families.0.source=counters", "counters: its tasks belong to the domain reasoning"),
        ("stages.1.domains.agent.families.0.difficulty=[2, 99]", "chain: difficulty: expected 1 to 16, received 99"),
    ],
)
def test_families_are_checked_against_what_they_are(override: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Curriculum(make(DOCUMENTED, override))


def test_unknown_families_and_foreign_states_are_refused() -> None:
    with pytest.raises(NotFoundError, match="did you mean 'chain'"):
        Curriculum(make(DOCUMENTED, "stages.1.domains.agent.families.0.source=chains"))
    state = Curriculum(make()).state()
    with pytest.raises(RecordError, match="stage: expected one of"):
        Curriculum(make(), state={**state, "stage": "other"})
    with pytest.raises(RecordError, match="positions: expected an object"):
        Curriculum(make(), state={**state, "positions": None})
