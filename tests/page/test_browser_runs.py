"""The list of runs in a real browser: choosing, the charts of chosen runs, what moves by itself."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from m2forge.page.serve import make_page
from tests.page.conftest import SIZES, serving_app
from tests.page.run_folder import make_demo, metrics_line, write_run
from tests.page.test_browser import HOSTILE, shooting


def chart(title: str) -> str:
    return f"section[aria-label='Curves'] section[aria-label='{title}']"


def test_chosen_runs_share_charts(open_page: Callable[..., Page], tmp_path: Path) -> None:
    make_demo(tmp_path)
    page = open_page()
    with serving_app(make_page(tmp_path)) as url:
        page.goto(url)
        rows = page.locator(".run-table tbody tr")
        expect(rows).to_have_count(5)
        expect(page.locator("#tally")).to_have_text("5 runs, 0 running")
        expect(rows.filter(has_text="demo/rl")).to_contain_text("held-out success 25% → 75%")
        expect(page.locator("section[aria-label='Curves']")).to_contain_text("Choose runs")
        for name in ("demo/pretrain", "demo/sft"):
            page.get_by_label(f"Show the curves of {name}", exact=True).focus()
            page.keyboard.press("Space")
        loss = page.locator(chart("loss"))
        expect(loss.locator(".curve")).to_have_count(2)
        expect(loss.locator(".legend button")).to_have_text(["demo/pretrain", "demo/sft"])
        assert page.url.endswith("#/?runs=demo:pretrain,demo:sft")
        loss.locator("svg").focus()
        page.keyboard.press("Home")
        expect(page.locator(".tip")).to_contain_text("step 1")
        expect(page.locator(".tip .row")).to_have_count(2)
        loss.get_by_role("button", name="demo/sft").click()
        expect(loss.locator(".curve")).to_have_count(1)
        with shooting(page, "runs"):
            pass


def test_the_address_holds_choice_axis_and_scale(open_page: Callable[..., Page], tmp_path: Path) -> None:
    make_demo(tmp_path)
    page = open_page(scheme="dark")
    with serving_app(make_page(tmp_path)) as url:
        page.goto(f"{url}/#/?runs=demo:pretrain,demo:rl,gone&x=tokens&log=1&smooth=1")
        loss = page.locator(chart("loss"))
        expect(loss.locator(".curve:not(.raw)")).to_have_count(2)
        expect(loss.locator(".curve.raw")).to_have_count(2)
        expect(page.locator("section[aria-label='Curves'] header").first).to_contain_text("not in this folder: gone")
        ticks = loss.locator(".tick").all_text_contents()
        assert {"1", "2", "5"} <= set(ticks)
        assert "4,000" in ticks, "the tokens of the steps of RL are summed"
        expect(page.locator(chart("reward"))).to_have_count(0)
        page.get_by_role("button", name="all metrics").click()
        expect(page.locator(f"{chart('held-out success')} .curve:not(.raw)")).to_have_count(1)
        expect(page.locator(f"{chart('reward')} .curve:not(.raw)")).to_have_count(1)
        page.keyboard.press("l")
        page.keyboard.press("x")
        expect(loss.locator(".tick").last).to_contain_text("s")
        assert page.url.endswith("#/?runs=demo:pretrain,demo:rl,gone&x=time&smooth=1&all=1")
        page.get_by_label("Filter metrics").fill("grad")
        expect(page.locator("section[aria-label='Curves'] .grid section")).to_have_count(1)
        page.reload()
        expect(page.locator(f"{chart('grad norm')} .curve:not(.raw)")).to_have_count(2)
        page.keyboard.press("c")
        expect(page.locator("section[aria-label='Curves']")).to_contain_text("Choose runs")


def test_list_and_curves_move_by_themselves(open_page: Callable[..., Page], tmp_path: Path) -> None:
    page = open_page()
    with serving_app(make_page(tmp_path)) as url:
        page.goto(url)
        expect(page.locator("#view")).to_contain_text("m2forge pretrain CONFIG --runs")
        folder = write_run(tmp_path, "one", num_steps=3, is_finished=False)
        row = page.locator(".run-table tbody tr")
        expect(row).to_contain_text("running")
        expect(row).to_contain_text("3 of 3")
        page.get_by_label("Show the curves of one").check()
        curve = page.locator(f"{chart('loss')} .curve")
        expect(curve).to_be_visible()
        before = curve.get_attribute("points")
        assert before is not None
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(metrics_line(4, "pretrain"))
            file.flush()
            expect(curve).not_to_have_attribute("points", before)
        (folder / "failure.txt").write_text("no more memory\n")
        expect(row).to_contain_text("failed")
        expect(row).to_contain_text("no more memory")
        page.get_by_role("link", name="one").click()
        expect(page.locator("#banner")).to_contain_text("The run failed: no more memory")
        expect(page.locator("section[aria-label='Loss'] .curve")).to_be_visible()
        page.get_by_role("link", name="All runs").click()
        expect(row).to_contain_text("failed")
        expect(page.get_by_label("Show the curves of one")).to_be_checked()
    expect(page.locator("#banner")).to_contain_text("does not answer")


def test_rows_are_filtered_and_ordered(open_page: Callable[..., Page], tmp_path: Path) -> None:
    for index, steps in enumerate((30, 10, 20)):
        write_run(tmp_path, f"run-{index}", num_steps=steps)
    page = open_page()
    with serving_app(make_page(tmp_path)) as url:
        page.goto(url)
        names = page.locator(".run-table tbody a")
        page.get_by_role("button", name="Step", exact=True).click()
        expect(names).to_have_text(["run-0", "run-2", "run-1"])
        expect(page.locator("th[aria-sort=descending]")).to_have_text("Step")
        page.get_by_role("button", name="Run", exact=True).click()
        expect(names).to_have_text(["run-0", "run-1", "run-2"])
        page.keyboard.press("/")
        page.keyboard.type("pretrain run-2")
        expect(names).to_have_text(["run-2"])
        assert "find=pretrain%20run-2" in page.url


@pytest.mark.parametrize("size", list(SIZES))
def test_hostile_names_stay_text(open_page: Callable[..., Page], tmp_path: Path, size: str) -> None:
    name = HOSTILE.replace("/", "")
    folder = write_run(tmp_path, name, is_finished=False)
    (folder / "failure.txt").write_text(HOSTILE)
    os.utime(folder / "metrics.jsonl", (1e9, 1e9))
    page = open_page(size)
    with serving_app(make_page(tmp_path)) as url:
        page.goto(url)
        expect(page.locator(".run-table")).to_contain_text(name)
        expect(page.locator(".run-table")).to_contain_text(HOSTILE)
        page.locator(".run-table input").check()
        expect(page.locator(f"{chart('loss')} .curve")).to_be_visible()
        assert page.locator("#view script, #view img").count() == 0
        wide, window = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert wide <= window
        page.locator(".run-table a").click()
        expect(page.locator("#banner")).to_contain_text(HOSTILE)
        assert page.evaluate("window.pwned") is None
