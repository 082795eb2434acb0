"""scripts/deploy: images and manifests, by the checkers of others and by what the server has."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from jaxserve.commands.cli import make_parser
from jaxserve.engine.metric_values import GAUGES
from jaxserve.server.http.app import routes
from jaxserve.server.http.guard import OPEN_PATHS
from scripts.lib.paths import ROOT
from tests.clients.conftest import Program

DEPLOY = ROOT / "scripts" / "deploy"
IMAGES = sorted(DEPLOY.glob("*.Dockerfile"))
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
DEPLOYMENTS = ("cpu", "gpu")
# What may differ between replicas on CPUs and those on GPUs.
DIFFERENT = {"image", "args", "resources", "tolerations"}


def objects(name: str) -> dict[str, Any]:
    """Return the objects of a manifest by their kind."""
    text = (DEPLOY / "kubernetes" / f"{name}.yaml").read_text()
    found = list(yaml.safe_load_all(text))
    return {item["kind"]: item for item in found}


def pod(name: str) -> dict[str, Any]:
    return objects(name)["Deployment"]["spec"]["template"]["spec"]


def server(name: str) -> dict[str, Any]:
    [container] = pod(name)["containers"]
    return container


def test_hadolint_finds_nothing_in_the_images(apart: Program) -> None:
    assert {path.name for path in IMAGES} == {"cpu.Dockerfile", "cuda.Dockerfile"}
    apart("hadolint", "--failure-threshold", "style", *map(str, IMAGES))


def test_kubernetes_takes_the_manifests(apart: Program) -> None:
    assert {path.stem for path in MANIFESTS} == {"cpu", "gpu", "service"}
    run = apart("kubernetes-validate", "--strict", *map(str, MANIFESTS))
    assert (run.stdout + run.stderr).count(" passed for resource ") == 6


def test_the_images_differ_in_cuda_alone() -> None:
    cpu, cuda = (path.read_text().partition("FROM ")[2].splitlines() for path in IMAGES)
    only_cuda = [line for line in cuda if line not in cpu]
    assert [line for line in cpu if line not in cuda] == [
        "    && pip install --no-cache-dir -c constraints.txt '.[events,otel]'",
        "    JAXSERVE_COMPILATION_CACHE_DIR=/var/lib/jaxserve/programs",
    ]
    assert all("CUDA" in line or "NVIDIA" in line or "programs" in line for line in only_cuda[1:])
    assert len(only_cuda) == 6 and only_cuda[0].startswith("# cuda13 needs")


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_an_image_runs_the_server_as_no_root_and_as_process_1(path: Any) -> None:
    text = path.read_text()
    last = text.rpartition("\nFROM ")[2]
    assert 'ENTRYPOINT ["jaxserve"]\nCMD ["serve"]' in last  # no shell between it and SIGTERM
    assert re.search(r"^USER 10001:10001$", last, re.MULTILINE)
    assert "/health" in last and "API_KEY=" not in last
    assert "VOLUME" in last and "JAXSERVE_HOST=0.0.0.0" in last
    ignored = path.with_name(f"{path.name}.dockerignore").read_text().splitlines()
    assert "*" in ignored and {"!jaxserve", "!pallas_kernels"} <= {*ignored}
    for source in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
        for name in source.split():
            assert (ROOT / name).exists() and (name == "." or f"!{name}" in ignored)


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_a_deployment_fits_the_server(name: str) -> None:
    container = server(name)
    words = container["args"]
    options = make_parser().parse_args(words)  # an unknown option ends the test
    [port] = container["ports"]
    assert port["containerPort"] == options.port
    served = {(route.path, "GET" in route.methods) for route in routes()}  # type: ignore[attr-defined]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        get = container[probe]["httpGet"]
        assert (get["path"], True) in served and get["path"] in OPEN_PATHS
        assert get["port"] == port["name"]
    grace = pod(name)["terminationGracePeriodSeconds"]
    before = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert grace >= before + options.drain_timeout + 5
    assert "api-key" not in " ".join(words) and options.open_metrics


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_secrets_and_programs_are_mounted_as_the_engine_reads_them(name: str) -> None:
    spec, container = pod(name), server(name)
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert mounts.keys() == volumes.keys()
    secret = volumes["secret"]["secret"]
    [item] = secret["items"]
    path = f"--prefix-caching-secret={mounts['secret']}/{item['path']}"
    assert path in container["args"]
    assert secret["defaultMode"] & 0o027 == 0  # see sharing.py
    context = spec["securityContext"]
    assert context["runAsNonRoot"] and context["fsGroupChangePolicy"] == "OnRootMismatch"
    image = next(path for path in IMAGES if path.stem == {"cpu": "cpu", "gpu": "cuda"}[name])
    text = image.read_text()
    assert f"USER {context['runAsUser']}:{context['runAsGroup']}" in text
    assert f'VOLUME ["{mounts["kept"]}"]' in text
    own = container["securityContext"]
    assert own["readOnlyRootFilesystem"] and not own["allowPrivilegeEscalation"]


def test_deployments_differ_in_the_card_alone() -> None:
    cpu, gpu = (objects(name)["Deployment"] for name in DEPLOYMENTS)
    assert server("gpu")["resources"]["limits"]["nvidia.com/gpu"] == 1
    for name, deployment in (("cpu", cpu), ("gpu", gpu)):
        spec = deployment["spec"]["template"]["spec"]
        spec.pop("tolerations", None)
        assert server(name)["args"][0] == "serve"
        spec["containers"][0] = {
            key: value for key, value in spec["containers"][0].items() if key not in DIFFERENT
        }
    assert cpu == gpu
    assert server("cpu")["args"][2:] == server("gpu")["args"][2:]


def test_what_replicas_share_selects_them_and_scales_by_metrics_that_exist() -> None:
    shared, deployment = objects("service"), objects("cpu")["Deployment"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert shared["Service"]["spec"]["selector"] == labels
    assert shared["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    [port] = shared["Service"]["spec"]["ports"]
    assert port["targetPort"] == server("cpu")["ports"][0]["name"]
    claim = next(v for v in pod("cpu")["volumes"] if "persistentVolumeClaim" in v)
    named = claim["persistentVolumeClaim"]["claimName"]
    assert named == shared["PersistentVolumeClaim"]["metadata"]["name"]
    scaler = shared["HorizontalPodAutoscaler"]["spec"]
    assert scaler["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert "replicas" not in deployment["spec"]  # which would undo what it did
    for metric in scaler["metrics"]:
        name = metric["pods"]["metric"]["name"].removeprefix("vllm_")
        assert name in GAUGES
        assert f"vllm_{name}" in (DEPLOY / "README.md").read_text()
