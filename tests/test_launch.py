"""The files in launch/ start train.py as their launchers and JAX want it, without root.

`nox -s lab -- launchers` runs Open MPI and Slurm for real. Nobody runs the JobSets:
these are held against models of their API, to which a misspelt field is an error.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import launchers
import pytest
import train
import yaml
from lifecycle import SAVED, STAY_DOWN
from pair import ROOT
from planted_faults import each, messages

LAUNCH = ROOT / "launch"

# ------------------------------------------------------------------------ the JobSets

FILE = "launch/jobset.yaml"
SAID_WHY = {"containerName": "train", "operator": "In", "values": [2, SAVED, STAY_DOWN]}
TAKEN = {"type": "DisruptionTarget", "status": "True"}
ENDS = [  # of a job: by its exit code, or where its node is taken away
    {"action": "FailJob", "onExitCodes": SAID_WHY},
    {"action": "FailJob", "onPodConditions": [TAKEN]},
]


def documents(root: Path, kind: str = "JobSet") -> list[dict]:
    found = yaml.safe_load_all((root / FILE).read_text())
    return [document for document in found if document["kind"] == kind]


def job_of(document: dict) -> dict:
    return document["spec"]["replicatedJobs"][0]["template"]["spec"]


def pod_of(document: dict) -> dict:
    return job_of(document)["template"]["spec"]


def jobsets_fit_their_models(root: Path) -> Iterator[str]:
    from kubeflow_trainer_api import models
    from pydantic import ValidationError

    strict = {"extra": "forbid", "by_alias": True, "by_name": False}
    quantity = models.IoK8sApimachineryPkgApiResourceQuantity
    for document in documents(root):
        pod = pod_of(document)
        for amounts in pod["containers"][0]["resources"].values():
            amounts |= {name: quantity(amount) for name, amount in amounts.items()}
        for volume in pod["volumes"]:
            if limit := volume.get("emptyDir", {}).get("sizeLimit"):
                volume["emptyDir"]["sizeLimit"] = quantity(limit)
        try:
            models.JobsetV1alpha2JobSet.model_validate(document, **strict)
        except ValidationError as error:
            yield f"{document['metadata']['name']}: {error}"


def pods_are_processes_of_jax(root: Path) -> Iterator[str]:
    """What JAX and the restart ask for, and no model knows."""
    for document in documents(root):
        spec, job, pod = document["spec"], job_of(document), pod_of(document)
        [container] = pod["containers"]
        [workers] = spec["replicatedJobs"]
        restart, down = spec["failurePolicy"]["rules"]
        mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
        python, program, *options, option, folder = container["command"]
        gpu = "nvidia.com/gpu" in container["resources"]["limits"]
        # What is, and what it has to be.
        needs = {
            "version": (document["apiVersion"], "jobset.x-k8s.io/v1alpha2"),
            # JAX counts the pods of one job, on GPUs by an account that may read them.
            "jobs": (workers["replicas"], 1),
            "account": (pod.get("serviceAccountName"), "train" if gpu else None),
            "index of a pod": (job["completionMode"], "Indexed"),
            "pods at once": (job["parallelism"], job["completions"]),
            "network of another name": ("network" in spec, False),
            "starts of a pod alone": (job["backoffLimit"], 0),
            "starts of a container alone": (pod["restartPolicy"], "Never"),
            "container": (container["name"], "train"),
            "end of a job": (job["podFailurePolicy"]["rules"], ENDS),
            "restart": (restart["action"], "RestartJobSetAndIgnoreMaxRestarts"),
            "its causes": (restart["onJobFailureReasons"], ["PodFailurePolicy"]),
            "its message": (message_matches(restart), [False, True, False, True]),
            "no restart": (down["action"], "FailJobSet"),
            "no other cause": (down["onJobFailureReasons"], ["PodFailurePolicy"]),
            "user": (pod["securityContext"]["runAsNonRoot"], True),
            "files": (container["securityContext"]["readOnlyRootFilesystem"], True),
            "token": (pod.get("automountServiceAccountToken", True), gpu),
            "image": ("@sha256:" in container["image"], True),
            "volumes": ({*mounts}, {volume["name"] for volume in pod["volumes"]}),
            "folder": ([option, folder], ["--folder", f"{mounts['checkpoints']}/run"]),
            "program": ([python, program], ["python", "train.py"]),
            "options": (starts(options), True),
        }
        for need, (found, due) in needs.items():
            if found != due:
                yield f"{document['metadata']['name']}: {need}: {found}, not {due}"


def message_matches(rule: dict) -> list[bool]:
    """Whether a rule takes what Kubernetes says of a pod that ended with 2, 75 or 78,
    or that was disrupted."""
    ended = "Container train for pod a/b failed with exit code {} matching FailJob rule"
    said = [ended.format(code) for code in (2, SAVED, STAY_DOWN)]
    said += ["Pod a/b has condition DisruptionTarget matching FailJob rule"]
    patterns = rule["onJobFailureMessagePatterns"]
    return [any(re.fullmatch(f"{one}.*", text) for one in patterns) for text in said]


def accounts_may_read_what_jax_asks(root: Path) -> Iterator[str]:
    [role], [binding] = documents(root, "Role"), documents(root, "RoleBinding")
    may = [(rule["resources"], rule["verbs"]) for rule in role["rules"]]
    if may != [(["pods"], ["list"]), (["jobs"], ["get"])]:
        yield f"the role may {may}"
    names = [one["metadata"]["name"] for one in documents(root, "ServiceAccount")]
    names += [one["name"] for one in binding["subjects"]]
    if names != ["train", "train"]:
        yield f"the accounts are {names}"


def starts(options: list[str]) -> bool:
    """Whether the options are among those of train.py, and make it one of several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", *options])
        try:
            return train.read_options().distributed
        except SystemExit:
            return False


FAULTS = {
    jobsets_fit_their_models: [
        ("failurePolicy:", "failurPolicy:", "failurPolicy\n  Extra inputs"),
        ("backoffLimit:", "backoff_limit:", "backoff_limit\n  Extra inputs"),
    ],
    pods_are_processes_of_jax: [
        (r"(?s)(\n---\n.*?)completions: 4", r"\1completions: 2", "tpu: pods at once"),
        ("serviceAccountName: train", "serviceAccountName: it", "account: it"),
        (r"values: \[2, 75", "values: [75", "'values': [75, 78]"),
        ("exit code 75 ", "exit code 7. ", "its message: [False, True, True, True]"),
        ("runAsNonRoot: true", "runAsNonRoot: false", "user: False"),
        ("automountServiceAccountToken: false", "hostPID: false", "token: True"),
        ("--distributed, ", "", "options: False"),
    ],
    accounts_may_read_what_jax_asks: [
        ("jobs\\]", "jobs, secrets]", "secrets"),
        ("name: train(?=\n---)", "name: other", "accounts are ['train', 'other']"),
    ],
}


@pytest.mark.parametrize("rule", FAULTS, ids=lambda rule: rule.__name__)
def test_jobsets(rule):
    assert not list(rule(ROOT))


@each(FAULTS, file=FILE)
def test_planted_fault_is_found(tmp_path, rule, fault):
    (tmp_path / FILE).parent.mkdir()
    (tmp_path / FILE).write_text((ROOT / FILE).read_text())
    assert fault.message in messages(rule, tmp_path, fault)


# ------------------------------------------------------------------ the shell scripts


def mpirun(folder: Path, *words: str) -> subprocess.CompletedProcess:
    """Run mpirun.sh where these programs, and few others, can be found."""
    (folder / "sleep").symlink_to("/usr/bin/true")
    for name in ("dirname", "seq", "setsid", "shuf"):
        (folder / name).symlink_to(f"/usr/bin/{name}")
    command, env = ["/bin/sh", "mpirun.sh", *words], {"PATH": str(folder)}
    return subprocess.run(command, cwd=LAUNCH, env=env, capture_output=True, text=True)


def test_shell_scripts_are_sound():
    scripts = ["launch/mpirun.sh", "launch/job.sbatch", "lab/launchers.sh", ".ci/run"]
    tool = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([tool, *scripts], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_mpirun_starts_so_many_processes_until_they_have_an_end(tmp_path):
    """One that crashes is started again; what says why it ends is not."""
    (tmp_path / "mpirun").write_text(
        "#!/bin/sh\necho x >> $0.starts\n"
        'echo mpirun "$@"\n[ "$(wc -l < $0.starts)" -eq 3 ] && exit 78\nexit 134\n'
    )
    (tmp_path / "mpirun").chmod(0o755)
    (tmp_path / "wc").symlink_to("/usr/bin/wc")
    done = mpirun(tmp_path, "4", "--emulate", "2", "--steps", "8")
    assert done.returncode == 78
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and "ended with 134, and starts again" in done.stderr
    meet = r"JAX_COORDINATOR_ADDRESS=(\S+) -x JAX_COORDINATOR_BIND_ADDRESS=\1"
    begun = rf"mpirun -n 4 --bind-to none -x {meet} python ./train.py (.*)"
    options = [re.fullmatch(begun, line)[2] for line in lines]
    assert options == 3 * ["--distributed --wait 150 --emulate 2 --steps 8"]
    assert starts(options[0].split())


@pytest.mark.parametrize(
    "words, status, complaint",
    [
        ([], 2, "usage: sh mpirun.sh PROCESSES [options of train.py]\n"),
        (["0"], 2, "usage: "),
        (["--emulate", "4"], 2, "usage: "),
        (["2"], 127, "there is no mpirun: on Debian and Ubuntu, apt-get install open"),
    ],
)
def test_mpirun_says_what_is_missing(tmp_path, words, status, complaint):
    done = mpirun(tmp_path, *words)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.startswith(complaint)


def test_the_job_asks_slurm_for_what_a_restart_needs():
    lines = (LAUNCH / "job.sbatch").read_text().splitlines()
    told = [line.split()[1] for line in lines if line.startswith("#SBATCH ")]
    first_command = [not line or line[0] == "#" for line in lines].index(False)
    assert {"--requeue", "--signal=TERM@180", "--open-mode=append"} <= {*told}
    assert not any("#SBATCH" in line for line in lines[first_command:])  # not read


# ----------------------------------------------------------- the runs of lab/launchers

SAID = """8 cpu devices, 8 rows of a batch on each
step     8  loss 2.010195
step    20  test loss 1.374906, 221 of 261 right
step    24  loss 1.260273
step    48  test loss 0.982307, 232 of 261 right
"""


RESTARTED = "step    20  restored\n" + SAID[SAID.index("step    20") :]


@pytest.mark.parametrize(
    "said, since, old, new, same",
    [
        (SAID, 0, "2.010195", "2.010197", True),
        (SAID, 0, "2.010195", "2.011195", False),
        (SAID, 0, "232 of", "231 of", False),
        (SAID, 0, "1.260273", "nan", False),
        (SAID, 0, r"\Z", "stopped: it goes on after step 20\n", False),
        (SAID, 20, "", "", False),
        (RESTARTED, 20, "", "", True),
        (RESTARTED, 20, "1.374906", "1.4", False),
    ],
)
def test_another_number_is_a_difference(said, since, old, new, same):
    """Of a restart, from its checkpoint on."""
    said = re.sub(old, new, said, count=1)
    assert launchers.repeats(said, SAID, since) == same


def test_the_runs_are_those_of_the_script():
    begun = re.findall(r'(?m)^begin "([^"]+)"', launchers.SCRIPT.read_text())
    assert begun == [*launchers.RUNS]
