"""The files of deploy/ start this server: its flags, its ports, its metrics and its signals."""

import argparse
import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

import gpubridge
from gpubridge.cli import serve, tritonserver
from tests.commands import run_command

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
METRICS = ROOT / "docs" / "reference" / "metrics.md"
METRIC = re.compile(r"\b(?:nv|gpubridge)_[a-z_]+\b")
CHART = DEPLOY / "helm" / "gpubridge"


def documents(path: str) -> list[dict]:
    return list(yaml.safe_load_all((DEPLOY / path).read_text()))


def settings(arguments: list[str], command=tritonserver):
    """Return the settings that a command line spells; fails where it is refused."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return serve.server_settings(parser.parse_args(arguments))


def pods() -> dict[str, tuple[dict, int]]:
    """The pod of each manifest, with its grace period."""
    deployment = documents("kubernetes/gpubridge.yaml")[0]["spec"]["template"]["spec"]
    runtime = documents("kserve/clusterservingruntime.yaml")[0]["spec"]
    service = documents("kserve/inferenceservice.yaml")[0]["spec"]["predictor"]
    return {
        "kubernetes": (deployment, deployment["terminationGracePeriodSeconds"]),
        "kserve": (runtime, service["terminationGracePeriodSeconds"]),
    }


@pytest.mark.parametrize("name", ["kubernetes", "kserve"])
def test_a_pod_starts_the_server_that_its_probes_ask(name):
    pod, grace = pods()[name]
    (container,) = pod["containers"]
    assert container["image"].endswith(f":{gpubridge.__version__}")
    told = settings(container["args"])
    served = {told.http.port, told.grpc.port, told.metrics_endpoint.port}
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert set(ports.values()) <= served
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        get = container[probe]["httpGet"]
        assert ports.get(get["port"], get["port"]) == told.http.port
        assert get["path"] == f"/v2/health/{'live' if probe == 'livenessProbe' else 'ready'}"
    assert told.process.drain_delay_secs > 0
    assert grace > told.process.drain_delay_secs + told.process.exit_timeout_secs
    security = container["securityContext"]
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert {**pod.get("securityContext", {}), **security}["runAsNonRoot"] is True


def test_the_service_names_the_ports_of_the_pod():
    deployment, service = documents("kubernetes/gpubridge.yaml")
    template = deployment["spec"]["template"]
    (container,) = template["spec"]["containers"]
    names = {port["name"] for port in container["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} == names
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in template["spec"]["volumes"]}


def test_the_services_of_kserve_name_the_runtime():
    (runtime,) = documents("kserve/clusterservingruntime.yaml")
    formats = {each["name"] for each in runtime["spec"]["supportedModelFormats"]}
    (container,) = runtime["spec"]["containers"]
    served = settings(container["args"])
    for path in ("kserve/inferenceservice.yaml", "kserve/inferenceservice-grpc.yaml"):
        (service,) = documents(path)
        model = service["spec"]["predictor"]["model"]
        assert model["runtime"] == runtime["metadata"]["name"]
        assert model["modelFormat"]["name"] in formats
        assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
        for port in model.get("ports", []):
            assert (port["name"], port["containerPort"]) == ("h2c", served.grpc.port)


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_an_image_runs_the_server_as_a_user_without_rights(name):
    lines = (DEPLOY / name).read_text().replace("\\\n", "").splitlines()
    instructions = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    last = dict(instructions)
    assert last["USER"] == "1000"
    # The exec form: a shell in between would keep SIGTERM from the server.
    assert json.loads(last["ENTRYPOINT"]) == ["tritonserver"]
    told = settings(json.loads(last["CMD"]))
    assert last["EXPOSE"].split() == [
        str(port) for port in (told.http.port, told.grpc.port, told.metrics_endpoint.port)
    ]
    assert told.http.address == "0.0.0.0"


def test_the_unit_of_systemd_leaves_time_to_drain():
    unit = (DEPLOY / "systemd" / "gpubridge.service").read_text()
    program, command, *arguments = re.search(r"^ExecStart=(.*)$", unit, re.MULTILINE)[1].split()
    assert (Path(program).name, command) == ("gpubridge", "serve")
    told = settings(arguments, serve)
    seconds = int(re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)[1])
    assert seconds > told.process.drain_delay_secs + told.process.exit_timeout_secs
    assert "KillMode=mixed" in unit


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_the_unit_of_systemd_may_do_little_else():
    unit = DEPLOY / "systemd" / "gpubridge.service"
    told = run_command(["systemd-analyze", "security", "--offline=true", str(unit)]).stdout
    level = re.search(r"Overall exposure level for gpubridge.service: ([\d.]+)", told)
    assert level is not None, told
    assert float(level[1]) < 4.0


def test_the_composition_starts_the_server_and_scrapes_it():
    (composition,) = documents("compose/compose.yaml")
    service = composition["services"]["gpubridge"]
    assert service["image"].endswith(f":{gpubridge.__version__}")
    told = settings(service["command"])
    (scraped,) = documents("compose/prometheus.yaml")[0]["scrape_configs"]
    assert scraped["static_configs"] == [{"targets": [f"gpubridge:{told.metrics_endpoint.port}"]}]
    assert int(service["stop_grace_period"].rstrip("s")) > (
        told.process.drain_delay_secs + told.process.exit_timeout_secs
    )
    for each in composition["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in each["ports"])
        for volume in each["volumes"]:
            source = re.sub(r"^\$\{\w+:-(.*?)\}", r"\1", volume).split(":")[0]
            assert (DEPLOY / "compose" / source).exists()


def queries() -> dict[str, list[str]]:
    """The queries of each file, by its name."""
    dashboard = json.loads((DEPLOY / "compose/grafana/dashboards/gpubridge.json").read_text())
    (alerts,) = documents("compose/alerts.yaml")
    (service,) = documents("kserve/inferenceservice.yaml")
    (scaled,) = service["spec"]["predictor"]["autoScaling"]["metrics"]
    return {
        "dashboard": [each["expr"] for panel in dashboard["panels"] for each in panel["targets"]]
        + [each["query"] for each in dashboard["templating"]["list"]],
        "alerts": [rule["expr"] for group in alerts["groups"] for rule in group["rules"]],
        "kserve": [scaled["external"]["metric"]["query"]],
    }


@pytest.mark.parametrize("name", ["dashboard", "alerts", "kserve"])
def test_each_query_asks_for_metrics_that_exist(name):
    known = set(METRIC.findall(METRICS.read_text()))
    for query in queries()[name]:
        asked = {re.sub("_(bucket|count|sum)$", "", name) for name in METRIC.findall(query)}
        assert asked <= {re.sub("_(bucket|count|sum)$", "", name) for name in known}, query
        assert asked or "up{" in query
        assert query.count("(") == query.count(")")


def test_the_panels_of_the_dashboard_do_not_overlap():
    dashboard = json.loads((DEPLOY / "compose/grafana/dashboards/gpubridge.json").read_text())
    taken = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
