"""One request of an ensemble as pure bookkeeping: which calls are due, which responses, in what order."""

from gpubridge.engine.ensemble.execution_plan import ExecutionState, plan_execution
from tests.unit.ensembles import ensemble, member, wired

ADD = member("add")
TWO = member("two", "X X2")
DEC = member("dec", decoupled=True)
OPT = member("opt", "X X2?")


def run_of(config, *members, outputs=()):
    graph, wiring = wired(config, *members)
    return ExecutionState(plan_execution(graph, wiring, outputs))


def calls(progress):
    """The calls to be made: step index and inputs."""
    return [(call.step.index, call.inputs) for call in progress.calls]


def test_a_chain():
    run = run_of(ensemble("add X=A > Y=t", "add X=t > Y=B"), ADD)
    first = run.begin({"A": "a"})
    assert calls(first) == [(0, {"X": "a"})]
    second = run.answered(first.calls[0], {"Y": "t"}, last=True)
    assert calls(second) == [(1, {"X": "t"})]
    assert not second.over
    third = run.answered(second.calls[0], {"Y": "b"}, last=True)
    assert third.over
    assert third.responses == [{"B": "b"}]


def test_a_diamond_waits_for_both_sides():
    run = run_of(ensemble("add X=A > Y=t", "add X=A > Y=u", "two X=t X2=u > Y=B"), ADD, TWO)
    first = run.begin({"A": "a"})
    assert calls(first) == [(0, {"X": "a"}), (1, {"X": "a"})]
    assert calls(run.answered(first.calls[1], {"Y": "u"}, last=True)) == []
    joined = run.answered(first.calls[0], {"Y": "t"}, last=True)
    assert calls(joined) == [(2, {"X": "t", "X2": "u"})]
    assert run.answered(joined.calls[0], {"Y": "b"}, last=True).responses == [{"B": "b"}]


def test_only_the_steps_that_are_asked_for_run():
    run = run_of(ensemble("add X=A > Y=B", "add X=A > Y=C", outputs="B C"), ADD, outputs=("C",))
    first = run.begin({"A": "a"})
    assert calls(first) == [(1, {"X": "a"})]
    end = run.answered(first.calls[0], {"Y": "c"}, last=True)
    assert end.over
    assert end.responses == [{"C": "c"}]


def test_missing_optional_tensors_are_left_out():
    config = ensemble("opt X=A X2=A2 > Y=B", inputs="A A2?", outputs="B")
    run = run_of(config, OPT)
    first = run.begin({"A": "a"})
    assert calls(first) == [(0, {"X": "a"})]
    end = run.answered(first.calls[0], {}, last=True)
    assert end.over
    assert end.responses == [{}]


def test_an_input_that_is_an_output():
    run = run_of(ensemble("add X=A > Y=B", outputs="A B"), ADD)
    first = run.begin({"A": "a"})
    end = run.answered(first.calls[0], {"Y": "b"}, last=True)
    assert end.responses == [{"A": "a", "B": "b"}]


def test_tensors_are_forgotten_after_their_last_use():
    run = run_of(ensemble("add X=A > Y=t", "add X=t > Y=B"), ADD)
    call = run.begin({"A": "a"}).calls[0]
    assert call.group.values == {}


class TestDecoupled:
    CHAIN = ensemble("dec X=A > Y=t", "add X=t > Y=B")

    def test_each_answer_flows_on(self):
        run = run_of(self.CHAIN, DEC, ADD)
        source = run.begin({"A": "a"}).calls[0]
        waves = [run.answered(source, {"Y": i}, last=False).calls[0] for i in range(3)]
        assert [group.inputs for group in waves] == [{"X": 0}, {"X": 1}, {"X": 2}]
        assert not run.ended(source).over
        said = [run.answered(group, {"Y": i}, last=True) for i, group in enumerate(waves)]
        assert [progress.responses for progress in said] == [[{"B": 0}], [{"B": 1}], [{"B": 2}]]
        assert [progress.over for progress in said] == [False, False, True]

    def test_responses_keep_the_order_of_their_origin(self):
        run = run_of(self.CHAIN, DEC, ADD)
        source = run.begin({"A": "a"}).calls[0]
        first = run.answered(source, {"Y": 0}, last=False).calls[0]
        second = run.answered(source, {"Y": 1}, last=True).calls[0]
        assert run.answered(second, {"Y": "late"}, last=True).responses == []
        end = run.answered(first, {"Y": "early"}, last=True)
        assert end.responses == [{"B": "early"}, {"B": "late"}]
        assert end.over

    def test_no_answer_at_all(self):
        run = run_of(self.CHAIN, DEC, ADD)
        end = run.ended(run.begin({"A": "a"}).calls[0])
        assert end.over
        assert end.responses == []

    def test_decoupled_after_decoupled(self):
        run = run_of(ensemble("dec X=A > Y=t", "dec X=t > Y=B"), DEC)
        source = run.begin({"A": "a"}).calls[0]
        inner = [run.answered(source, {"Y": i}, last=i == 1).calls[0] for i in range(2)]
        responses = []
        for i, call in enumerate(inner):
            for j in range(2):
                responses += run.answered(call, {"Y": (i, j)}, last=False).responses
        assert responses == [{"B": (i, j)} for i in range(2) for j in range(2)]
        assert not run.ended(inner[0]).over
        assert run.ended(inner[1]).over

    def test_an_answer_is_passed_on_when_all_that_came_of_it_has_left(self):
        run = run_of(self.CHAIN, DEC, ADD)
        source = run.begin({"A": "a"}).calls[0]
        group = run.answered(source, {"Y": 0}, last=False).calls[0]
        said = run.answered(group, {"Y": "b"}, last=True)
        assert said.responses == [{"B": "b"}]
        # The client has not read it yet.
        assert said.passed_on == []
        assert run.passed_on(1).passed_on == [source]
        assert run.passed_on(1).passed_on == []

    def test_answers_that_lead_to_no_response_are_passed_on(self):
        config = ensemble("dec X=A > Y=t", "dec X=t > Y=B")
        run = run_of(config, DEC)
        source = run.begin({"A": "a"}).calls[0]
        inner = run.answered(source, {"Y": 0}, last=False).calls[0]
        assert run.ended(inner).passed_on == [source]

    def test_no_more_calls_of_a_step_than_allowed(self):
        run = run_of(ensemble("dec X=A > Y=t", "add X=t > Y=B", inflight=2), DEC, ADD)
        source = run.begin({"A": "a"}).calls[0]
        made = []
        for i in range(5):
            made += run.answered(source, {"Y": i}, last=False).calls
        assert [call.inputs for call in made] == [{"X": 0}, {"X": 1}]
        run.ended(source)
        answers = []
        over = False
        while made:
            call = made.pop(0)
            progress = run.answered(call, {"Y": call.inputs["X"]}, last=True)
            made += progress.calls
            answers += progress.responses
            assert len(made) <= 2
            over = progress.over
        assert over
        assert answers == [{"B": i} for i in range(5)]
