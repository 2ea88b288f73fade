"""The manifest of deploy/ray is a configuration of Ray Serve that this package accepts."""

from pathlib import Path

import pytest
import yaml

from gpubridge.ray.settings import FleetSettings

MANIFEST = Path(__file__).parents[2] / "deploy" / "ray" / "rayservice.yaml"


@pytest.fixture
def service():
    return next(iter(yaml.safe_load_all(MANIFEST.read_text())))["spec"]


def test_its_arguments_and_ports_are_those_of_the_fleet(service):
    (application,) = yaml.safe_load(service["serveConfigV2"])["applications"]
    settings = FleetSettings.from_args(application["args"])
    cluster = service["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        (container,) = group["template"]["spec"]["containers"]
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        assert ports == {
            "http": settings.http_port,
            "h2c": settings.grpc_port,
            "metrics": settings.metrics_port,
        }
        (mount,) = container["volumeMounts"]
        assert settings.model_repository == (mount["mountPath"],)


@pytest.mark.extra
def test_ray_serve_accepts_it(service):
    pytest.importorskip("ray.serve", reason="needs ray[serve]")
    from ray.serve.schema import ServeDeploySchema

    from gpubridge.ray import build_app
    from gpubridge.ray.deployment import server_deployment

    config = ServeDeploySchema(**yaml.safe_load(service["serveConfigV2"]))
    (application,) = config.applications
    assert application.deployments[0].name == server_deployment().name
    assert build_app(application.args) is not None
