"""Test the files in launch/ that start train.py, without root or a launcher.

`nox -s lab -- launchers` runs Open MPI and Slurm. The JobSets are never run; they are
validated by models of their API, which reject misspelt fields.
"""

import re
import subprocess
import sys
from pathlib import Path

import launchers
import pytest
import train
import yaml
from lifecycle import BAD_INPUT, NO_RESTART, SAVED
from pair import ROOT
from runs import LAUNCH, options_of

# ------------------------------------------------------------------------ the JobSets


@pytest.fixture(params=["train-gpu", "train-tpu"])
def jobset(request):
    documents = yaml.safe_load_all((LAUNCH / "jobset.yaml").read_text())
    named = {(one["kind"], one["metadata"]["name"]): one for one in documents}
    return named["JobSet", request.param]


def job_of(jobset: dict) -> dict:
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]


def pod_of(jobset: dict) -> dict:
    return job_of(jobset)["template"]["spec"]


def test_jobset_fits_its_model(jobset):
    """A misspelt field is rejected."""
    from kubeflow_trainer_api import models
    from pydantic import ValidationError

    quantity = models.IoK8sApimachineryPkgApiResourceQuantity
    for amounts in pod_of(jobset)["containers"][0]["resources"].values():
        amounts |= {name: quantity(amount) for name, amount in amounts.items()}
    for volume in pod_of(jobset)["volumes"]:
        if limit := volume.get("emptyDir", {}).get("sizeLimit"):
            volume["emptyDir"]["sizeLimit"] = quantity(limit)
    validate = models.JobsetV1alpha2JobSet.model_validate
    validate(jobset, extra="forbid", by_alias=True, by_name=False)
    job = job_of(jobset)
    job["backoff_limit"] = job.pop("backoffLimit")
    with pytest.raises(ValidationError, match="backoff_limit"):
        validate(jobset, extra="forbid", by_alias=True, by_name=False)


def test_jobset_restarts_after_a_save_or_a_lost_node(jobset):
    """It does not restart if train.py rejects its options or must not run again."""
    restarts = {BAD_INPUT: False, SAVED: True, NO_RESTART: False}
    by_code, by_node = job_of(jobset)["podFailurePolicy"]["rules"]
    assert by_code["onExitCodes"]["values"] == [*restarts]
    [lost] = by_node["onPodConditions"]
    messages = {f"Pod a/b has condition {lost['type']} matching FailJob rule": True}
    text = "Container train for pod a/b failed with exit code {} matching FailJob rule"
    messages |= {text.format(code): restart for code, restart in restarts.items()}
    restart_rule, fail_rule = jobset["spec"]["failurePolicy"]["rules"]
    assert restart_rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert fail_rule["action"] == "FailJobSet"
    patterns = restart_rule["onJobFailureMessagePatterns"]
    for text, restart in messages.items():
        found = any(re.fullmatch(f"{pattern}.*", text) for pattern in patterns)
        assert found == restart, text


def test_coordinator_has_an_address_and_a_policy():
    """Its own host name, which works with IPv4 and IPv6, and only for its own pods."""
    documents = [*yaml.safe_load_all((LAUNCH / "jobset.yaml").read_text())]
    [policy] = [one for one in documents if one["kind"] == "NetworkPolicy"]
    [jobset, _] = [one for one in documents if one["kind"] == "JobSet"]
    [container] = pod_of(jobset)["containers"]
    addresses = {one["name"]: one["value"] for one in container["env"]}
    host, domain = "train-gpu-workers-0-0", "train-gpu"
    assert jobset["spec"]["replicatedJobs"][0]["name"] == "workers"
    assert addresses["JAX_COORDINATOR_ADDRESS"] == f"{host}.{domain}:55527"
    assert addresses["JAX_COORDINATOR_BIND_ADDRESS"] == f"{host}:55527"
    assert policy["metadata"]["labels"] == jobset["metadata"]["labels"]
    label = {"jobset.sigs.k8s.io/jobset-name": jobset["metadata"]["name"]}
    [rule] = policy["spec"]["ingress"]
    selectors = [policy["spec"]["podSelector"], rule["from"][0]["podSelector"]]
    assert selectors == 2 * [{"matchLabels": label}]


def test_pods_of_a_jobset_are_processes_of_one_run(jobset):
    """The pods belong to one job, and their checkpoints are on a volume."""
    job, pod = job_of(jobset), pod_of(jobset)
    assert job["parallelism"] == job["completions"] and job["backoffLimit"] == 0
    [container] = pod["containers"]
    python, program, *options = container["command"]
    assert (python, program) == ("python", "train.py")
    found = options_of(train, *options)
    assert found.distributed
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert str(found.folder).startswith(mounts["checkpoints"] + "/")


# ------------------------------------------------------------------ the shell scripts


def mpirun(folder: Path, *args: str) -> subprocess.CompletedProcess:
    """Run mpirun.sh with only a few programs and those in `folder` on its PATH."""
    (folder / "sleep").symlink_to("/usr/bin/true")
    for name in ("dirname", "seq", "setsid", "shuf"):
        (folder / name).symlink_to(f"/usr/bin/{name}")
    command, env = ["/bin/sh", "mpirun.sh", *args], {"PATH": str(folder)}
    return subprocess.run(command, cwd=LAUNCH, env=env, capture_output=True, text=True)


def test_shellcheck_accepts_shell_scripts():
    scripts = ["launch/mpirun.sh", "launch/job.sbatch", "lab/launchers.sh", ".ci/run"]
    tool = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([tool, *scripts], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_mpirun_restarts_a_run_after_a_crash(tmp_path):
    """It does not restart after exit status 78."""
    (tmp_path / "mpirun").write_text(
        "#!/bin/sh\necho x >> $0.starts\n"
        'echo mpirun "$@"\n[ "$(wc -l < $0.starts)" -eq 3 ] && exit 78\nexit 134\n'
    )
    (tmp_path / "mpirun").chmod(0o755)
    (tmp_path / "wc").symlink_to("/usr/bin/wc")
    done = mpirun(tmp_path, "4", "--emulate", "2", "--steps", "8")
    assert done.returncode == 78
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and "restarting after exit status 134" in done.stderr
    address = r"JAX_COORDINATOR_ADDRESS=(\S+) -x JAX_COORDINATOR_BIND_ADDRESS=\1"
    command = rf"mpirun -n 4 --bind-to none -x {address} python ./train.py (.*)"
    options = [re.fullmatch(command, line)[2] for line in lines]
    assert options == 3 * ["--distributed --wait 150 --emulate 2 --steps 8"]
    assert options_of(train, *options[0].split()).distributed


@pytest.mark.parametrize(
    ("args", "status", "named"),
    [([], 2, "PROCESSES"), (["0"], 2, "PROCESSES"), (["2"], 127, "openmpi-bin")],
)
def test_mpirun_names_what_is_missing(tmp_path, args, status, named):
    done = mpirun(tmp_path, *args)
    assert (done.returncode, done.stdout) == (status, "")
    assert named in done.stderr and done.stderr.count("\n") == 1


def test_slurm_job_can_be_restarted():
    lines = (LAUNCH / "job.sbatch").read_text().splitlines()
    options = [line.split()[1] for line in lines if line.startswith("#SBATCH ")]
    first_command = [not line or line[0] == "#" for line in lines].index(False)
    assert {"--requeue", "--signal=TERM@180", "--open-mode=append"} <= {*options}
    assert not any("#SBATCH" in line for line in lines[first_command:])  # ignored


# ----------------------------------------------------------- the runs of lab/launchers

OUTPUT = """8 cpu devices, 8 examples on each
step     8  loss 2.010195
step    20  test loss 1.374906, 221 of 261 correct
step    24  loss 1.260273
step    48  test loss 0.982307, 232 of 261 correct
"""
RESTARTED = "step    20  restored\n" + OUTPUT[OUTPUT.index("step    20") :]


@pytest.mark.parametrize(
    ("output", "since", "old", "new", "same"),
    [
        (OUTPUT, 0, "2.010195", "2.010197", True),
        (OUTPUT, 0, "2.010195", "2.011195", False),
        (OUTPUT, 0, "232 of", "231 of", False),
        (
            OUTPUT,
            0,
            r"\Z",
            "stopped: run the same command to continue after step 20\n",
            False,
        ),
        (OUTPUT, 20, "", "", False),
        (RESTARTED, 20, "", "", True),
        (RESTARTED, 20, "1.374906", "1.4", False),
    ],
)
def test_matches_compares_losses(output, since, old, new, same):
    """A restarted run is compared from its checkpoint on."""
    output = re.sub(old, new, output, count=1)
    assert launchers.matches(output, OUTPUT, since) == same


def test_runs_are_those_of_the_script():
    begun = re.findall(r'(?m)^begin "([^"]+)"', launchers.SCRIPT.read_text())
    assert begun == [*launchers.RUNS]
