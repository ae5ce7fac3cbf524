"""The text that Prometheus scrapes, against the exposition format."""

import math
import re

from m2forge.observe.prometheus import Metric, counter, gauge, labels, metrics_text, summary

LINE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[a-zA-Z_]\w*="(?:[^"\\\n]|\\[\\"n])*",?)*)\})? (\S+)')
PAIR = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\\n]|\\[\\"n])*)"')
NUMBERS = [math.inf, -math.inf, 1e-300, 1e300]
UNESCAPED = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


def scrape(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Reads the format as its specification says: values by name and labels."""
    assert text.endswith("\n")
    values, typed = {}, ""
    for line in text.splitlines():
        if line.startswith("# "):
            typed = line.split()[2]
            continue
        found = LINE.fullmatch(line)
        assert found, line
        name, labelled, number = found.groups()
        assert name.removesuffix("_sum").removesuffix("_count") == typed
        pairs = tuple(
            (key, re.sub(r"\\.", lambda match: UNESCAPED[match[0]], value))
            for key, value in PAIR.findall(labelled or "")
        )
        values[name, pairs] = float(number)
    return values


def test_metrics_are_written_as_the_format_says() -> None:
    metrics = [
        Metric("requests_total", "counter", "Requests.", {labels(kind="a", outcome="b"): 2, labels(kind="c"): 1}),
        counter("tokens_total", "Tokens.", 3),
        gauge("running", "Running requests.", 0.5),
        summary("wait_seconds", "Waiting time.", total=1.25, count=4),
    ]
    assert metrics_text(metrics, prefix="x_") == (
        "# HELP x_requests_total Requests.\n"
        "# TYPE x_requests_total counter\n"
        'x_requests_total{kind="a",outcome="b"} 2.0\n'
        'x_requests_total{kind="c"} 1.0\n'
        "# HELP x_tokens_total Tokens.\n"
        "# TYPE x_tokens_total counter\n"
        "x_tokens_total 3.0\n"
        "# HELP x_running Running requests.\n"
        "# TYPE x_running gauge\n"
        "x_running 0.5\n"
        "# HELP x_wait_seconds Waiting time.\n"
        "# TYPE x_wait_seconds summary\n"
        "x_wait_seconds_sum 1.25\n"
        "x_wait_seconds_count 4.0\n"
    )


def test_any_label_help_name_and_number_can_be_scraped() -> None:
    value = 'a "quoted" back\\slash\nand {a=","} line'
    metrics = [
        Metric("requests_total", "counter", "Two\nlines and a \\.", {labels(kind=value): 1.0}),
        *(gauge(f"odd.name-{index}", "A gauge.", number) for index, number in enumerate(NUMBERS)),
    ]
    values = scrape(metrics_text(metrics, prefix="x_"))
    assert values["x_requests_total", (("kind", value),)] == 1.0
    assert [*values.values()][1:] == NUMBERS
    assert metrics_text([gauge("g", "A gauge.", math.nan)], prefix="").endswith("g NaN\n")
