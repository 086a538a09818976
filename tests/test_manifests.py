"""The Kubernetes manifests: fields that exist, references that resolve, and options that the command line has.

The tables list fields of objects as the Kubernetes API (apps/v1, v1) and KubeRay (ray.io/v1) define them, as far as the
manifests use their parents: a misspelled field is not in them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped, unused-ignore]

from outpace.cli.ray_app import parsed
from outpace.core.errors import BadInput
from outpace.integrations.ray.deployment import Scale
from outpace.serving.app import build_app
from serving_support import service
from test_deploy import DOCKERFILE, ROOT, parsed as serve_options

PLAIN, RAY = ROOT / "deploy" / "deployment.yaml", ROOT / "deploy" / "rayservice.yaml"
MAP, TEXT, NUMBER, FLAG, NAME = "map", str, int, bool, (str, int)


def items(of: Any) -> list[Any]:
    return [of]


PROBE = {
    **dict.fromkeys(("initialDelaySeconds", "periodSeconds", "timeoutSeconds", "failureThreshold"), NUMBER),
    "httpGet": {"path": TEXT, "port": NAME},
    "exec": {"command": items(TEXT)},
}
SECURITY = {
    **dict.fromkeys(("runAsNonRoot", "allowPrivilegeEscalation", "readOnlyRootFilesystem"), FLAG),
    **dict.fromkeys(("runAsUser", "runAsGroup"), NUMBER),
    "capabilities": {"add": items(TEXT), "drop": items(TEXT)},
}
CONTAINER = {
    **dict.fromkeys(("name", "image", "imagePullPolicy"), TEXT),
    **dict.fromkeys(("command", "args"), items(TEXT)),
    **dict.fromkeys(("startupProbe", "livenessProbe", "readinessProbe"), PROBE),
    "ports": items({"name": TEXT, "containerPort": NUMBER, "protocol": TEXT}),
    "env": items({"name": TEXT, "value": TEXT}),
    "resources": {"requests": MAP, "limits": MAP},
    "securityContext": SECURITY,
    "volumeMounts": items({"name": TEXT, "mountPath": TEXT, "readOnly": FLAG, "subPath": TEXT}),
}
VOLUME = {"name": TEXT, "emptyDir": MAP, "secret": {"secretName": TEXT}, "persistentVolumeClaim": {"claimName": TEXT}}
METADATA = {"name": TEXT, "namespace": TEXT, "labels": MAP, "annotations": MAP}
POD = {
    "terminationGracePeriodSeconds": NUMBER,
    "securityContext": {**SECURITY, "fsGroup": NUMBER},
    "containers": items(CONTAINER),
    "volumes": items(VOLUME),
    "nodeSelector": MAP,
}
TEMPLATE = {"metadata": METADATA, "spec": POD}
OBJECT = {"apiVersion": TEXT, "kind": TEXT, "metadata": METADATA}
SCHEMAS: dict[str, Any] = {
    "apps/v1 Deployment": {
        **OBJECT,
        "spec": {
            "replicas": NUMBER,
            "selector": {"matchLabels": MAP},
            "strategy": {"type": TEXT, "rollingUpdate": {"maxUnavailable": NAME, "maxSurge": NAME}},
            "template": TEMPLATE,
        },
    },
    "v1 Service": {
        **OBJECT,
        "spec": {
            "type": TEXT,
            "selector": MAP,
            "ports": items({"name": TEXT, "port": NUMBER, "targetPort": NAME, "protocol": TEXT}),
        },
    },
    "ray.io/v1 RayService": {
        **OBJECT,
        "spec": {
            "serveConfigV2": TEXT,
            "rayClusterConfig": {
                "rayVersion": TEXT,
                "enableInTreeAutoscaling": FLAG,
                "headGroupSpec": {"rayStartParams": MAP, "template": TEMPLATE},
                "workerGroupSpecs": items(
                    {
                        "groupName": TEXT,
                        **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), NUMBER),
                        "rayStartParams": MAP,
                        "template": TEMPLATE,
                    }
                ),
            },
        },
    },
}
APPLICATION = {"name": TEXT, "import_path": TEXT, "route_prefix": TEXT, "args": {"options": TEXT, "replicas": NAME}}


def wrong(value: Any, schema: Any, where: str) -> list[str]:
    """What in a value does not fit a schema."""
    if schema == MAP:
        fits = isinstance(value, dict) and all(isinstance(one, str | int) for one in value.values())
        return [] if fits else [f"{where}: not a map of plain values"]
    if isinstance(schema, list):
        if not isinstance(value, list) or not value:
            return [f"{where}: not a list"]
        return [each for at, one in enumerate(value) for each in wrong(one, schema[0], f"{where}[{at}]")]
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            return [f"{where}: not an object"]
        unknown = [f"{where}: no field '{name}'" for name in value if name not in schema]
        return unknown + [
            each
            for name, one in value.items()
            if name in schema
            for each in wrong(one, schema[name], f"{where}.{name}")
        ]
    return [] if isinstance(value, schema) else [f"{where}: {value!r} is of another type"]


def objects(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def pods(value: Any) -> list[dict[str, Any]]:
    """Every pod's specification in an object."""
    if isinstance(value, list):
        return [pod for one in value for pod in pods(one)]
    if not isinstance(value, dict):
        return []
    return ([value] if "containers" in value else []) + [pod for one in value.values() for pod in pods(one)]


@pytest.mark.parametrize("path", [PLAIN, RAY], ids=lambda path: path.name)
def test_the_fields_exist(path: Path) -> None:
    for one in objects(path):
        assert wrong(one, SCHEMAS[f"{one['apiVersion']} {one['kind']}"], one["kind"]) == []


def test_a_misspelled_field_and_a_wrong_type_are_found() -> None:
    [deployment, _] = objects(PLAIN)
    schema = SCHEMAS["apps/v1 Deployment"]
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    container["readynessProbe"] = container.pop("readinessProbe")
    assert wrong(deployment, schema, "x") == ["x.spec.template.spec.containers[0]: no field 'readynessProbe'"]
    del container["readynessProbe"]
    deployment["spec"]["replicas"] = "two"
    assert wrong(deployment, schema, "x") == ["x.spec.replicas: 'two' is of another type"]


@pytest.mark.parametrize("path", [PLAIN, RAY], ids=lambda path: path.name)
def test_mounted_volumes_and_named_ports_exist(path: Path) -> None:
    for one in objects(path):
        for pod in pods(one):
            volumes = {volume["name"] for volume in pod["volumes"]}
            for container in pod["containers"]:
                assert {mount["name"] for mount in container["volumeMounts"]} == volumes
                ports = {port["name"] for port in container["ports"]} if "ports" in container else set()
                for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                    get = container.get(probe, {}).get("httpGet")
                    assert get is None or get["port"] in ports


def test_the_deployment_runs_the_server_and_its_probes_ask_for_paths_that_exist() -> None:
    deployment, balancer = objects(PLAIN)
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    options = serve_options(["outpace", "serve", *container["args"]])
    paths = {getattr(route, "path", None) for route in build_app(service()).routes}
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert {container[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe")} == {"/health"}
    assert {"/health", "/ready"} <= paths
    pod = deployment["spec"]["template"]
    assert pod["spec"]["terminationGracePeriodSeconds"] > options["time_limit"]
    labels = pod["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert balancer["spec"]["selector"].items() <= labels.items()
    [port] = container["ports"]
    assert port["containerPort"] == serve_options(["outpace", "serve"])["port"]
    assert balancer["spec"]["ports"][0]["targetPort"] == port["name"]
    assert str(pod["spec"]["securityContext"]["runAsUser"]) in DOCKERFILE.read_text()
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert "/var/cache/outpace" in mounted
    assert str(Path(options["api_keys"]).parent) in mounted


def test_the_rayservice_names_an_application_that_exists_and_options_that_it_takes() -> None:
    [found] = objects(RAY)
    config = yaml.safe_load(found["spec"]["serveConfigV2"])
    assert list(config) == ["applications"]
    [application] = config["applications"]
    assert wrong(application, APPLICATION, "application") == []
    module, _, name = application["import_path"].partition(":")
    assert callable(getattr(__import__(module, fromlist=[name]), name))
    options = parsed(application["args"]["options"])
    scale = Scale.parse(str(application["args"]["replicas"]))
    [group] = found["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert (group["minReplicas"], group["maxReplicas"]) == (scale.least, scale.most)
    worker = group["template"]["spec"]
    assert int(worker["containers"][0]["resources"]["limits"]["cpu"]) >= options["threads"]
    assert worker["terminationGracePeriodSeconds"] > options["time_limit"]
    for pod in pods(found):
        [container] = pod["containers"]
        assert str(Path(options["api_keys"]).parent) in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_options_that_the_proxy_decides_are_refused() -> None:
    for option in ("--port 9000", "--host 0.0.0.0", "--ray", "--replicas 2"):
        with pytest.raises(BadInput, match="Ray Serve decides"):
            parsed(option)


def test_what_the_comments_name_exists() -> None:
    for file in (PLAIN, RAY):
        text = file.read_text()
        for path in re.findall(r"(?:docs|deploy)/[\w./-]+\.\w+", text):
            assert (ROOT / path).exists(), path
        for argument in re.findall(r"--build-arg (\w+)=", text):
            assert f"ARG {argument}" in DOCKERFILE.read_text()
