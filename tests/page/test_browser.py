"""The page in a real browser: what is seen, what moves by itself, what a hostile text cannot do, how long it takes."""

import json
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from m2forge.cluster.process_record import VERSIONS_FILE, ProcessRecord
from m2forge.page.report import write_report
from m2forge.records import Domain, JsonValue, Task
from m2forge.text.format import ChatFormat
from tests.page.conftest import SIZES, serving
from tests.page.run_folder import write_pipeline
from tests.page.scene import FAMILIES, Scene, long_calls, make_call

FIRST_PAINT_S = 1.0
SLOWER = 2.0
"""A busy machine takes longer for any page; then a long episode may take so many times what a short one does."""
FRAME_MS = 40
"""Share of the processor's time for a frame, while a long episode is scrolled through by a screen a frame."""
NUM_LONG = 5000
HOSTILE = '</script><script>window.pwned=1</script><img src=x onerror="window.pwned=1">\'"&amp;'


@contextmanager
def shooting(page: Page, name: str) -> Iterator[None]:
    """Pictures to look at, where M2FORGE_SHOTS names a folder for them."""
    yield
    folder = os.environ.get("M2FORGE_SHOTS")
    if folder:
        page.screenshot(path=f"{folder}/{name}.png")


def test_a_run_is_shown_and_moves_by_itself(open_page: Callable[..., Page], format: ChatFormat, tmp_path: Path) -> None:
    scene = Scene(tmp_path / "run", format, num_steps=9, group_size=2, queue=8, window=6)
    scene.run(3)
    nums = {"num_alive": 3, "num_forked": 20, "num_failed": 1}
    (scene.run_dir / "sandboxes.json").write_text(json.dumps({"backend": "namespace", **nums}))
    record = ProcessRecord(scene.run_dir / "processes", "host-0", "n1")
    record.start()
    record.end(-9, is_death=True)
    record.start()
    (scene.run_dir / "processes" / VERSIONS_FILE).write_text('{"host-0": 3}')
    page = open_page()
    with serving(scene.run_dir) as url:
        page.goto(url)
        expect(page.locator("#run-state")).to_have_text("running")
        process = page.get_by_label("Processes").locator("tbody td")
        expect(process).to_have_text(["host-0", "n1", "running", "3", "2", "1"])
        expect(process.last).to_have_attribute("title", re.compile("status -9"))
        step = page.locator(".stat .value", has_text="of 9")
        expect(step).to_have_text("3 of 9")
        expect(page.locator(".cell")).to_have_count(8)
        expect(page.locator(".cell.inside")).to_have_count(6)
        expect(page.locator(".facts").first).to_contain_text("head at position 12")
        expect(page.locator(".sandboxes")).to_have_text("Sandboxes (namespace):alive 3forked 20failed 1")
        for title in (
            "Held-out success",
            "Reward by domain",
            "Reward",
            "Entropy",
            "Importance ratio",
            "Staleness and lag",
        ):
            expect(page.locator(f"section[aria-label='{title}'] svg[role=img]")).to_be_visible()
        reward = page.locator("section[aria-label='Reward'] .curve").first
        before = reward.get_attribute("points")
        assert before is not None
        with (scene.run_dir / "metrics.jsonl").open("a") as file:
            file.write('{"step": 4, "ti')
        page.wait_for_timeout(100)
        text = (scene.run_dir / "metrics.jsonl").read_text()
        (scene.run_dir / "metrics.jsonl").write_text(text[: text.rfind("\n") + 1])
        scene.train(4)
        expect(step).to_have_text("4 of 9")
        expect(page.locator(".facts").first).to_contain_text("head at position 16")
        expect(reward).not_to_have_attribute("points", before)
        page.locator("section[aria-label='Reward'] svg").focus()
        page.keyboard.press("ArrowLeft")
        expect(page.locator(".tip")).to_contain_text("step 4")
        page.get_by_role("button", name="by time").click()
        expect(page.locator("section[aria-label='Reward'] .tick").last).to_contain_text("s")
        with shooting(page, "overview"):
            page.keyboard.press("t")
            assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    expect(page.locator("#banner")).to_contain_text("does not answer")
    scene.pool.close()


def test_the_yields_of_a_pipeline_are_shown(open_page: Callable[..., Page], tmp_path: Path) -> None:
    write_pipeline(tmp_path, is_finished=True)
    page = open_page()
    with serving(tmp_path) as url, shooting(page, "pipeline"):
        page.goto(url)
        expect(page.locator("#run-state")).to_have_text("finished")
        rows = page.locator("section[aria-label=Yields] tbody tr")
        expect(rows).to_have_count(4)
        cells = [row.locator("td").all_inner_texts() for row in rows.all()]
        assert cells[1] == ["gates", "12", "9", "2", "1", "9", "4", "3", "120", "1.50"]
        assert [cell.strip() for cell in cells[2] if cell.strip()] == ["reference fails", "2"]
        assert cells[3].index("1") == 4
        expect(page.locator("section[aria-label=Yields]")).to_contain_text("9 items accepted")
        expect(page.locator("text=No metrics yet")).to_be_hidden()


def test_trajectories_are_found_read_and_searched(open_page: Callable[..., Page], done: Path) -> None:
    page = open_page(scheme="dark")
    with serving(done) as url:
        page.goto(f"{url}/#/episodes")
        expect(page.locator(".found")).to_have_text("64 episodes")
        page.get_by_label("domain", exact=True).select_option("agent")
        page.get_by_label("state", exact=True).select_option("trained")
        page.get_by_placeholder("from").fill("0.9")
        expect(page.locator(".found")).not_to_have_text("64 episodes")
        assert re.fullmatch(r"[1-9]\d* episodes?", page.locator(".found").inner_text())
        page.locator(".item").first.click()
        expect(page.locator(".turn").first).to_contain_text("root")
        for kind in ("user", "thinking", "call", "observation", "content"):
            expect(page.locator(f".part.{kind}").first).to_be_visible()
        expect(page.locator(".t.l1, .t.l2, .t.l3, .t.l4, .t.l5").first).to_be_visible()
        page.get_by_role("button", name="advantage").click()
        expect(page.locator(".l1")).to_have_count(0)
        page.get_by_role("button", name="thinking", exact=True).click()
        expect(page.locator(".part.thinking")).to_have_count(0)
        page.get_by_role("button", name="thinking", exact=True).click()
        page.keyboard.press("/")
        page.keyboard.type("<response>")
        expect(page.locator(".reader .found")).to_contain_text("call 1, 1 of")
        assert page.evaluate("CSS.highlights.get('found').size") >= 1
        page.locator(".part.thinking .t").first.hover()
        expect(page.locator(".tip")).to_contain_text("log-probability")
        with shooting(page, "episode"):
            pass


def test_tokens_are_coloured_by_how_far_the_policy_had_moved(open_page: Callable[..., Page], done: Path) -> None:
    page = open_page()
    with serving(done) as url:
        # By places of four units of two: the last step's, and the first's.
        page.goto(f"{url}/#/episode/{6 * 8}")
        page.get_by_role("button", name="ratio", exact=True).click()
        expect(page.locator(".scale")).to_have_text("less likelylikelier when trained")
        for shade in ("n3", "n1", "p1", "p3"):
            expect(page.locator(f".t.{shade}").first).to_be_visible()
        expect(page.locator(".t.l1")).to_have_count(0)
        page.locator(".t.n3").first.hover()
        expect(page.locator(".tip")).to_contain_text("ratio when trained")
        with shooting(page, "ratio"):
            pass
        page.goto(f"{url}/#/episode/1")
        expect(page.locator(".scale")).to_have_text("no ratios: those of step 1 are not stored")
        expect(page.locator(".t").first).to_be_visible()
        expect(page.locator(".t.n1, .t.p1, .t.l1")).to_have_count(0)


def test_a_long_episode_does_not_stall(open_page: Callable[..., Page], format: ChatFormat, tmp_path: Path) -> None:
    scene = Scene(tmp_path / "run", format, queue=4, window=2, group_size=2)
    scene.pool.put([(scene.next_task(), 2)])
    long, short = scene.pool.lease("loop", 2)
    calls = long_calls(format, NUM_LONG)
    for lease, number in ((long, NUM_LONG), (short, 2)):
        scene.record(lease, calls[:number])
        scene.finish(lease, 1.0, "done")
    scene.pool.close()
    page = open_page()
    for number in range(3):
        times_s: list[float] = []
        # A server each time, so that nothing is read already.
        with serving(scene.run_dir) as url:
            for id in (short.episode, long.episode):
                page.goto("about:blank")
                started_s = time.perf_counter()
                page.goto(f"{url}/#/episode/{id}")
                page.locator(".turn:not(.pending) .part.thinking").first.wait_for()
                times_s.append(time.perf_counter() - started_s)
            expect(page.locator(".side")).to_contain_text("branches")
            if number == 0:
                frame_ms = read_through(page, long.episode)
        short_s, first_s = times_s
        # Up to three times, because the machine may be busy with something else.
        if first_s < max(FIRST_PAINT_S, SLOWER * short_s):
            break
    print(f"first calls after {first_s:.2f} s, of a short episode after {short_s:.2f} s; {frame_ms:.0f} ms a frame")
    assert first_s < max(FIRST_PAINT_S, SLOWER * short_s)
    assert frame_ms < FRAME_MS


def read_through(page: Page, id: int) -> float:
    """Scroll, search and jump to the end; milliseconds of each frame of scrolling."""
    frame_ms = scroll_through(page)
    assert page.locator(".turn").count() < 60
    page.keyboard.press("/")
    page.keyboard.type("is at 49")
    expect(page.locator(".reader .found")).to_contain_text("1 of")
    page.evaluate(f"location.hash = '#/episode/{id}?call={NUM_LONG - 1}'")
    expect(page.locator(f"[data-index='{NUM_LONG - 1}'] .part.thinking")).to_be_visible()
    with shooting(page, "long"):
        pass
    return frame_ms


def scroll_through(page: Page) -> float:
    """Milliseconds that the page's thread worked for each frame."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def worked_s() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return float(next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration"))

    before_s = worked_s()
    num_frames = page.evaluate(SCROLL)
    return 1000 * (worked_s() - before_s) / float(num_frames)


SCROLL = """async () => {
  const list = document.querySelector(".reader .scroller");
  for (let step = 0; step < 40; step += 1) {
    list.scrollTop += list.clientHeight;
    await new Promise(requestAnimationFrame);
  }
  return 40;
}"""


def test_hostile_text_stays_text(open_page: Callable[..., Page], format: ChatFormat, tmp_path: Path) -> None:
    scene = Scene(tmp_path / "run", format, queue=4, window=2, group_size=1)
    metadata: dict[str, JsonValue] = {"family": HOSTILE, "files": {f"src/{HOSTILE}": f"{HOSTILE} in a file"}}
    scene.pool.put([(Task(f"t{HOSTILE}", Domain.AGENT, HOSTILE, 1.0, metadata), 1)])
    (lease,) = scene.pool.lease("loop", 1)
    encode, marks = format.tokenizer.encode, format.tokenizer.special_ids
    response = [*encode(HOSTILE), marks["</think>"], *encode(f"\n\n{HOSTILE}"), marks["[e~["]]
    scene.record(lease, [make_call(encode(HOSTILE), response, 0, 0.0, random.Random(0))])
    evidence = {"traceback": f"Traceback\nKeyError: {HOSTILE}", "stdout": f"1 failed {HOSTILE}", "problem": HOSTILE}
    scene.finish(lease, 0.0, HOSTILE, failure=HOSTILE, **evidence)
    scene.write_metrics(1, **{f"{HOSTILE}/a": 1.0, HOSTILE: 2.0})
    scene.write_check(0.5)
    scene.pool.close()
    page = open_page()
    with serving(scene.run_dir) as url:
        for path in ("#/", "#/episodes", "#/episode/1"):
            page.goto(f"{url}/{path}")
            page.wait_for_timeout(300)
            if path == "#/":
                page.locator("summary").last.click()
                expect(page.locator("body")).to_contain_text("onerror")
            else:
                expect(page.locator("#view")).to_contain_text(HOSTILE)
            if path == "#/episode/1":
                expect(page.locator(".traceback")).to_contain_text(f"KeyError: {HOSTILE}")
                expect(page.locator(".output pre")).to_have_text(f"1 failed {HOSTILE}")
                page.locator(".file summary").click()
                expect(page.locator(".file pre")).to_have_text(f"{HOSTILE} in a file")
            assert page.evaluate("window.pwned") is None
            assert page.locator("#view script, #view img").count() == 0
    out = tmp_path / "report.html"
    write_report(scene.run_dir, out)
    page.goto(out.as_uri())
    expect(page.locator(".stat").first).to_be_visible()
    assert page.evaluate("window.pwned") is None


@pytest.mark.parametrize("size", list(SIZES))
def test_nothing_is_wider_than_the_window(open_page: Callable[..., Page], done: Path, size: str) -> None:
    page = open_page(size)
    with serving(done) as url:
        for path, seen in (("#/", ".curve"), ("#/episodes", ".item"), ("#/episode/3", ".turn")):
            page.goto(f"{url}/{path}")
            page.locator(seen).first.wait_for()
            wide, window = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
            assert wide <= window, path


def test_other_stages_and_empty_folders_are_shown(open_page: Callable[..., Page], tmp_path: Path) -> None:
    page = open_page()
    (tmp_path / "config.toml").write_text('corpus = "c"\n[[phases]]\nsteps = 9\n')
    with serving(tmp_path) as url:
        page.goto(url)
        expect(page.locator("body")).to_contain_text("No metrics yet")
        (tmp_path / "metrics.jsonl").write_text(
            "".join(f'{{"step": {n}, "time_s": {n}, "loss": {9 - n}, "tokens_per_s": 5}}\n' for n in range(1, 5))
        )
        expect(page.locator("section[aria-label='Loss'] .curve")).to_be_visible()
        expect(page.locator(".stat .value").first).to_have_text("4 of 9")
        expect(page.locator("section[aria-label='The window now']")).to_be_hidden()
        page.keyboard.press("e")
        expect(page.locator("#view")).to_contain_text("no data pool")
        page.goto(f"{url}/#/episode/7")
        expect(page.locator("#view")).to_contain_text("cannot be shown")


def test_the_report_needs_nothing_but_itself(open_page: Callable[..., Page], done: Path, tmp_path: Path) -> None:
    out = tmp_path / "a folder" / "report.html"
    out.parent.mkdir()
    write_report(done, out, notes=["Half of the <b>demonstrations</b> are wrong."])
    page = open_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(out.as_uri())
    expect(page.locator(".stat.first .value")).to_have_text("31%→93%")
    for label in (
        "Held-out success",
        "Held-out success by family and level",
        "The window as it moved",
        "Where the trainer's time went",
        "Before and after",
        "Reward",
    ):
        expect(page.locator(f'section[aria-label="{label}"]')).to_be_visible()
    expect(page.locator("#report > div").first).to_have_text("Half of the <b>demonstrations</b> are wrong.")
    rows = page.locator('section[aria-label="Held-out success by family and level"] tbody tr')
    expect(rows.nth(0).locator("td")).to_have_text([FAMILIES[0], "1", "50", "31%", "93%"])
    expect(rows.nth(1).locator("td")).to_have_text([FAMILIES[0], "all", "50", "31%", "93%"])
    expect(page.locator(".sides .chip.bad").first).to_have_text("not solved")
    expect(page.locator(".sides .chip.good").first).to_have_text("solved")
    assert page.locator(".curve").count() > 10
    assert asked == [out.as_uri()]
    with shooting(page, "report"):
        pass
