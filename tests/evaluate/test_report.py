"""Reports: JSON back and forth, tables, and plots that are XML with every cell in it."""

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from m2forge.errors import DataError, NotFoundError
from m2forge.evaluate.report import (
    LENGTH_FILE,
    SHOTS_FILE,
    DomainLoss,
    EvalReport,
    Failure,
    ModuleLoss,
    heat_map,
    line_chart,
    make_cell,
    number,
    plots,
    render,
)

SVG = "{http://www.w3.org/2000/svg}"
LENGTHS, DEPTHS = (512, 1024, 4096), (0.0, 0.5, 1.0)


def report() -> EvalReport:
    cells = [
        make_cell(
            "needle", "needle", [1.0] * right + [0.0] * (10 - right), [True] * right + [False] * (10 - right),
            length=length, depth=depth, beyond_context=length > 1024,
        )
        for length, right in zip(LENGTHS, (10, 7, 0), strict=True)
        for depth in DEPTHS
    ]  # fmt: skip
    cells += [make_cell("hops", "multi_hop", [0.25, 0.75], [False, False], length=length) for length in LENGTHS[:2]]
    cells += [make_cell("many_shot", "many_shot", [1.0, 0.0], [True, False], num_shots=count) for count in (1, 4)]
    cells.append(make_cell("tool_calls", "tool_calls", [1.0] * 19 + [0.0], [True] * 19 + [False]))
    modules = (ModuleLoss(depth=1, nats_per_token=2.5, agreement=0.5),)
    losses = (
        DomainLoss(domain="all", num_tokens=1000, nats_per_token=2.0, bits_per_byte=1.25, modules=modules),
        DomainLoss(domain="code", num_tokens=10, nats_per_token=math.nan, bits_per_byte=None),
    )
    failures = (Failure(suite="tool_calls", line=3, completion="<x> & “ü”", reasons=("no tool call",)),)
    return EvalReport(
        model="m2-[nano]", num_parameters=1234567, max_context=1024, seed=0,
        cells=tuple(cells), losses=losses, failures=failures, notes=("[bold]weights are random",),
    )  # fmt: skip


def test_a_report_survives_its_file(tmp_path: Path) -> None:
    made = report()
    made.save(tmp_path / "out")
    read = EvalReport.load(tmp_path / "out")
    assert read.model_dump_json() == made.model_dump_json()
    assert math.isnan(read.losses[1].nats_per_token)
    assert read.cells == made.cells
    assert read.score("needle") == pytest.approx(17 / 30)
    (tmp_path / "out" / "eval.json").write_text('{"model": 3}')
    with pytest.raises(DataError, match="not an evaluation report"):
        EvalReport.load(tmp_path / "out")
    with pytest.raises(NotFoundError, match=r"eval\.json: cannot be read"):
        EvalReport.load(tmp_path / "none")


def test_the_tables_show_every_figure() -> None:
    text = render(report())
    for part in ("m2-[nano]: 1,234,567 parameters", "[bold]weights", "2.500, 50% agree", "nan", "4K*", "95.0 ±11.4"):
        assert part in text
    row = next(line for line in text.splitlines() if "50%" in line and "100 ±14" in line)
    # 10 of 10, 7 of 10 and 0 of 10, with their Wilson half widths.
    assert [cell.strip() for cell in row.split("│")[2:5]] == ["100 ±14", "70 ±25", "0 ±14"]
    assert "hops" in text
    assert "4 shots" in text


def test_every_chart_is_xml_with_its_cells_and_labels() -> None:
    charts = plots(report())
    assert set(charts) == {"needle.svg", LENGTH_FILE, SHOTS_FILE}
    trees = {name: ElementTree.fromstring(text) for name, text in charts.items()}
    heat = trees["needle.svg"]
    cells = [rect for rect in heat.iter(f"{SVG}rect") if rect.get("class") == "cell"]
    titles = {title.text for rect in cells for title in rect.iter(f"{SVG}title")}
    assert len(cells) == 9
    assert "50%, 1K: 70.0%" in titles
    texts = [text.text for text in heat.iter(f"{SVG}text")]
    for label in ("512", "1K", "4K*", "0%", "50%", "100%", "70", "length in tokens", "depth of the needle"):
        assert label in texts
    assert "* beyond the network's context of 1K" in texts
    assert any(rect.get("class") == "legend" for rect in heat.iter(f"{SVG}rect"))
    lines = trees[LENGTH_FILE]
    names = [title.text for group in lines.iter(f"{SVG}g") for title in group.iter(f"{SVG}title")]
    assert names == ["needle", "hops"]
    assert [len(group.findall(f"{SVG}circle")) for group in lines.iter(f"{SVG}g")] == [3, 2]
    assert len(list(trees[SHOTS_FILE].iter(f"{SVG}g"))) == 1


def test_marks_lie_inside_the_picture_and_higher_is_better() -> None:
    points = [(1.0, 0.0, 0.0, 0.2), (2.0, 1.0, 0.8, 1.0)]
    tree = ElementTree.fromstring(line_chart("a & b", {"<x>": points}, x_label="n"))
    width, height = float(tree.get("width", 0)), float(tree.get("height", 0))
    circles = [(float(c.get("cx", -1)), float(c.get("cy", -1))) for c in tree.iter(f"{SVG}circle")]
    assert all(0 < x < width and 0 < y < height for x, y in circles)
    assert circles[0][0] < circles[1][0]
    assert circles[0][1] > circles[1][1]


def test_colours_run_from_orange_to_blue() -> None:
    tree = ElementTree.fromstring(
        heat_map("t", ["a", "b", "c"], ["r"], {(0, 0): 0.0, (0, 1): 0.5, (0, 2): 1.0}, x_label="", y_label="")
    )
    fills = [rect.get("fill") for rect in tree.iter(f"{SVG}rect") if rect.get("class") == "cell"]
    assert fills == ["rgb(179,88,6)", "rgb(244,240,232)", "rgb(33,102,172)"]


def test_lengths_are_written_as_people_do() -> None:
    assert [number(each) for each in (1, 512, 1000, 1024, 131072, 5e6)] == ["1", "512", "1000", "1K", "128K", "5M"]
