"""The pictures of docs/tour.md are what a run draws today (python -m lab.tour), and the tour stays short."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lab.tour import __main__ as command
from lab.tour import mesh, step
from lab.tour.run import DENSE, EXPERTS, Seen, run

ROOT = Path(__file__).resolve().parent.parent
TOUR = ROOT / "docs" / "tour.md"
PICTURES = ("mesh.svg", "step.svg", "experts.svg")
MOST_WORDS = 1500
MOST_BYTES = 40_000
SMALLEST_FONT = 12


def test_a_wrong_option_draws_nothing(capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["--nonsense"])
    assert ended.value.code == 2 and "--nonsense" in capsys.readouterr().err


@pytest.fixture(scope="module")
def dense() -> list[Seen]:
    return run(4, DENSE)


@pytest.fixture(scope="module")
def routed() -> list[Seen]:
    return run(2, EXPERTS)


@pytest.fixture(scope="module")
def drawn(dense, routed, tmp_path_factory) -> Path:
    """Return the folder into which the command has drawn."""
    folder = tmp_path_factory.mktemp("pictures")
    runs = {4: dense, 2: routed}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lab.tour.run.run", lambda ranks, options: runs[ranks])
        assert command.main([str(folder)]) == 0
    return folder


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_what_a_run_draws_today(drawn, name):
    committed = command.FOLDER / name
    assert (drawn / name).read_bytes() == committed.read_bytes(), "run: python -m lab.tour"


def test_every_committed_picture_is_drawn(drawn):
    assert sorted(PICTURES) == sorted(path.name for path in drawn.iterdir())
    assert sorted(PICTURES) == sorted(path.name for path in command.FOLDER.iterdir())


def test_negative_control_another_mesh_is_another_picture(dense):
    other = run(2, DENSE)
    assert mesh.draw(other) != mesh.draw(dense)
    assert step.draw(other) != step.draw(dense)
    assert dimensions(dense) == {"dp_shard", "tp", "all"}
    assert dimensions(other) == {"tp"}


def dimensions(seen: list[Seen]) -> set[str]:
    collectives = [one for rank in seen for part in rank.stretches for one in part.collectives]
    return {one.dimension for one in collectives if len(one.ranks) > 1}


def test_negative_control_ranks_that_differ_are_not_drawn(dense):
    first = dense[0].stretches[0]
    one = first.collectives.pop()
    try:
        with pytest.raises(ValueError, match="did not call the same collectives"):
            step.draw(dense)
    finally:
        first.collectives.append(one)


def test_all_phases_of_a_step_are_seen(dense):
    for rank in dense:
        phases = dict.fromkeys(part.phase for part in rank.stretches if part.phase)
        assert list(phases) == ["forward", "loss", "backward", "clip", "optimizer"]


def test_the_shards_of_a_weight_are_the_whole_weight(dense):
    for shards in zip(*(rank.shards for rank in dense), strict=True):
        parts = mesh.owners_of(list(shards))
        elements = sum((bottom - top) * (right - left) for top, left, bottom, right in parts)
        rows, columns = [*shards[0].shape, 1][:2]
        assert elements == rows * columns


def test_router_all_to_all_and_grouped_gemm_agree(routed):
    """Three witnesses of where the rows go: the choices, the sizes of the messages, the rows of each expert."""
    local = 2
    for rank in routed:
        counts, dispatch, combine = rank.routes.all_to_alls
        chosen = [expert for experts in rank.routes.chosen for expert in experts]
        assert counts == [1, 1]  # a row of counts to each rank
        assert dispatch == [sum(expert // local == other for expert in chosen) for other in (0, 1)]
        assert combine == [other.routes.all_to_alls[1][rank.rank] for other in routed]
    chosen = [expert for rank in routed for experts in rank.routes.chosen for expert in experts]
    for rank in routed:
        mine = [rank.rank * local + i for i in range(local)]
        assert rank.routes.gemms == [[chosen.count(expert) for expert in mine]] * 3  # w1, w3, w2


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_small_and_can_be_read(name):
    path = command.FOLDER / name
    assert path.stat().st_size < MOST_BYTES
    text = path.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    assert min(map(int, re.findall(r"(\d+)px", text))) >= SMALLEST_FONT
    width, height = float(root.get("width")), float(root.get("height"))
    background = root.find("{*}rect")
    assert float(background.get("width")) == width - 1 and background.get("fill") == "#ffffff"
    for words in root.iter("{http://www.w3.org/2000/svg}text"):
        assert 0 < float(words.get("x")) < width and 0 < float(words.get("y")) < height


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
