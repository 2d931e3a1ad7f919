"""The page docs/tour.md stays short, and its pictures, which a run of an earlier version drew, can be read."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOUR = ROOT / "docs" / "tour.md"
PICTURES = ("mesh.svg", "step.svg", "experts.svg")
MOST_WORDS = 1500
MOST_BYTES = 40_000
SMALLEST_FONT = 12


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_small_and_can_be_read(name):
    path = ROOT / "docs" / "pictures" / name
    assert path.stat().st_size < MOST_BYTES
    text = path.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    assert min(map(int, re.findall(r"(\d+)px", text))) >= SMALLEST_FONT


def test_the_tour_is_short_and_shows_every_picture():
    text = TOUR.read_text(encoding="utf-8")
    assert len(text.split()) <= MOST_WORDS
    assert re.findall(r"!\[[^\]]+\]\(pictures/([\w.]+)\)", text) == list(PICTURES)


def test_every_file_that_the_tour_points_to_is_linked():
    """That each path::symbol exists, tests/test_structure.py checks for all documents."""
    text = TOUR.read_text(encoding="utf-8")
    pointers = re.findall(r"`([\w/]+\.py)::[\w.]+`", text)
    links = re.findall(r"\]\(\.\./([\w/]+\.py)\)", text)
    assert len(pointers) > 15
    assert set(pointers) == set(links)
