"""Placement of an ensemble's tensors: on their GPU, if all consumers reach it."""

from __future__ import annotations

import pytest

from gpubridge.engine.ensemble.execution import DeviceEdges

A, B, C = "GPU-a", "GPU-b", "GPU-c"
REACHED = {(A, B), (B, A)}


class Member:
    def __init__(self, device):
        self.device = device


class Step:
    def __init__(self, device, **outputs):
        self.device = device
        self.outputs = outputs


class Graph:
    def __init__(self, steps):
        self.steps = steps
        self.consumers = {"t": range(1, len(steps))}


class ExecutionPlan:
    def __init__(self, steps, outputs=()):
        self.graph = Graph(steps)
        self.steps = range(len(steps))
        self.outputs = outputs


@pytest.mark.parametrize(
    ("made_on", "needed_on", "leaves", "wanted", "stays"),
    [
        (A, [A], False, None, A),
        (A, [A, A], False, None, A),
        (A, [B], False, None, A),
        (A, [A, B], False, None, A),
        (A, [C], False, None, None),
        (A, [A, C], False, None, None),
        (A, [None], False, None, None),
        (A, [A, None], False, None, None),
        (A, [], False, None, None),
        # An instance on each of several GPUs: the one that is on the right one leaves it there.
        (None, [A], False, None, A),
        (None, [A, B], False, None, None),
        # What leaves the ensemble is not copied on its way.
        (A, [], True, A, A),
        (A, [], True, B, B),
        (A, [A], True, A, A),
        (A, [A], True, B, None),
        (A, [A], True, None, None),
    ],
)
def test_placement_of_tensors_on_edges(made_on, needed_on, leaves, wanted, stays):
    edges = DeviceEdges(lambda step: Member(step.device), lambda one, peer: (one, peer) in REACHED)
    first = Step(made_on, OUT="t")
    plan = ExecutionPlan([first, *map(Step, needed_on)], ("t",) if leaves else ())
    assert edges.of_step(first, plan, wanted).get("OUT") == stays
