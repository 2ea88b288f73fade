"""What examples/ocr_pipeline does around its networks: boxes from a map, text from probabilities."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

MODELS = Path(__file__).parents[2] / "examples" / "ocr_pipeline" / "model_repository"


def load(path):
    spec = importlib.util.spec_from_file_location(f"ocr_{path.parent.parent.name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


geometry = load(MODELS / "text_lines" / "1" / "geometry.py")


def rectangle(x, y, width, height, degrees=0.0):
    angle = np.radians(degrees)
    right = np.array([np.cos(angle), np.sin(angle)])
    return geometry.Rectangle(np.array([x, y], float), right, width, height)


def draw(*rectangles, size=(300, 200), value=0.9):
    """Draw a map of probabilities with that value in these rectangles, and little elsewhere."""
    image = Image.new("L", size)
    for one in rectangles:
        ImageDraw.Draw(image).polygon([tuple(corner) for corner in one.corners()], 255)
    return np.where(np.asarray(image) > 0, value, 0.01).astype(np.float32)


@pytest.mark.parametrize("degrees", [-40, -17, -3, 0, 5, 30, 44])
def test_a_box_is_found_where_it_lies(degrees):
    drawn = rectangle(140, 90, 120, 24, degrees)
    (found,) = geometry.find_boxes(draw(drawn), 0.3, 0.5, 0)
    np.testing.assert_allclose(found.corners(), drawn.corners(), atol=2)


def test_a_box_grows_as_the_paper_says():
    drawn = rectangle(140, 90, 120, 24, 10)
    (found,) = geometry.find_boxes(draw(drawn), 0.3, 0.5, 1.5)
    distance = 120 * 24 * 1.5 / (2 * (120 + 24))
    assert found.width == pytest.approx(120 + 2 * distance, abs=3)
    assert found.height == pytest.approx(24 + 2 * distance, abs=3)


def test_boxes_are_apart_where_their_pixels_do_not_touch():
    apart = [rectangle(80, 50, 100, 20), rectangle(80, 73, 100, 20), rectangle(220, 50, 60, 20)]
    assert len(geometry.find_boxes(draw(*apart), 0.3, 0.5, 0)) == 3
    assert len(geometry.find_boxes(draw(*apart, rectangle(80, 61, 4, 30)), 0.3, 0.5, 0)) == 2


def test_a_region_that_joins_lower_down_is_one():
    mask = np.zeros((6, 9), bool)
    mask[:, 0] = mask[:, 8] = mask[5, :] = mask[2, 4] = True
    sizes = sorted(
        sum(run.stop - run.start for run in runs) for runs in geometry.connected_runs(mask)
    )
    assert sizes == [1, 19]


def test_connected_runs_agree_with_a_flood_fill():
    mask = np.random.default_rng(3).random((40, 60)) > 0.62
    regions = geometry.connected_runs(mask)
    label = np.zeros(mask.shape, int)
    for index, runs in enumerate(regions, 1):
        for run in runs:
            label[run.row, run.start : run.stop] = index
    assert ((label > 0) == mask).all()
    # Within a region each pixel is reached from the first, and no neighbour is of another region.
    for index in range(1, len(regions) + 1):
        reached = np.zeros(mask.shape, bool)
        reached[tuple(np.argwhere(label == index)[0])] = True
        while True:
            wider = np.pad(reached, 1)
            around = [wider[y : y + 40, x : x + 60] for y in range(3) for x in range(3)]
            grown = np.any(around, axis=0) & mask
            if (grown == reached).all():
                break
            reached = grown
        assert (reached == (label == index)).all()


def test_what_is_small_or_improbable_is_no_text():
    assert geometry.find_boxes(draw(rectangle(50, 50, 40, 1)), 0.3, 0.5, 1.6) == []
    assert geometry.find_boxes(draw(rectangle(50, 50, 40, 20), value=0.4), 0.3, 0.5, 1.6) == []
    assert geometry.find_boxes(np.zeros((200, 300), np.float32), 0.3, 0.5, 1.6) == []
    everything = np.ones((200, 300), np.float32)
    assert len(geometry.find_boxes(everything, 0.3, 0.5, 1.6)) == 1


def test_lines_are_read_from_top_to_bottom_and_left_to_right():
    names = {
        "item": rectangle(60, 52, 80, 20, 8),
        "price": rectangle(240, 76, 40, 20, 8),
        "title": rectangle(150, 20, 200, 30, 8),
        "next": rectangle(60, 90, 80, 20, 8),
    }
    ordered = geometry.reading_order(list(names.values()))
    assert [next(k for k, v in names.items() if v is one) for one in ordered] == [
        "title",
        "item",
        "price",
        "next",
    ]


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ([], ""),
        ([0, 0, 0], ""),
        ([1, 1, 0, 2, 2, 2], "ab"),
        ([1, 0, 1], "aa"),
        ([0, 3, 1, 3, 2, 0, 3], "a b"),
    ],
)
def test_the_best_path_becomes_text(steps, text):
    module = load(MODELS / "text_decoder" / "1" / "model.py")
    decoder = module.TritonPythonModel()
    decoder.characters = np.array(["", "a", "b", " "], object)
    probability = np.full((len(steps), 4), 0.1, np.float32)
    probability[np.arange(len(steps)), steps] = 0.7
    got, score = decoder.decode(probability)
    assert got == text
    assert score == pytest.approx(0.7 if text else 0)
