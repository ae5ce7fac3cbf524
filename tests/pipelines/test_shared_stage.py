"""The stages that pipelines share, each on items of its own."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from m2forge.pipelines.config import EndpointConfig, PipelineConfig, QuestionsConfig
from m2forge.pipelines.run import run_stages
from m2forge.pipelines.shared_stage import (
    Dedup,
    Expand,
    Rubric,
    Select,
    Teach,
    Verify,
    model_scores,
    model_teacher,
    model_texts,
)
from m2forge.pipelines.stage import Context, Item, Outcome, Pipeline, Rejection, SetStage, Source, Stage
from m2forge.pipelines.store import StageYield
from m2forge.records import Verdict
from tests.pipelines.endpoint import Respond, completion, serving


class Given(Source):
    def __init__(self, items: Sequence[Item]) -> None:
        self._items = items

    def fingerprint(self) -> str:
        return "given"

    def read(self, context: Context) -> Iterator[Item | Rejection]:
        yield from self._items


class Last(SetStage):
    name = "last"

    def process_all(self, items: Any, context: Context) -> Iterator[Outcome]:
        self.items = list(items)
        yield from self.items


def passed(
    folder: Path, items: Sequence[Item], stage: Stage | SetStage, respond: Respond | None = None
) -> tuple[list[Item], StageYield]:
    """The items that pass, and the yield."""
    last = Last()
    pipeline = Pipeline(Given(items), (stage, last))
    with serving(respond or (lambda *_: (500, b""))) as endpoint:
        model = EndpointConfig(url=endpoint.url, model="model", max_retries=0)
        models = {} if respond is None else {"m": model, "n": model.model_copy(update={"model": "other"})}
        config = PipelineConfig(name="run", models=models, questions=QuestionsConfig(source="counters"))
        found = run_stages(pipeline, config, folder)
    return last.items, found[1]


def texts(*values: str) -> list[Item]:
    return [Item(f"i{number}", {"text": value}) for number, value in enumerate(values)]


def text(item: Item) -> str:
    return item.text("text")


def planted(rng: random.Random, likeness: float) -> tuple[str, str]:
    """Two texts whose sets of runs of three words have the Jaccard similarity `likeness`, or slightly more."""
    words = [f"w{rng.randrange(10**6)}" for _ in range(102)]
    # 100 runs; each word replaced at the end costs one run of each text.
    num = int(100 * (1 - likeness) / (1 + likeness))
    return " ".join(words), " ".join([*words[: 102 - num], *(f"x{rng.randrange(10**6)}" for _ in range(num))])


def test_dedup_finds_what_is_alike_and_leaves_the_rest(tmp_path: Path) -> None:
    rng = random.Random(3)
    alike = [planted(rng, 0.8 + 0.2 * rng.random()) for _ in range(60)]
    apart = [planted(rng, 0.6 + 0.18 * rng.random()) for _ in range(60)]
    pairs = [*alike, *apart]
    items = texts(*(one for one, _ in pairs), *(other for _, other in pairs), "", "", "a", "A.", "a b")
    found, counted = passed(tmp_path, items, Dedup(text))
    ids = [item.id for item in found]
    firsts = [f"i{number}" for number in range(120)]
    others = [f"i{number}" for number in range(180, 240)]
    # Of texts without words, and of those shorter than a run, equal ones are duplicates.
    assert ids == [*firsts, *others, "i240", "i242", "i244"]
    assert counted.rejected == {"near-duplicate": 62}


def test_a_near_duplicate_names_the_first_text(tmp_path: Path) -> None:
    words = " ".join(f"w{number}" for number in range(30))
    stage = Dedup(text)
    outcomes = list(stage.process_all(texts(words, "other words here", f"{words} more"), None))  # type: ignore[arg-type]
    assert outcomes[2] == Rejection("near-duplicate", {"of": "i0", "similarity": round(28 / 29, 4)})
    long = " ".join(f"w{number}" for number in range(140_000))
    assert [type(one) for one in stage.process_all(texts(long, long), None)] == [Item, Rejection]  # type: ignore[arg-type]


def test_select_takes_the_highest_ranks_of_each_group(tmp_path: Path) -> None:
    items = [Item(f"i{n}", {"g": "ab"[n % 2], "r": [3, 1, 3, 9, 5, 2][n]}) for n in range(6)]
    stage = Select(lambda item: item.text("g"), lambda item: float(str(item.data["r"])), 2)
    found, counted = passed(tmp_path, items, stage)
    assert [item.id for item in found] == ["i0", "i3", "i4", "i5"]
    assert counted.rejected == {"over the cap of its group": 2}


def test_expand_adds_variants_and_asks_models(tmp_path: Path) -> None:
    found, _ = passed(tmp_path / "a", texts("a"), Expand(lambda item, context: [{"text": "b"}, {"text": "c"}]))
    assert [text(item) for item in found] == ["a", "b", "c"]
    rewrite = model_texts("m", "Rewrite.", 2)
    stage = Expand(lambda item, context: [{"text": one} for one in rewrite(text(item), context)], keeps_original=False)
    found, counted = passed(tmp_path / "b", texts("one"), stage, lambda *_: completion('["eins", "uno"]'))
    assert ([text(item) for item in found], counted.num_passed) == (["eins", "uno"], 1)
    _, counted = passed(tmp_path / "c", texts("one"), stage, lambda *_: completion('["eins"]'))
    assert counted.failed == {"unusable response": 1}


def test_a_rubric_rejects_with_its_evidence(tmp_path: Path) -> None:
    def respond(body: dict[str, Any], number: int) -> tuple[int, bytes]:
        score = 1 if "good" in body["messages"][1]["content"] else 0.25
        return completion(f'[{{"score": {score}, "evidence": "why"}}, {{"score": 1}}]')

    stage = Rubric(model_scores("m", ["clear", "whole"], text), 0.75)
    found, counted = passed(tmp_path, texts("good", "bad"), stage, respond)
    assert [item.data["rubric"] for item in found] == [
        {"clear": {"score": 1.0, "evidence": "why"}, "whole": {"score": 1.0, "evidence": ""}}
    ]
    assert counted.rejected == {"below the rubric": 1}
    assert Rubric(lambda *_: {"rule": (0.5, "half")}, 0.6).process(texts("a")[0], None) == Rejection(  # type: ignore[arg-type]
        "below the rubric", {"mean": 0.5, "scores": {"rule": {"score": 0.5, "evidence": "half"}}}
    )


def test_teachers_take_turns_and_verdicts_decide(tmp_path: Path) -> None:
    def respond(body: dict[str, Any], number: int) -> tuple[int, bytes]:
        is_cut = body["messages"][0]["content"] == "cut"
        return completion(body["model"], finish_reason="length" if is_cut else "stop")

    def prompt(item: Item) -> list[dict[str, str]]:
        return [{"role": "user", "content": text(item)}]

    teachers = {name: model_teacher(name, prompt) for name in ("m", "n")}
    found, counted = passed(tmp_path / "a", texts("one", "cut"), Teach(teachers, 4), respond)
    assert [item.data["draw"] for item in found] == [0, 1, 2, 3]
    names = [item.data["teacher"] for item in found]
    assert (sorted(map(str, names[:2])), names[:2]) == (["m", "n"], names[2:])
    assert (counted.rejected, counted.num_asked) == ({"answer cut off": 1}, 8)

    def check(item: Item, context: Context) -> Verdict:
        return Verdict(float(item.data["teacher"] == "m"), {"seen": item.data["teacher"]})

    found, counted = passed(tmp_path / "b", found, Verify(check))
    assert counted.rejected == {"verdict: judged": 2}
    assert [item.data["teacher"] for item in found] == ["m", "m"]
    assert found[0].data["verdict"] == {"perf": 1.0, "evidence": {"seen": "m"}, "reason": "judged"} | {
        "criteria": {},
        "reward": None,
    }
