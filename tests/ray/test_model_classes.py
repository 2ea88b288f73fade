"""Which models' requests may be executed twice."""

from gpubridge.ray.model_classes import NO_RETRY, SEQUENCE, STATELESS, model_classes


def marked(text):
    return {"parameters": {"no_retry": {"string_value": text}}}


def ensemble(*members):
    return {"ensemble_scheduling": {"step": [{"model_name": name} for name in members]}}


def test_a_model_has_the_class_of_its_configuration():
    configs = {
        "plain": {"name": "plain"},
        "sequence": {"sequence_batching": {}},
        "once": marked("true"),
        "unmarked": marked("false"),
    }
    assert model_classes(configs) == {
        "plain": STATELESS,
        "sequence": SEQUENCE,
        "once": NO_RETRY,
        "unmarked": STATELESS,
    }


def test_an_ensemble_has_the_strictest_class_of_its_members():
    configs = {
        "plain": {},
        "once": marked("1"),
        "sequence": {"sequence_batching": {}},
        "all_plain": ensemble("plain"),
        "with_once": ensemble("plain", "once"),
        "nested": ensemble("with_once", "sequence"),
        "of_unknown": ensemble("plain", "elsewhere"),
    }
    found = model_classes(configs)
    assert found["all_plain"] == STATELESS
    assert found["with_once"] == found["of_unknown"] == NO_RETRY
    assert found["nested"] == SEQUENCE


def test_ensembles_that_call_each_other_are_not_retried():
    assert model_classes({"a": ensemble("b"), "b": ensemble("a")})["a"] == NO_RETRY
