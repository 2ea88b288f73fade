"""The manifests of deploy/ have no field that Kubernetes, KServe or KubeRay do not know."""

import copy
from pathlib import Path

import pytest
import yaml

from tests.codebase.manifests import manifest_errors

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "gpubridge"


def manifests() -> list[Path]:
    """Files of deploy/ with objects of Kubernetes; templates of Helm are none until rendered."""
    return sorted(
        path
        for path in DEPLOY.rglob("*.yaml")
        if CHART not in path.parents and "\nkind:" in f"\n{path.read_text()}"
    )


@pytest.mark.parametrize("path", manifests(), ids=lambda path: str(path.relative_to(DEPLOY)))
def test_a_manifest_has_known_fields_only(path):
    documents = list(yaml.safe_load_all(path.read_text()))
    assert documents
    for document in documents:
        assert manifest_errors(document) == []


def test_the_manifests_are_found():
    names = {path.parent.name for path in manifests()}
    assert {"kserve", "kubernetes"} <= names


def _set(document, path, value):
    changed = copy.deepcopy(document)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed


CONTAINER = ("spec", "template", "spec", "containers", 0)
PREDICTOR = ("spec", "predictor")


@pytest.mark.parametrize(
    ("file", "path", "value", "told"),
    [
        ("kubernetes/gpubridge.yaml", (*CONTAINER, "readynessProbe"), {}, "'readynessProbe' was"),
        ("kubernetes/gpubridge.yaml", (*CONTAINER, "args"), "--x", "'--x' is not of type 'array'"),
        ("kubernetes/gpubridge.yaml", ("spec", "selector"), None, "None is not of type 'object'"),
        ("kserve/clusterservingruntime.yaml", ("spec", "multimodel"), False, "'multimodel' was"),
        (
            "kserve/clusterservingruntime.yaml",
            ("spec", "containers", 0, "ports", 0, "containerPort"),
            "8080",
            "'8080' is not of type 'integer'",
        ),
        ("kserve/inferenceservice.yaml", (*PREDICTOR, "replicas"), 1, "'replicas' was"),
        ("kserve/inferenceservice.yaml", (*PREDICTOR, "model", "storageURI"), "x", "'storageURI'"),
        ("kserve/inferenceservice.yaml", ("kind",), "Service", "no schema of it"),
    ],
)
def test_a_field_that_is_wrong_is_found(file, path, value, told):
    document = next(yaml.safe_load_all((DEPLOY / file).read_text()))
    (error,) = manifest_errors(_set(document, path, value))
    assert told in error


def test_a_service_of_kuberay_is_checked():
    template = {"spec": {"containers": [{"name": "ray", "image": "gpubridge:0.1.0"}]}}
    group = {"groupName": "gpu", "minReplicas": 1, "maxReplicas": 4, "rayStartParams": {}}
    cluster = {
        "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": template},
        "workerGroupSpecs": [{**group, "template": template}],
    }
    service = {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": "models"},
        "spec": {"serveConfigV2": "applications: []", "rayClusterConfig": cluster},
    }
    assert manifest_errors(service) == []
    place = ("spec", "rayClusterConfig", "workerGroupSpecs", 0)
    (error,) = manifest_errors(_set(service, (*place, "nodes"), 2))
    assert error.startswith("spec.rayClusterConfig.workerGroupSpecs.0: ")
    assert "'nodes' was unexpected" in error
