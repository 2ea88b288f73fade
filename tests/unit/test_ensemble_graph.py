"""Validity of ensembles, and the errors of invalid ones, in the words of Triton 2.51."""

import pytest

from gpubridge.engine.ensemble.graph import ROOT, fit_shape
from gpubridge.errors import BridgeError, ErrorCode
from tests.unit.ensembles import draw, ensemble, member, wired
from tests.unit.model_configs import cases

# The inputs and the steps.
REFUSED = """
A | add > Y=B
    must specify 'input_map' in step 0 of ensemble 'e'
A | add X=A
    must specify 'output_map' in step 0 of ensemble 'e'
A | add X=A > Y=B | add X=A > Y=B
    ensemble tensor 'B' can appear in an output map only once for ensemble 'e' step 1
A | add X=A > Y=B | add X=A > Y=u
    ensemble tensor 'u' is unused in ensemble 'e'
A A2 | add X=A > Y=B
    ensemble input 'A2' for ensemble e' is not used
A | add X=A > Y=C
    ensemble output 'B' for ensemble e' is not used
A | two X=A X2=nowhere > Y=B
    output 'B' for ensemble 'e' is not written: at least one of its depending tensors, 'nowhere', is not
    connected
A | two X=A X2=u > Y=t | add X=t > Y=u | add X=t > Y=B
    output 'B' for ensemble 'e' is not written: at least one of its depending tensors, 'u', is not connected
A | add X=t > Y=u | add X=u > Y=t | add X=A > Y=B
    ensemble tensor 't' is unused in ensemble 'e'
"""


class TestGraph:
    def test_steps_in_any_order(self):
        graph = draw("add X=t > Y=B", "add X=A > Y=t")
        assert graph.producers == {"B": 0, "t": 1}
        assert graph.consumers == {"t": (0,), "A": (1,)}

    def test_only_what_leads_to_an_output(self):
        graph = draw("add X=A > Y=B", "two X=A X2=A > Y2=C", outputs="B C")
        assert graph.leading_to(["C"]) == ({1}, {"A", "C"})
        assert graph.leading_to(["B", "C"])[0] == {0, 1}

    def test_an_input_may_be_an_output(self):
        assert draw("add X=A > Y=B", outputs="A B").producers == {"B": 0}

    @pytest.mark.parametrize(("graph", "words"), cases(REFUSED))
    def test_refused(self, graph, words):
        inputs, *steps = graph.split(" | ")
        with pytest.raises(BridgeError) as caught:
            draw(*steps, inputs=inputs)
        assert caught.value.message == words
        assert caught.value.code == ErrorCode.INVALID_ARG

    def test_no_name(self):
        with pytest.raises(BridgeError, match="must specify 'model_name' in step 0"):
            draw(":1 X=A > Y=B")

    def test_an_input_is_not_written(self):
        # Triton loads this, and then runs the step for ever.
        with pytest.raises(BridgeError, match="step 0 cannot write it"):
            draw("add X=A > Y=A", "add X=A > Y=B")


class TestMembers:
    @pytest.mark.parametrize(
        ("config", "members", "words"),
        [
            (
                ensemble("two X=A > Y=B"),
                [member("two", "X X2")],
                "in ensemble e, input X2 in model two is not mapped to any ensemble tensors",
            ),
            (
                ensemble("add Z=A > Y=B"),
                [member("add")],
                "in ensemble e, ensemble tensor A is mapping to non-existing input Z in model add",
            ),
            (
                ensemble("add X=A > Z=B"),
                [member("add")],
                "in ensemble e, ensemble tensor B is mapped from non-existing output Z in model add",
            ),
            (
                ensemble("add X=A > Y=t", "addint X=t > Y=B", outputs="B:INT32[-1]"),
                [member("add"), member("addint", "X:INT32[-1]", "Y:INT32[-1]")],
                (
                    "in ensemble e, ensemble tensor t: inconsistent data type: TYPE_FP32 is inferred from "
                    "model add while TYPE_INT32 is inferred from model addint"
                ),
            ),
            (
                ensemble("four X=A > Y=B", inputs="A:FP32[-1,-1]"),
                [member("four", "X:FP32[4]", "Y:FP32[4]")],
                (
                    "in ensemble e, ensemble tensor A: inconsistent shape: [-1,-1] is inferred from model "
                    "e while [4] is inferred from model four"
                ),
            ),
            (
                ensemble("addb X=A > Y=B", batch=16),
                [member("addb", batch=8)],
                (
                    "ensemble e allows maximum batch size 16, but it contains model addb which only "
                    "allows maximum batch size to be 8"
                ),
            ),
            (
                ensemble("dec X=A > Y=t", "two X=t X2=A > Y=B"),
                [member("dec", decoupled=True), member("two", "X X2")],
                (
                    "in ensemble e, step of model 'two' receives inputs originated from different "
                    "decoupled models"
                ),
            ),
            (
                ensemble("dec X=A > Y=B", "add X=A > Y=C", outputs="B C"),
                [member("dec", decoupled=True), member("add")],
                (
                    "in ensemble e, step of model 'e' receives inputs originated from different "
                    "decoupled models"
                ),
            ),
        ],
    )
    def test_refused(self, config, members, words):
        with pytest.raises(BridgeError) as caught:
            wired(config, *members)
        assert caught.value.message == words

    @pytest.mark.parametrize(
        ("config", "members"),
        [
            (ensemble("opt X=A > Y=B"), [member("opt", "X X2?")]),
            (
                ensemble("b X=A > Y=B", inputs="A:FP32[-1,4]", outputs="B:FP32[-1,4]"),
                [member("b", "X:FP32[4]", "Y:FP32[4]", batch=8)],
            ),
            (
                ensemble("b X=A > Y=B", inputs="A:FP32[4]", outputs="B:FP32[4]"),
                [member("b", "X:FP32[4]", "Y:FP32[4]", batch=8)],
            ),
            (
                ensemble("four X=A > Y=B", inputs="A:FP32[4]", outputs="B:FP32[4]", batch=4),
                [member("four", "X:FP32[4]", "Y:FP32[4]")],
            ),
        ],
    )
    def test_fits(self, config, members):
        _, wiring = wired(config, *members)
        assert not wiring.decoupled

    def test_origins_go_from_one_decoupled_member_to_the_next(self):
        config = ensemble("dec X=A > Y=t", "add X=t > Y=u", "dec X=u > Y=v", "add X=v > Y=B")
        _, wiring = wired(config, member("dec", decoupled=True), member("add"))
        assert wiring.fans_out == {0, 2}
        assert wiring.origins == (ROOT, 0, 0, 2)
        assert wiring.output_origin == 2
        assert wiring.decoupled


@pytest.mark.parametrize(
    ("shape", "dims", "made_batched", "batched", "fitted"),
    [
        ((4,), (4,), True, False, (4,)),
        ((4,), (4,), False, True, (1, 4)),
        ((1, 4), (4,), True, False, (4,)),
        ((2, 4), (4,), True, False, (2, 4)),
        ((2, 4), (4,), False, True, (2, 4)),
        ((1, 4), (-1, -1), True, False, (1, 4)),
        ((5,), (4,), False, True, (5,)),
        ((), (), False, True, (1,)),
        ((4,), (4,), True, True, (4,)),
        ((1, 4), (4,), False, False, (1, 4)),
    ],
)
def test_fit_shape(shape, dims, made_batched, batched, fitted):
    assert fit_shape(shape, dims, made_batched=made_batched, batched=batched) == fitted
