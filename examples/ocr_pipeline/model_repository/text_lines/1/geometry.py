"""Boxes of text lines from a map of probabilities, as the paper on DB describes it (arXiv 1911.08947)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Points = npt.NDArray[np.float64]


class Run(NamedTuple):
    """Neighbouring pixels of a row that are set: from `start` to `stop`, without that."""

    row: int
    start: int
    stop: int


class Rectangle(NamedTuple):
    """A rectangle by its centre, the direction of its width (to the right) and its two sides."""

    center: Points
    right: Points
    width: float
    height: float

    def corners(self) -> Points:
        """Return the corners from the top left one, clockwise."""
        across = self.right * self.width / 2
        down = np.array([-self.right[1], self.right[0]]) * self.height / 2
        signs = ((-1, -1), (1, -1), (1, 1), (-1, 1))
        return np.stack([self.center + x * across + y * down for x, y in signs])

    def grown(self, ratio: float) -> Rectangle:
        """Return it with each side moved out by `ratio` times the area over the perimeter."""
        distance = self.width * self.height * ratio / (2 * (self.width + self.height))
        return self._replace(width=self.width + 2 * distance, height=self.height + 2 * distance)

    def contains(self, points: Points) -> npt.NDArray[np.bool_]:
        """Return for each of the points whether it lies inside."""
        x, y = self.right
        away = points - self.center
        across, down = away @ (x, y), away @ (-y, x)
        inside: npt.NDArray[np.bool_] = (abs(across) <= self.width / 2) & (
            abs(down) <= self.height / 2
        )
        return inside


def find_boxes(
    probability: npt.NDArray[np.float32], pixel: float, box: float, unclip: float
) -> list[Rectangle]:
    """Return the rectangles around the text of a map ``[height, width]``, in its pixels.

    Those on whose pixels the text is less probable than `box` are left out, as are those of less
    than three pixels.
    """
    found = []
    for runs in connected_runs(probability > pixel):
        ends = [(x, run.row) for run in runs for x in (run.start, run.stop - 1)]
        rectangle = smallest_rectangle(np.array(ends, np.float64))
        if min(rectangle.width, rectangle.height) < 3 or mean_inside(probability, rectangle) < box:
            continue
        found.append(rectangle.grown(unclip))
    return found


def connected_runs(mask: npt.NDArray[np.bool_]) -> list[list[Run]]:
    """Return the runs of each connected region; pixels that share a corner are connected."""
    edges = np.diff(np.pad(mask, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    rows, starts = np.nonzero(edges == 1)
    stops = np.nonzero(edges == -1)[1]
    runs = [Run(*values) for values in zip(rows.tolist(), starts.tolist(), stops.tolist())]
    parents = list(range(len(runs)))

    def root(index: int) -> int:
        while parents[index] != index:
            parents[index] = parents[parents[index]]
            index = parents[index]
        return index

    above = 0  # the first run of the row above that may touch this one or a later one
    for index, run in enumerate(runs):
        while runs[above].row < run.row - 1 or (
            runs[above].row == run.row - 1 and runs[above].stop < run.start
        ):
            above += 1
        other = above
        while runs[other].row == run.row - 1 and runs[other].start <= run.stop:
            parents[root(other)] = root(index)
            other += 1
    regions: dict[int, list[Run]] = {}
    for index, run in enumerate(runs):
        regions.setdefault(root(index), []).append(run)
    return list(regions.values())


def convex_hull(points: Points) -> Points:
    """Return the corners of the convex hull, by Andrew's monotone chain."""

    def half(ordered: list[list[float]]) -> list[list[float]]:
        chain: list[list[float]] = []
        for x, y in ordered:
            while len(chain) > 1:
                (ax, ay), (bx, by) = chain[-2:]
                if (bx - ax) * (y - ay) - (by - ay) * (x - ax) > 0:
                    break
                chain.pop()
            chain.append([x, y])
        return chain[:-1]

    ordered = np.unique(points, axis=0).tolist()
    return np.array(half(ordered) + half(ordered[::-1]) or ordered)


def smallest_rectangle(points: Points) -> Rectangle:
    """Return the smallest rectangle around the points: one of its sides lies on their convex hull."""
    hull = convex_hull(points)
    edges = np.roll(hull, -1, axis=0) - hull
    angles = np.unique(np.arctan2(edges[:, 1], edges[:, 0]) % (np.pi / 2))
    # Within 45 degrees of the horizontal: the lines of a page run so.
    angles = np.where(angles > np.pi / 4, angles - np.pi / 2, angles)
    right = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    down = np.stack([-right[:, 1], right[:, 0]], axis=1)
    across, along = hull @ right.T, hull @ down.T
    widths, heights = np.ptp(across, axis=0), np.ptp(along, axis=0)
    best = int(np.argmin(widths * heights))
    middle_x = (across[:, best].min() + across[:, best].max()) / 2
    middle_y = (along[:, best].min() + along[:, best].max()) / 2
    center = middle_x * right[best] + middle_y * down[best]
    return Rectangle(center, right[best], float(widths[best]), float(heights[best]))


def mean_inside(probability: npt.NDArray[Any], rectangle: Rectangle) -> float:
    """Return the mean of the map inside a rectangle."""
    corners = rectangle.corners()
    left, top = np.maximum(np.floor(corners.min(axis=0)), 0).astype(int)
    right, bottom = np.ceil(corners.max(axis=0)).astype(int) + 1
    part = probability[top:bottom, left:right]
    rows, columns = np.indices(part.shape)
    points = np.stack([columns.ravel() + left, rows.ravel() + top], axis=1).astype(np.float64)
    inside = part.ravel()[rectangle.contains(points)]
    return float(inside.mean()) if len(inside) else 0.0


def reading_order(rectangles: list[Rectangle]) -> list[Rectangle]:
    """Return them from top to bottom, and those beside each other from left to right.

    Each joins the last row if its centre lies within half a height of the row's first one, along the
    direction in which that one is written.
    """
    rows: list[list[Rectangle]] = []
    for rectangle in sorted(rectangles, key=lambda one: float(one.center[1])):
        for row in rows:
            away = rectangle.center - row[0].center
            x, y = row[0].right
            if abs(away @ (-y, x)) < row[0].height / 2:
                row.append(rectangle)
                break
        else:
            rows.append([rectangle])
    return [one for row in rows for one in sorted(row, key=lambda one: float(one.center[0]))]
