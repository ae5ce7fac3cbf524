"""The files of examples/cluster: the Slurm script beside stand-ins for Slurm, Ray and m2forge; manifests by schema."""

import json
import os
import signal
import subprocess
import time
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

EXAMPLES = Path(__file__).parents[2] / "examples" / "cluster"
PROGRAMS = {
    "scontrol": 'printf "a1\\nb2\\nc3\\n"',
    # Runs the command of its node here; its own options come first.
    "srun": 'while [[ $1 == --* ]]; do shift; done; echo $$ >> "$LOG.sruns"; exec "$@"',
    "ray": """
if [ "$1" = status ]; then
    sed 's/.*/ 1 node_&/' "$LOG.up" 2>/dev/null
else
    echo "ray $*" >> "$LOG"
    [ -e "$LOG.broken" ] || echo x >> "$LOG.up"
    exec sleep 600
fi""",
    "m2forge": """
trap 'echo stopped >> "$LOG"; exit 130' TERM
echo "m2forge $*" >> "$LOG"
for _ in $(seq 6000); do [ -e "$LOG.held" ] || exit 7; sleep 0.05; done""",
}
LIMIT_S = 60.0


def start(folder: Path, max_looks: int = 1200) -> subprocess.Popen[bytes]:
    for name, text in PROGRAMS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    own = {"PATH": f"{folder}:{os.environ['PATH']}", "LOG": str(folder / "log"), "POLL_S": "0.05"}
    own["MAX_LOOKS"] = str(max_looks)
    command = [str(EXAMPLES / "slurm.sh"), "my.toml", "--runs", "/shared/my runs"]
    return subprocess.Popen(command, env=os.environ | own | {"SLURM_JOB_NODELIST": "a1,b2,c3"})


def lines(folder: Path) -> list[str]:
    return (folder / "log").read_text().splitlines() if (folder / "log").exists() else []


def assert_ended(folder: Path) -> None:
    for pid in (folder / "log.sruns").read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_the_slurm_script_starts_ray_then_the_run(tmp_path: Path) -> None:
    assert start(tmp_path).wait(LIMIT_S) == 7, "the status is that of m2forge"
    head, *workers, run = lines(tmp_path)
    assert head == "ray start --head --port=6379 --node-name=a1 --include-dashboard=false --block"
    assert sorted(workers) == [f"ray start --address=a1:6379 --node-name={node} --block" for node in ("b2", "c3")]
    told = "--set cluster.launcher=ray --set cluster.ray.address=a1:6379"
    assert run == f"m2forge rl my.toml --runs /shared/my runs {told}"
    assert_ended(tmp_path)


def test_the_slurm_script_passes_sigterm_to_the_run(tmp_path: Path) -> None:
    (tmp_path / "log.held").touch()
    script, until_s = start(tmp_path), time.monotonic() + LIMIT_S
    while not any(line.startswith("m2forge") for line in lines(tmp_path)):
        assert time.monotonic() < until_s
        time.sleep(0.05)
    script.send_signal(signal.SIGTERM)
    assert script.wait(LIMIT_S) == 130
    assert lines(tmp_path)[-1] == "stopped"
    assert_ended(tmp_path)


def test_the_slurm_script_ends_where_ray_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "log.broken").touch()
    assert start(tmp_path, max_looks=5).wait(LIMIT_S) == 2
    assert not any(line.startswith("m2forge") for line in lines(tmp_path))
    assert_ended(tmp_path)


def record(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    fields = required | optional
    return {"type": "object", "properties": fields, "required": [*required], "additionalProperties": False}


def items(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema, "minItems": 1}


TEXT, COUNT, FLAG = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
SECRET = record({"secretKeyRef": record({"name": TEXT, "key": TEXT})})
CONTAINER = record(
    {"name": TEXT, "image": TEXT},
    workingDir=TEXT,
    env=items(record({"name": TEXT}, value=TEXT, valueFrom=SECRET)),
    resources=record({"requests": TEXTS, "limits": TEXTS}),
    volumeMounts=items(record({"name": TEXT, "mountPath": TEXT})),
)
VOLUME = record({"name": TEXT, "persistentVolumeClaim": record({"claimName": TEXT})})
POD = record({"spec": record({"containers": items(CONTAINER)}, volumes=items(VOLUME))})
GROUP = {"groupName": TEXT, "replicas": COUNT, "minReplicas": COUNT, "maxReplicas": COUNT}
CLUSTER = {
    "headGroupSpec": record({"rayStartParams": TEXTS, "template": POD}),
    "workerGroupSpecs": items(record({**GROUP, "rayStartParams": TEXTS, "template": POD})),
}
RAY_JOB = record(
    {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayJob"},
        "metadata": record({"name": TEXT}),
        "spec": record(
            {"entrypoint": TEXT, "rayClusterSpec": record(CLUSTER)}, shutdownAfterJobFinishes=FLAG, backoffLimit=COUNT
        ),
    }
)
"""The fields of KubeRay's RayJob and of Kubernetes' pods that the manifest uses."""


def test_the_rayjob_has_the_fields_of_its_kind() -> None:
    manifest = yaml.safe_load((EXAMPLES / "rayjob.yaml").read_text())
    jsonschema.validate(manifest, RAY_JOB)
    spec = manifest["spec"]["rayClusterSpec"]
    pods = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    for pod in [pod["template"]["spec"] for pod in pods]:
        mounted = [mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]]
        assert mounted == [volume["name"] for volume in pod["volumes"]]
    manifest["spec"]["entrypoints"] = manifest["spec"].pop("entrypoint")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(manifest, RAY_JOB)


def test_the_cluster_of_ray_up_satisfies_rays_own_schema() -> None:
    # Without importing Ray, which takes seconds.
    schema = json.loads(Path(str(distribution("ray").locate_file("ray/autoscaler/ray-schema.json"))).read_text())
    config = yaml.safe_load((EXAMPLES / "ray_up.yaml").read_text())
    jsonschema.validate(config, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(config | {"worker_ips": []}, schema)
