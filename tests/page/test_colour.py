"""The colours of the page: text has the contrast of WCAG 2, level AA (4.5 to 1), in the light and the dark look."""

import re

import pytest

from m2forge.page.app import STATIC

MIN_CONTRAST = 4.5
TEXT = {
    "card": ("ink", "soft", "faint", "accent", "bad"),
    "paper": ("ink", "soft", "faint", "accent"),
    "sunk": ("ink", "soft", "faint", "accent", "bad"),
    "accent-soft": ("accent",),
    "good-soft": ("good",),
    "bad-soft": ("bad",),
}
"""Backgrounds, and the colours of text on them. A row of a list under the pointer is `sunk`."""


def palette(selector: str) -> dict[str, str]:
    style = (STATIC / "style.css").read_text()
    block = style[style.index(f"{selector} {{") :]
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block[: block.index("}")]))


def luminance(colour: str) -> float:
    """Relative luminance, as WCAG 2 defines it."""
    shares = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("selector", [":root", ':root[data-theme="dark"]'])
def test_text_stands_out_from_its_background(selector: str) -> None:
    colours = palette(selector)
    pairs = [(text, ground) for ground, texts in TEXT.items() for text in texts]
    low = {pair: contrast(*(colours[name] for name in pair)) for pair in pairs}
    assert {pair: round(found, 2) for pair, found in low.items() if found < MIN_CONTRAST} == {}


def test_contrast_is_that_of_the_definition() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)
