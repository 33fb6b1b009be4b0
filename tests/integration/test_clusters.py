"""The files of examples/cluster: real schemas, our own parsers, and the Slurm script as it runs.

No cluster is needed: Slurm's commands are scripts that start ``tieredckpt run`` on loopback
addresses.
"""

from __future__ import annotations

import copy
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from tests.support.agent import ROOT
from tests.support.ports import own_loopback
from tieredckpt.cli.config import _need
from tieredckpt.cli.metrics import _address, metrics
from tieredckpt.cli.run import run
from tieredckpt.config.network import DEFAULT_PORT
from tieredckpt.config.schema import Config, load_config
from tieredckpt.live.control import CONTROL, FOLDER_PREFIX, Request, ask
from tieredckpt.live.decide import EXIT_RESTART_HOST, Policy
from tieredckpt.live.job import joiner

FOLDER = ROOT / "examples" / "cluster"
SCRIPT = FOLDER / "live.sbatch"
WORKERS = ("jobset.yaml", "more_hosts.yaml")
TOKEN = {"CKPT_TOKEN": "0" * 64}
TERMINATED = 128 + signal.SIGTERM


def parsed(args: list[str]) -> dict[str, Any]:
    """The values that `tieredckpt run` gets. Raises click.UsageError."""
    # click keeps the option for help of the first context, and the page of commands has another.
    return copy.copy(run).make_context("run", args).params


def policy_of(options: dict[str, Any]) -> Policy:
    least, most = options["nnodes"]
    return Policy(per_host=options["size"], hosts=most, hosts_min=least)


# --- Kubernetes -----------------------------------------------------------------------------------

PREEMPTION = ("Never", "LowerPriority", "LowerOrNewerEqualPriority")
QUOTA = {"name": str, "nominalQuota": (int, str)}
QUEUE = {
    "namespaceSelector": {},
    "preemption": {"withinClusterQueue": PREEMPTION},
    "resourceGroups": [
        {"coveredResources": [str], "flavors": [{"name": str, "resources": [QUOTA]}]}
    ],
}
KUEUE: dict[str, dict[str, Any]] = {
    "ResourceFlavor": {},
    "ClusterQueue": {"spec": QUEUE},
    "LocalQueue": {"spec": {"clusterQueue": str}},
    "WorkloadPriorityClass": {"value": int},
}
"""Of kueue.x-k8s.io/v1beta2, of which no package has schemas: the fields that we use, all there."""
RULE_ACTIONS = (
    "FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts", "RestartJob",
    "RestartJobAndIgnoreMaxRestarts",
)  # fmt: skip
CHOICES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("failurePolicy", "rules", "action"): RULE_ACTIONS,
    ("restartPolicyRules", "action"): ("Restart",),
    ("restartPolicyRules", "exitCodes", "operator"): ("In", "NotIn"),
    ("emptyDir", "medium"): ("", "Memory"),
    ("onPodConditions", "type"): ("DisruptionTarget", "ConfigIssue", "PodReadyToStartContainers"),
    ("onPodConditions", "status"): ("True", "False", "Unknown"),
}
"""Values that the API server allows and the package's models do not check."""


def documents(text: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text))


def check(document: dict[str, Any]) -> None:
    """Whether the API server would know each field, and its type. Raises otherwise."""
    version, kind = document["apiVersion"], document["kind"]
    if version == "kueue.x-k8s.io/v1beta2":
        check_form(
            document, {"apiVersion": str, "kind": str, "metadata": {"name": str}, **KUEUE[kind]}
        )
        return
    # Each test process collects this file, and one of them pays for importing a thousand models.
    from kubeflow_trainer_api import models

    model = {
        ("v1", "ConfigMap"): models.IoK8sApiCoreV1ConfigMap,
        ("v1", "Service"): models.IoK8sApiCoreV1Service,
        ("batch/v1", "Job"): models.IoK8sApiBatchV1Job,
        ("jobset.x-k8s.io/v1alpha2", "JobSet"): models.JobsetV1alpha2JobSet,
    }[version, kind]
    known = model.from_dict(document)
    assert known is not None
    assert known.to_dict() == document, "a field is not known"
    check_choices(document, ())


def check_all(text: str) -> None:
    for each in documents(text):
        check(each)


def check_form(value: object, form: Any) -> None:
    if isinstance(form, dict):
        assert isinstance(value, dict)
        assert value.keys() == form.keys()
        for key, each in form.items():
            check_form(value[key], each)
    elif isinstance(form, list):
        assert isinstance(value, list)
        for item in value:
            check_form(item, form[0])
    elif form is PREEMPTION:
        assert value in form
    else:
        assert isinstance(value, form)


def check_choices(value: object, path: tuple[str, ...]) -> None:
    if isinstance(value, dict):
        for key, each in value.items():
            check_choices(each, (*path, key))
    elif isinstance(value, list):
        for each in value:
            check_choices(each, path)
    for end, allowed in CHOICES.items():
        if path[-len(end) :] == end:
            assert value in allowed


class Worker:
    """The pods of a manifest, whose first process is ``tieredckpt run``."""

    def __init__(self, text: str) -> None:
        document = next(each for each in documents(text) if each["kind"] in ("Job", "JobSet"))
        self.labels = document["metadata"]["labels"]
        spec = document["spec"]
        if document["kind"] == "JobSet":
            (replicated,) = spec["replicatedJobs"]
            spec = replicated["template"]["spec"]
        self.job = spec
        self.template = spec["template"]
        self.pod = spec["template"]["spec"]
        (self.host,) = self.pod["containers"]
        assert self.host["command"] == ["tieredckpt", "run"]
        self.options = parsed(self.host["args"])

    def volume(self, path: str) -> dict[str, Any]:
        """What is mounted there."""
        name = next(each["name"] for each in self.host["volumeMounts"] if each["mountPath"] == path)
        return next(each for each in self.pod["volumes"] if each["name"] == name)


def read(name: str) -> str:
    return (FOLDER / name).read_text()


def configuration() -> Config:
    """What the ConfigMap holds."""
    found = next(each for each in documents(read("jobset.yaml")) if each["kind"] == "ConfigMap")
    return load_config(yaml.safe_load(found["data"]["tieredckpt.yaml"]), {})


def quantity(text: str) -> int:
    number, unit = int(text[:-2]), text[-2:]
    return number << {"Mi": 20, "Gi": 30, "Ti": 40}[unit]


@pytest.mark.parametrize("name", [*WORKERS, "kueue.yaml"])
def test_the_api_server_knows_each_field(name: str):
    check_all(read(name))


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("jobset.yaml", "replicatedJobs:", "replicatedJob:"),
        ("jobset.yaml", "maxRestarts: 10", "maxRestarts: ten"),
        ("jobset.yaml", "action: FailJobSet", "action: FailJob"),
        ("jobset.yaml", "name: scriptFails, ", ""),
        ("jobset.yaml", "v1alpha2", "v1alpha1"),
        ("jobset.yaml", "action: Ignore,", "action: Skip,"),
        ("jobset.yaml", "action: Restart,", "action: Again,"),
        ("jobset.yaml", "medium: Memory", "medium: memory"),
        ("more_hosts.yaml", "operator: NotIn", "operator: OutOf"),
        ("more_hosts.yaml", "completionMode: Indexed", "completionMode: Index"),
        ("kueue.yaml", "withinClusterQueue", "withinQueue"),
        ("kueue.yaml", "LowerPriority", "Lower"),
        ("kueue.yaml", "value: 100\n", "priority: 100\n"),
    ],
)
def test_a_wrong_field_is_seen(name: str, old: str, new: str):
    text = read(name)
    assert old in text
    with pytest.raises((ValueError, AssertionError, KeyError)):
        check_all(text.replace(old, new, 1))


@pytest.mark.parametrize("name", WORKERS)
def test_a_pod_joins_the_job(name: str, tmp_path: Path):
    """Its configuration, its token, and the name that has the addresses of all pods."""
    worker, found = Worker(read(name)), configuration()
    assert worker.options["config_file"] == Path("/etc/tieredckpt/tieredckpt.yaml")
    config_map = worker.volume("/etc/tieredckpt")["configMap"]["name"]
    parts = {(each["kind"], each["metadata"]["name"]): each for each in documents(read(WORKERS[0]))}
    assert ("ConfigMap", config_map) in parts
    joiner(
        policy_of(worker.options),
        found,
        tmp_path,
        worker.options["job"],
        is_standby=False,
        environ=TOKEN,
    )

    service = parts["Service", found.discovery.dns_name.partition(":")[0]]["spec"]
    assert service["selector"] == worker.template["metadata"]["labels"]
    assert service["clusterIP"] == "None"
    assert found.discovery.dns_name.endswith(f":{DEFAULT_PORT}")
    ports = service["ports"][0]["port"], worker.host["ports"][0]["containerPort"]
    assert ports == (DEFAULT_PORT, DEFAULT_PORT)

    env = {each["name"]: each for each in worker.host["env"]}
    assert env[found.security.token_env]["valueFrom"]["secretKeyRef"]["key"] == "token"
    before = list(env)[: list(env).index("TIEREDCKPT_NODE_NAME")]
    used = re.findall(r"\$\((\w+)\)", env["TIEREDCKPT_NODE_NAME"]["value"])
    assert set(used) == set(before), "a variable is expanded only if it is declared before"


@pytest.mark.parametrize("name", WORKERS)
def test_a_pod_has_the_memory_and_the_time(name: str):
    worker, found = Worker(read(name)), configuration()
    folder = Path(found.agent.runtime_dir)
    volume = worker.volume(str(folder.parent))["emptyDir"]
    limit = quantity(volume["sizeLimit"])
    assert found.memory.capacity_bytes is not None
    assert found.memory.capacity_bytes < limit
    volumes = [each["emptyDir"] for each in worker.pod["volumes"] if "emptyDir" in each]
    assert {each["medium"] for each in volumes} == {"Memory"}
    of_pod = quantity(worker.host["resources"]["limits"]["memory"])
    assert sum(quantity(each["sizeLimit"]) for each in volumes) < of_pod
    assert worker.options["grace"] + 10 < worker.pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("name", ["tieredckpt.yaml", "jobset.yaml"])
def test_the_memory_comes_with_its_sum(name: str):
    """The comment beside ``capacity`` is what ``config check`` computes; more would not fit."""
    text = " ".join(read(name).replace("#", "").split())
    found = re.search(
        r"up to (\d+) GiB per host: (\d) ranks x \((\d) own \+ (\d) copied\) slots of ([\d.]+) GiB "
        r"= (\d+) GiB, as `tieredckpt config check FILE --state-size (\d+)GiB --ranks (\d) ", text
    )  # fmt: skip
    assert found is not None
    state, ranks, own, copied, slot, total, *again = map(float, found.groups())
    assert again == [state, ranks]
    assert ranks * (own + copied) * slot == total
    config = configuration() if name == "jobset.yaml" else load_config(FOLDER / name, {})
    most = config.memory.capacity_bytes or 0
    label_bytes = int(ranks * (own + copied)) << 12
    assert _need(config, f"{state:.0f}GiB", int(ranks), 1).total_bytes == (
        (int(total) << 30) + label_bytes
    )
    assert (int(total) << 30) + label_bytes < most
    assert _need(config, f"{state + 1:.0f}GiB", int(ranks), 1).total_bytes > most


@pytest.mark.parametrize("name", WORKERS)
def test_metrics_of_a_pod(name: str):
    """The sidecar serves those of the agent, and does not keep the pod alive."""
    pod = Worker(read(name)).pod
    (sidecar,) = pod["initContainers"]
    assert sidecar["restartPolicy"] == "Always"
    assert sidecar["command"] == ["tieredckpt", "agent", "metrics"]
    options = copy.copy(metrics).make_context("metrics", sidecar["args"]).params
    assert sidecar["ports"][0]["containerPort"] == _address(options["listen"])[1]
    assert options["runtime_dir"] == Path(configuration().agent.runtime_dir)
    (mount,) = sidecar["volumeMounts"]
    assert Path(mount["mountPath"]) in options["runtime_dir"].parents


@pytest.mark.parametrize("name", WORKERS)
def test_exit_codes_of_pods(name: str):
    worker = Worker(read(name))
    _, replaced, final = worker.job["podFailurePolicy"]["rules"]
    codes = replaced["onExitCodes"]["values"]
    assert TERMINATED in codes
    assert (EXIT_RESTART_HOST in codes) is (name == "jobset.yaml")
    assert final["action"] == "FailJob"
    assert {*codes, EXIT_RESTART_HOST, 128 + signal.SIGKILL} == {*final["onExitCodes"]["values"]}
    assert {each["onExitCodes"]["containerName"] for each in (replaced, final)} == {
        worker.host["name"]
    }


def test_all_pods_have_the_same_command_and_queue():
    first, more = map(Worker, map(read, WORKERS))
    assert first.job["parallelism"] == first.job["completions"]
    assert policy_of(first.options).hosts_to_begin <= first.job["parallelism"] <= 7
    assert first.host["args"] == more.host["args"]
    assert first.template["metadata"] == more.template["metadata"]
    assert first.pod["volumes"] == more.pod["volumes"]
    found = {
        (each["kind"], each["metadata"]["name"]): each for each in documents(read("kueue.yaml"))
    }
    values = []
    for worker in (first, more):
        queue = worker.labels["kueue.x-k8s.io/queue-name"]
        cluster_queue = found["LocalQueue", queue]["spec"]["clusterQueue"]
        (group,) = found["ClusterQueue", cluster_queue]["spec"]["resourceGroups"]
        assert {*group["coveredResources"]} == {*worker.host["resources"]["limits"]}
        assert [("ResourceFlavor", each["name"]) in found for each in group["flavors"]]
        name = worker.labels["kueue.x-k8s.io/priority-class"]
        values.append(found["WorkloadPriorityClass", name]["value"])
    assert values[0] > values[1]


def test_a_wrong_flag_is_seen():
    text = read("jobset.yaml")
    for old, new in (("--nnodes=4:7", "--nodes=3:7"), ("--grace=100", "--grace=100s")):
        with pytest.raises(click.UsageError):
            Worker(text.replace(old, new))


# --- Slurm ----------------------------------------------------------------------------------------

COMMANDS = {
    "scontrol": r"""
case "$1 $2 $#" in
  "show hostnames 3") echo "${3//,/$'\n'}" ;;
  "requeue "*" 2") echo "$2" >> "$FAKE/requeued" ;;
  *) exit 2 ;;
esac
""",
    "squeue": r"""
for each in "$@"; do
  case $each in
    --noheader | --states=RUNNING | --format=%N) ;;
    --jobs=*) cat "$FAKE/nodes-${each#*=}" ;;
    *) exit 2 ;;
  esac
done
""",
    # A node has an address of its own, and memory of its own.
    "srun": r"""
while [[ $1 == --* ]]; do
  case $1 in
    --nodes=1 | --ntasks=1 | --cpu-bind=none) ;;
    --nodelist=*) node=${1#*=} ;;
    *) exit 2 ;;
  esac
  shift
done
set -- "${@/"$TIEREDCKPT_RUNTIME_DIR"/"$FAKE/$node"}"
mkdir -p "$FAKE/run-$node"
export XDG_RUNTIME_DIR=$FAKE/run-$node
export TIEREDCKPT_RUNTIME_DIR=$FAKE/$node TIEREDCKPT_NETWORK__CIDR=$node/32 GLOO_SOCKET_IFNAME=lo
echo $$ > "$FAKE/pid-$node"
exec "$@" >> "$FAKE/$node.log" 2>&1
""",
    "openssl": r"""
[[ $* == "rand -hex 32" ]] && printf '0123456789abcdef%.0s' 1 2 3 4
""",
}
TRAINING = """
import os, time
from pathlib import Path
import torch
from tieredckpt import live

FAKE = Path(os.environ["FAKE"])

def train(world):
    torch.set_num_threads(1)
    world.init_process_group("gloo")
    model = torch.nn.Linear(4, 4)
    world.load({"model": model})
    for step in world.steps(last=8):
        with world.update(step), torch.no_grad():
            model.bias.add_(1)
        if world.rank == 0:
            with (FAKE / "steps").open("a") as file:
                file.write(f"{step}\\n")
        while step >= int((FAKE / "limit").read_text()):
            world.ping()
            time.sleep(0.005)

live.run(train, os.environ["CONFIG"])
"""


class Slurm:
    """Batch jobs on nodes that are loopback addresses; a context manager that ends them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        for name, text in COMMANDS.items():
            path = bin_folder / name
            path.write_text(f"#!/bin/bash\nset -u{text}")
            path.chmod(0o755)
        config = folder / "tieredckpt.yaml"
        config.write_text("namespace: slurm\nmemory: {capacity: 64MiB, replicas: 1}\n")
        script = folder / "train.py"
        script.write_text(TRAINING)
        self.env = {
            **os.environ,
            "PATH": f"{bin_folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(folder), "FAKE": str(folder), "CONFIG": str(config),
            "SCRIPT": str(script), "STANDBY": "0", "RANKS": "1", "HOSTS": "2", "GRACE": "60",
        }  # fmt: skip
        self._jobs: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Slurm:
        return self

    def __exit__(self, *exc: object) -> None:
        for each in self._jobs:
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)
            each.wait()

    def batch(self, job: int, nodes: list[str], *args: str, **env: str) -> subprocess.Popen[bytes]:
        (self.folder / f"nodes-{job}").write_text(",".join(nodes))
        of_job = {"SLURM_JOB_ID": str(job), "SLURM_JOB_NODELIST": ",".join(nodes)}
        process = subprocess.Popen(
            ["bash", SCRIPT, *args],
            env={**self.env, **of_job, **env},
            cwd=self.folder,
            start_new_session=True,
        )
        self._jobs.append(process)
        return process

    def text(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait for it, with a deadline."""
        limit_s = time.monotonic() + 120
        while not until():
            assert time.monotonic() < limit_s, "\n".join(map(self.text, self._logs()))
            time.sleep(0.02)

    def _logs(self) -> list[str]:
        return [path.name for path in sorted(self.folder.glob("*.log"))]

    def order(self, node: str, request: Request) -> None:
        """As `tieredckpt live` on a node, once the node has processes that can have ranks."""
        (path,) = (self.folder / f"run-{node}").glob(f"{FOLDER_PREFIX}*/{CONTROL}")
        self.wait(lambda: ask(path, Request(), 60).standbys > 0)
        ask(path, request, 60)

    def all_log(self, nodes: list[str], text: str) -> bool:
        return all(text in self.text(f"{node}.log") for node in nodes)

    def go_to(self, step: int) -> None:
        part = self.folder / "limit.part"
        part.write_text(str(step))
        part.rename(self.folder / "limit")


@pytest.fixture
def slurm(runtime_dir: Path) -> Iterator[Slurm]:
    with Slurm(runtime_dir) as found:
        yield found


def test_a_batch_job_gets_a_host_of_another_one_and_loses_its_own(slurm: Slurm):
    """The script of examples/cluster, with real hosts: one joins, one leaves at SIGTERM."""
    nodes = [f"{own_loopback()}.{number}" for number in (1, 2, 3)]
    slurm.go_to(3)
    first = slurm.batch(7, nodes[:2])
    slurm.wait(lambda: "3" in slurm.text("steps").split())
    more = slurm.batch(8, nodes[2:], "7")
    slurm.wait(lambda: slurm.all_log(nodes[2:], "ranks on this host: none"))
    slurm.order(nodes[2], Request(size=2))  # an answer: the leader knows that it can have a rank
    os.kill(int(slurm.text(f"pid-{nodes[1]}")), signal.SIGTERM)
    slurm.wait(lambda: slurm.all_log(nodes, f"host {nodes[1]} is to leave"))
    slurm.go_to(6)
    slurm.wait(lambda: slurm.all_log(nodes[1:2], f"host {nodes[1]} leaves: "))
    assert slurm.all_log(nodes[2:], "generation 2 begins; ranks on this host: 1")
    slurm.go_to(9)
    assert (first.wait(120), more.wait(120)) == (0, 0)
    assert slurm.text("steps").split() == [str(step) for step in range(1, 9)]
    assert not slurm.text("requeued")
    assert not any((slurm.folder / node).exists() for node in nodes)


@pytest.mark.parametrize(
    ("codes", "restarts", "code", "requeued"),
    [
        ((0, 143, 1), 0, 0, ""),
        ((143, 143, 143), 0, 3, "7\n"),
        ((3, 3, 1), 4, 3, "7\n"),  # a node has failed
        ((3, 3, 3), 50, 3, ""),
        ((137, 9, 9), 0, 9, ""),
    ],
)
def test_what_a_batch_job_does_with_exit_codes(
    slurm: Slurm, codes: tuple[int, ...], restarts: int, code: int, requeued: str
):
    program = slurm.folder / "bin" / "tieredckpt"
    program.write_text('#!/bin/bash\necho "${@:2}" >> "$FAKE/args"\nexit "$TIEREDCKPT_NODE_NAME"\n')
    program.chmod(0o755)
    nodes = [str(each) for each in codes]
    assert slurm.batch(7, nodes, SLURM_RESTART_COUNT=str(restarts)).wait(120) == code
    assert slurm.text("requeued") == requeued
    for line in slurm.text("args").splitlines():
        found = parsed(line.split())
        assert (found["job"], found["nnodes"], found["size"]) == ("7", (0, 2), 1)
        assert found["grace"] == 60.0
    assert (slurm.folder / ".tieredckpt-token").stat().st_mode & 0o777 == 0o600


def test_a_batch_job_that_finds_no_job_to_join_waits_in_the_queue(slurm: Slurm):
    (slurm.folder / "nodes-7").touch()
    assert slurm.batch(8, ["a"], "7").wait(120) == 3
    assert slurm.text("requeued") == "8\n"


def batch_policy() -> Policy:
    """Of the sizes that the script has by default."""
    values = dict(re.findall(r"^(\w+)=\$\{\w+:-([\w.:]+)\}", SCRIPT.read_text(), re.MULTILINE))
    args = [f"--nnodes={values['hosts']}", f"--nproc-per-node={values['ranks']}", values["script"]]
    return policy_of(parsed(args))


def test_the_options_of_the_batch_script():
    text = SCRIPT.read_text()
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, re.MULTILINE))
    assert {"requeue", "no-kill"} < options.keys()
    assert options["open-mode"] == "append"
    assert batch_policy().hosts_to_begin <= int(options["nodes"])
    name, _, notice_s = options["signal"].partition("@")
    assert name == "TERM"  # with "B:" only the script would get it
    grace = re.search(r"GRACE:-(\d+)", text)
    assert grace is not None
    assert int(grace[1]) + 10 < int(notice_s)


def test_the_configuration_of_the_batch_script(tmp_path: Path):
    """With what the script adds to it."""
    token = tmp_path / "token"
    token.write_text("0" * 64)
    token.chmod(0o600)
    environ = {
        "TIEREDCKPT_DISCOVERY__STATIC": "[node1,node2,node3,node4]",
        "TIEREDCKPT_SECURITY__TOKEN_FILE": str(token),
    }
    assert set(environ) < set(re.findall(r"^export (\w+)=", SCRIPT.read_text(), re.MULTILINE))
    found = load_config(FOLDER / "tieredckpt.yaml", environ)
    joiner(batch_policy(), found, tmp_path, "7", is_standby=False, environ={})
    assert found.tiers, "nothing would outlive the Slurm job"
