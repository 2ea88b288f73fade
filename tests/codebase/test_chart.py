"""The Helm chart: its values and their schema, and what it renders."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.codebase.manifests import manifest_errors
from tests.codebase.test_deploy import settings

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "gpubridge"
DEFAULTS = (CHART / "values.yaml").read_text()
VALUES = yaml.safe_load(DEFAULTS)
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
TEMPLATES = "".join(path.read_text() for path in (CHART / "templates").iterdir())
TRIGGERS = yaml.safe_load(
    "".join(re.findall(r"^  # (.*\n)", DEFAULTS.partition("  triggers: []\n")[2], re.MULTILINE))
)
ROLE = {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/models"}
CHOICES = {
    "on GPUs": {"gpus": 1, "tolerations": [{"key": "gpu", "operator": "Exists"}]},
    "from S3": {
        "modelRepository": "s3://models/prod",
        "modelsClaim": "",
        "serviceAccount": {"create": True, "annotations": ROLE},
    },
    "scaled": {
        "autoscaling": {
            "enabled": True,
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 300}},
        }
    },
    "scaled by KEDA": {"keda": {"enabled": True, "triggers": TRIGGERS}},
    "monitored": {"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
    "alone": {
        "podDisruptionBudget": {"enabled": False},
        "podLabels": {"team": "a"},
        "podAnnotations": {"note": "x"},
    },
}


def examples():
    """The values that comments of values.yaml give as examples."""
    found = re.findall(r"^(\w+): .*  # e\.g\. (.*)$", DEFAULTS, re.MULTILINE)
    return {name: {name: yaml.safe_load(text)} for name, text in found}


def problems(values):
    errors = jsonschema.Draft7Validator(SCHEMA).iter_errors(values)
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in errors]


def test_every_value_is_used_and_in_the_schema():
    assert set(re.findall(r"\.Values\.(\w+)", TEMPLATES)) == set(VALUES)
    assert set(SCHEMA["properties"]) == {*VALUES, "global"}
    for name, value in VALUES.items():
        known = SCHEMA["properties"][name].get("properties", {})
        assert not known or set(known) == set(value), name


def test_the_server_has_the_flags_that_the_chart_passes(tmp_path):
    (tmp_path / "control").write_text("key")
    examples_of_flags = [
        each.replace("@/keys", f"@{tmp_path}") for each in examples()["extraArgs"]["extraArgs"]
    ]
    flags = re.findall(r"- (--[a-z-]+=.*)$", TEMPLATES, re.MULTILINE)
    told = settings(
        [re.sub(r"{{ .Values.(\w+) }}", lambda name: str(VALUES[name[1]]), each) for each in flags]
        + examples_of_flags
    )
    assert told.process.drain_delay_secs == VALUES["drainDelaySecs"]
    assert told.process.exit_timeout_secs == VALUES["exitTimeoutSecs"]


def test_the_documented_values_fit_the_schema():
    assert set(examples()) >= {"env", "envFrom", "volumes", "volumeMounts", "extraArgs"}
    for values in ({}, VALUES, *examples().values(), *CHOICES.values()):
        assert problems(values) == []


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"replica": 3}, "'replica' was unexpected"),
        ({"replicas": "3"}, "'3' is not of type 'integer'"),
        ({"env": {"A": "b"}}, "is not of type 'array'"),
        ({"env": [{"name": "A", "value": 1}]}, "env.0.value: 1 is not of type 'string'"),
        ({"serviceMonitor": {"interval": "15"}}, "'15' does not match"),
        ({"keda": {"triggers": [{"type": "cpu"}]}}, "'metadata' is a required property"),
        ({"autoscaling": {"cpu": 70}}, "'cpu' was unexpected"),
    ],
)
def test_values_that_are_wrong_are_refused(values, told):
    (error,) = problems(values)
    assert told in error


def rendered(values):
    helm = pytest.importorskip("helm_python")
    with helm.Chart.load(str(CHART)) as chart:
        texts = chart.render(values, name="demo", namespace="prod").values()
    found = [each for text in texts for each in yaml.safe_load_all(text) if each]
    return {document["kind"]: document for document in found}


@pytest.mark.extra
@pytest.mark.parametrize("values", [{}, *examples().values(), *CHOICES.values()])
def test_helm_renders_known_fields_only(values):
    for document in rendered(values).values():
        assert manifest_errors(document) == []


@pytest.mark.extra
def test_helm_renders_what_the_values_ask_for():
    everything = {
        **{name: value for each in examples().values() for name, value in each.items()},
        **{name: value for each in CHOICES.values() for name, value in each.items()},
        "keda": {},
    }
    found = rendered(everything)
    assert set(found) == {
        "Deployment",
        "HorizontalPodAutoscaler",
        "Service",
        "ServiceAccount",
        "ServiceMonitor",
    }
    pod = found["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert "replicas" not in found["Deployment"]["spec"]
    assert pod["metadata"]["annotations"] == {"note": "x"}
    assert pod["spec"]["serviceAccountName"] == "demo"
    assert [volume["name"] for volume in pod["spec"]["volumes"]] == ["tmp", "keys"]
    assert (container["env"], container["envFrom"]) == (everything["env"], everything["envFrom"])
    assert container["args"][0] == "--model-repository=s3://models/prod"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    plain = rendered({})
    assert set(plain) == {"Deployment", "PodDisruptionBudget", "Service"}
    assert plain["Deployment"]["spec"]["replicas"] == 2
    assert (
        "prometheus.io/port" in plain["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    )
    chosen = plain["Deployment"]["spec"]["selector"]["matchLabels"]
    assert plain["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == chosen
    for selected in (plain["Service"]["metadata"]["labels"], plain["Service"]["spec"]["selector"]):
        assert selected == chosen


@pytest.mark.extra
@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({**CHOICES["scaled"], **CHOICES["scaled by KEDA"]}, "expected one autoscaler, got two"),
        ({"keda": {"enabled": True}}, "keda.triggers: expected at least one"),
        ({"replica": 3}, "'replica' not allowed"),
    ],
)
def test_helm_refuses_values_that_do_not_fit(values, told):
    with pytest.raises(Exception, match=told):
        rendered(values)
