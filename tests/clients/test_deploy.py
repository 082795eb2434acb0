"""Check the images and manifests of scripts/deploy with external validators and the server."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxserve.commands.cli import make_parser
from jaxserve.engine.metrics import GAUGES, KV_CACHE_USAGE
from jaxserve.server.http.app import routes
from jaxserve.server.http.head_checks import OPEN_PATHS
from jaxserve.settings.config import EngineConfig
from scripts.lib.paths import ROOT
from tests.clients.conftest import Program

DEPLOY = ROOT / "scripts/deploy"
IMAGES = sorted(DEPLOY.glob("*.Dockerfile"))
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
# It holds an object that Kubernetes itself does not know.
HOSTS = DEPLOY / "kubernetes" / "hosts.yaml"
DEPLOYMENTS = ("cpu", "gpu")
# Fields that may differ between replicas on CPUs and replicas on GPUs.
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


def test_kubernetes_takes_the_manifests(apart: Program, tmp_path: Path) -> None:
    assert {path.stem for path in MANIFESTS} == {"cpu", "gpu", "hosts", "service"}
    # Of the hosts' manifest the pods that its controller makes, and the rest.
    controlled, *others = yaml.safe_load_all(HOSTS.read_text())
    template = controlled["spec"]["leaderWorkerTemplate"]
    pods = [
        {"apiVersion": "v1", "kind": "Pod", **template[name]}
        for name in ("leaderTemplate", "workerTemplate")
    ]
    for index, pod in enumerate(pods):
        pod["metadata"]["name"] = f"pod-{index}"
    made = tmp_path / "made.yaml"
    made.write_text(yaml.safe_dump_all([*pods, *others]))
    plain = [str(path) for path in MANIFESTS if path != HOSTS]
    run = apart("kubernetes-validate", "--strict", *plain, str(made))
    assert (run.stdout + run.stderr).count(" passed for resource ") == 9


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
    assert "replicas" not in deployment["spec"]  # a number would undo the autoscaler's changes
    for metric in scaler["metrics"]:
        name = metric["pods"]["metric"]["name"].removeprefix("vllm_")
        assert name in {*GAUGES, KV_CACHE_USAGE}
        assert f"vllm_{name}" in (DEPLOY / "README.md").read_text()


# The fields of a LeaderWorkerSet, by its controller's API (v1).
SET_FIELDS = {"replicas", "leaderWorkerTemplate", "rolloutStrategy", "startupPolicy"}
TEMPLATE_FIELDS = {"leaderTemplate", "workerTemplate", "size", "restartPolicy"}
OF_A_POD = {"LWS_LEADER_ADDRESS": "jaxserve-hosts-0.jaxserve-hosts", "LWS_GROUP_SIZE": "2"}


def engine_of(words: list[str]) -> tuple[EngineConfig, bool]:
    """Return an engine's settings of a command line, and whether it is a follower's."""
    options = vars(make_parser().parse_args(words))
    names = {name for name in EngineConfig.__dataclass_fields__ if name in options}
    config = EngineConfig(**{name: options[name] for name in names})
    return config, options.get("headless", False)


def check_hosts(found: list[tuple[EngineConfig, bool]]) -> None:
    """Check the settings of two hosts of one engine, of which the first leads."""
    assert [(config.node_rank, follows) for config, follows in found] == [(0, False), (1, True)]
    for config, _ in found:
        assert (config.nnodes, config.tensor_parallel_size) == (2, 8)
        assert config.nodes_secret and config.master_addr != "127.0.0.1"


def test_a_set_of_hosts_is_one_engine_whose_pods_end_together() -> None:
    controlled, service = yaml.safe_load_all(HOSTS.read_text())
    assert controlled["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    spec = controlled["spec"]
    template = spec["leaderWorkerTemplate"]
    assert spec.keys() <= SET_FIELDS and template.keys() == TEMPLATE_FIELDS
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart" and template["size"] == 2
    found = []
    for index, name in enumerate(("leaderTemplate", "workerTemplate")):
        pod = template[name]["spec"]
        [container] = pod["containers"]
        values = OF_A_POD | {"LWS_WORKER_INDEX": str(index)}
        values |= {"POD_IP": "10.0.0.7"} if index == 0 else {}
        words = "\n".join(container["args"])
        for variable, value in values.items():
            words = words.replace(f"$({variable})", value)
        assert "$(" not in words  # a variable that the controller does not set
        found.append(engine_of(words.split("\n")))
        gpus = container["resources"]["limits"]["nvidia.com/gpu"]
        assert gpus * template["size"] == found[-1][0].tensor_parallel_size
        secret = next(v["secret"] for v in pod["volumes"] if v["name"] == "secret")
        assert secret["defaultMode"] & 0o027 == 0  # see sharing.py
    check_hosts(found)
    labels = template["leaderTemplate"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels
    assert labels != template["workerTemplate"]["metadata"]["labels"]


def test_the_line_for_slurm_starts_two_hosts(tmp_path: Path) -> None:
    text = (DEPLOY / "README.md").read_text()
    found_line = re.search(r"^srun (.*?sh -c '.*?')$", text, re.MULTILINE | re.DOTALL)
    assert found_line is not None
    inner = found_line[1].partition("sh -c ")[2]
    program = tmp_path / "jaxserve"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    found = []
    for rank in ("0", "1"):
        node = {"SLURM_NNODES": "2", "SLURM_NODEID": rank, "HEAD": "node1", "HOME": str(tmp_path)}
        run = subprocess.run(
            ["sh", "-c", f"sh -c {inner}"],
            env=node | {"PATH": f"{tmp_path}:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(engine_of(run.stdout.split()))
    check_hosts(found)
