"""Figures of the benchmarks: what they say, and that nothing in them is cut off or covered."""

import json

import pytest

from benchmarks.figures import RESULTS, draw, figure_of

pytestmark = pytest.mark.extra

MACHINE = {"cpu": "A CPU", "cores": 2, "memory_gib": 23.5}
ABOUT = {"started": "2026-01-02T03:04:05+00:00", "commit": "a" * 40, "machine": MACHINE}
# The figure of fleets is drawn by benchmarks.fleet.
RECORDED = sorted(path for path in RESULTS.glob("*.json") if path.stem != "fleet")


@pytest.fixture(autouse=True)
def matplotlib():
    return pytest.importorskip("matplotlib")


def side_by_side(*rows):
    made = []
    for title, ratios, less in rows:
        verdict = "minimum met"
        bounds = {"minimum": 2.0, "aim": None, "verdict": verdict, "less_is_better": less}
        made.append({"title": title, "ratios": ratios, **bounds})
    return {**ABOUT, "settings": {"rounds": 3, "seconds": 5}, "rows": made}


def texts(figure):
    """Return the visible texts of a figure with their boxes, in pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    hidden = set()
    for axes in figure.axes:
        for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            low, high = sorted(limits)
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                if not low <= tick.get_loc() <= high:
                    hidden.update((tick.label1, tick.label2))
    found = [
        (text.get_text(), text.get_window_extent(renderer))
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text().strip() and text not in hidden
    ]
    return found, renderer


def faults(figure):
    """Return what is cut off or covered in a figure."""
    found, renderer = texts(figure)
    width, height = figure.bbox.width, figure.bbox.height
    wrong = [
        f"{text!r} is cut off"
        for text, box in found
        if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height
    ]
    for number, (text, box) in enumerate(found):
        for other, its_box in found[number + 1 :]:
            if box.overlaps(its_box) and text != other:
                wrong.append(f"{text!r} covers {other!r}")
    for legend in figure.legends:
        box = legend.get_window_extent(renderer)
        if any(box.overlaps(axes.get_window_extent(renderer)) for axes in figure.axes):
            wrong.append("the legend covers the axes")
    return wrong


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_figure_is_whole(path):
    figure = figure_of(json.loads(path.read_text()))
    assert figure is not None
    assert faults(figure) == []
    smallest = min(text.get_fontsize() for text in figure.findobj(matplotlib_text()))
    # At half of its width it is still read.
    assert smallest >= 9
    assert path.with_suffix(".png").exists()


def matplotlib_text():
    from matplotlib.text import Text

    return Text


def test_what_is_cut_off_or_covered_is_found():
    figure = figure_of(side_by_side(("work", [2.0, 3.0, 4.0], False)))
    assert faults(figure) == []
    figure.text(0.98, 0.5, "beyond the edge")
    (axes,) = figure.axes
    axes.legend([axes.lines[0]], ["inside"], loc="center")
    figure.legends.append(axes.get_legend())
    told = faults(figure)
    assert "'beyond the edge' is cut off" in told
    assert "the legend covers the axes" in told


def test_a_figure_says_the_machine_the_date_and_the_values():
    figure = figure_of(side_by_side(("faster", [2.0, 3.0, 4.0], False), ("less", [0.5], True)))
    told = [text for text, _ in texts(figure)[0]]
    assert "A CPU, 2 cores, 23.5 GiB; 2026-01-02; 3 rounds of 5 s; commit aaaaaaaa" in told
    assert {"faster", "less", "3.0×", "2.0×", "minimum met"} <= set(told)


def test_only_compared_rows_are_drawn(tmp_path):
    target = tmp_path / "plot.png"
    assert not draw(side_by_side(("alone", [], False)), target)
    assert not target.exists()
    assert draw(side_by_side(("both", [3.5], False)), target)
    assert target.read_bytes().startswith(b"\x89PNG")
