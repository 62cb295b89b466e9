"""Text on the page can be read: contrasts of at least AA (WCAG 2), from the colours of the style sheet."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from p2pavg.web import server

PAGE = Path(server.__file__).parent / "page"
STYLE = (PAGE / "style.css").read_text()
AA = 4.5  # of text
AA_SHAPES = 3.0  # of what has to be told apart without text
Colour = tuple[float, float, float]
TEXTS = ("text", "muted", "accent", "amber", "red")
GROUNDS = ("ground", "surface")


def scheme(name: str) -> dict[str, Colour]:
    """The colours by name, light or dark."""
    light, dark = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    found = re.findall(r"--([a-z-]+): #([0-9a-f]{6});", dark if name == "dark" else light)
    return {key: tuple(int(value[at : at + 2], 16) / 255 for at in (0, 2, 4)) for key, value in found}  # type: ignore[misc]


def luminance(colour: Colour) -> float:
    """Relative luminance as WCAG 2 defines it."""
    parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(one: Colour, other: Colour) -> float:
    """From 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def mixed(over: Colour, under: Colour, share: float) -> Colour:
    """A colour of so much opacity over another."""
    return tuple(share * a + (1 - share) * b for a, b in zip(over, under, strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize("name", ["light", "dark"])
def test_every_colour_of_text_can_be_read(name: str) -> None:
    """On both grounds, on the pressed button, and on the hottest link."""
    colours = scheme(name)
    assert len(colours) == 15
    for text in TEXTS:
        for ground in GROUNDS:
            assert contrast(colours[text], colours[ground]) >= AA, (text, ground)
    assert contrast(colours["accent"], colours["accent-soft"]) >= AA  # the pressed button
    assert contrast(colours["muted"], colours["accent-soft"]) >= AA  # a round under the pointer
    heat = re.search(
        r"style\.opacity = fastest > 0 \? ([0-9.]+) \+ ([0-9.]+)", (PAGE / "links.js").read_text()
    )
    assert heat is not None
    hottest = mixed(colours["accent"], colours["surface"], float(heat[1]) + float(heat[2]))
    assert contrast(colours["text"], hottest) >= AA


@pytest.mark.parametrize("name", ["light", "dark"])
def test_shapes_can_be_told_apart(name: str) -> None:
    """Lines, bars and dots stand out from their ground; neighbouring phases differ."""
    colours = scheme(name)
    for shape in ("accent", "amber", "red", "calculation", "matchmaking", "commit"):
        assert contrast(colours[shape], colours["surface"]) >= AA_SHAPES, shape
    phases = ("calculation", "waiting", "matchmaking", "transfer", "commit", "update")
    for one, other in itertools.pairwise(phases):
        assert contrast(colours[one], colours[other]) >= 1.4, (one, other)


def test_only_these_colours_are_used() -> None:
    """No rule has a colour of its own, so that what is computed above is what is shown."""
    rules = re.sub(r":root \{.*?\}", "", STYLE, flags=re.DOTALL)
    rules = re.sub(r"/\*.*?\*/", "", rules, flags=re.DOTALL)
    assert re.findall(r"#[0-9a-f]{3,8}\b(?=[;,) ])", rules) == []
    assert re.findall(r"rgba?\([^)]*\)", rules) == ["rgb(0 0 0 / 0.45)"]  # what lies behind an open peer
