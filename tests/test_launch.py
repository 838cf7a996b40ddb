"""The files in launch/ start train.py as their launchers and JAX want it, without root.

`nox -s launchers` runs Open MPI and Slurm for real. Nobody runs the JobSets: these are
held against models of their API, to which a misspelt field is an error.
"""

import copy
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import launchers
import pytest
import yaml
from faults import assert_all_planted, complaints, each
from pair import ROOT

LAUNCH = ROOT / "launch"
linux = pytest.mark.skipif(sys.platform != "linux", reason="what it tests needs Linux")

# ------------------------------------------------------------------------ the JobSets

FILE = "launch/jobset.yaml"


def documents(root: Path) -> list[dict]:
    return list(yaml.safe_load_all((root / FILE).read_text()))


def amounts(value, quantity):
    """The same, with every amount of a resource as the class that checks it."""
    if isinstance(value, list):
        return [amounts(part, quantity) for part in value]
    if not isinstance(value, dict):
        return value
    made = {}
    for key, part in value.items():
        if key in ("limits", "requests") and isinstance(part, dict):
            made[key] = {name: quantity(amount) for name, amount in part.items()}
        else:
            made[key] = amounts(part, quantity)
    return made


def jobsets_fit_their_models(root: Path) -> Iterator[str]:
    from kubeflow_trainer_api import models
    from pydantic import ValidationError

    kinds = []
    for document in documents(root):
        kinds.append((document.get("apiVersion"), document.get("kind")))
        name = document["metadata"]["name"]
        try:
            models.JobsetV1alpha2JobSet.model_validate(
                amounts(document, models.IoK8sApimachineryPkgApiResourceQuantity),
                extra="forbid",
                by_alias=True,
                by_name=False,  # not backoff_limit either
            )
        except ValidationError as error:
            for found in error.errors():
                where = ".".join(map(str, found["loc"]))
                yield f"{name}: {where}: {found['msg']}"
    if kinds != [("jobset.x-k8s.io/v1alpha2", "JobSet")] * 2:
        yield f"not two JobSets of v1alpha2: {kinds}"


def pods_are_processes_of_jax(root: Path) -> Iterator[str]:
    """What JAX and the restart ask for, and no model knows."""
    for document in documents(root):
        name, spec = document["metadata"]["name"], document["spec"]
        [workers] = spec["replicatedJobs"]
        job = workers["template"]["spec"]
        pod = job["template"]["spec"]
        [container] = pod["containers"]
        if job.get("completionMode") != "Indexed":
            yield f"{name}: without an index, no pod knows the number of its process"
        if job.get("parallelism") != job.get("completions"):
            yield f"{name}: not all pods run at once"
        if "subdomain" in spec.get("network", {}):
            yield f"{name}: JAX asks for process 0 in the network {name}"
        on_gpus = "nvidia.com/gpu" in container["resources"]["limits"]
        if on_gpus and (workers.get("replicas") != 1 or not pod["serviceAccountName"]):
            yield f"{name}: JAX counts one job's pods, by an account that may"
        if (job.get("backoffLimit"), pod.get("restartPolicy")) != (0, "Never"):
            yield f"{name}: a pod alone would start again"
        [rule] = job["podFailurePolicy"]["rules"]
        codes = rule["onExitCodes"]
        if (rule["action"], codes["operator"]) != ("FailJob", "In"):
            yield f"{name}: the exit code is no reason to end the job"
        if codes["values"] != [128 + signal.SIGTERM]:
            yield f"{name}: train.py exits with {128 + signal.SIGTERM}"
        if codes["containerName"] != container["name"]:
            yield f"{name}: there is no container {codes['containerName']}"
        [saved] = spec["failurePolicy"]["rules"]
        if saved["onJobFailureReasons"] != ["PodFailurePolicy"]:
            yield f"{name}: no job fails for {saved['onJobFailureReasons']}"
        if not saved["action"].startswith("RestartJobSet"):
            yield f"{name}: {saved['action']} does not start all pods again"
        mounts = {
            mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]
        }
        if {*mounts} != {volume["name"] for volume in pod["volumes"]}:
            yield f"{name}: the volumes are not those that are mounted"
        command = container["command"]
        if command[-2:] != ["--folder", mounts.get("checkpoints")]:
            yield f"{name}: the checkpoints are not in the volume"
        if command[:2] != ["python", "train.py"] or not starts(command[2:]):
            yield f"{name}: train.py does not start by {command}"


def starts(options: list[str]) -> bool:
    """Whether the options are among those of train.py, and make it one of several."""
    sys.path.append(str(LAUNCH))
    import train

    before, sys.argv = sys.argv, ["train.py", *options]
    try:
        return train.read_options().distributed
    except SystemExit:
        return False
    finally:
        sys.argv = before


RULES = [jobsets_fit_their_models, pods_are_processes_of_jax]
TPU = r"(?s)(\n---\n.*?)"  # before a pattern: in the second document
FAULTS = {
    jobsets_fit_their_models: [
        ("failurePolicy:", "failurPolicy:", "spec.failurPolicy: Extra"),
        ("backoffLimit:", "backofLimit:", "template.spec.backofLimit: Extra"),
        ("backoffLimit:", "backoff_limit:", "template.spec.backoff_limit: Extra"),
        ("onExitCodes:", "onExitCode:", "rules.0.onExitCode: Extra"),
        ("mountPath:", "mountpath:", "volumeMounts.0.mountpath: Extra"),
        ("mountPath: .*", "mountPath: 7", "volumeMounts.0.mountPath: Input should be"),
        ("parallelism: 2", "parallelism: two", "spec.parallelism: Input should be"),
        ("maxRestarts: 3", "maxRestarts: '3'", "maxRestarts: Input should be"),
        (r"values: \[143\]", "values: 143", "onExitCodes.values: Input should be"),
        ("gpu: 8", "gpu: [8]", "actual_instance"),
        ("v1alpha2\nkind", "v1\nkind", "not two JobSets"),
        (f"{TPU}replicatedJobs:", r"\1replicatedJob:", "train-tpu: spec.replicatedJob"),
        (f"{TPU}completionMode:", r"\1completionmode:", "spec.completionmode: Extra"),
        (f"{TPU}nodeSelector:", r"\1nodeSelectors:", "spec.nodeSelectors: Extra"),
        (f"{TPU}claimName:", r"\1claim:", "persistentVolumeClaim.claim: Extra"),
        (f"{TPU}4x4", r"\1 4", "gke-tpu-topology: Input should be a valid string"),
        (f"{TPU}Seconds: 120", r"\1Seconds: 2m", "Seconds: Input should be"),
        (f"{TPU}replicas: 1", r"\1replicas: one", "replicatedJobs.0.replicas: Input"),
    ],
    pods_are_processes_of_jax: [
        ("completionMode: Indexed", "completionMode: NonIndexed", "without an index"),
        ("completions: 2", "completions: 1", "not all pods"),
        (
            "(?m)^spec:",
            "spec:\n  network: {subdomain: net}",
            "in the network train-gpu",
        ),
        ("replicas: 1", "replicas: 2", "JAX counts one"),
        ("backoffLimit: 0", "backoffLimit: 3", "a pod alone"),
        ("restartPolicy: Never", "restartPolicy: OnFailure", "a pod alone"),
        ("action: FailJob", "action: Count", "no reason"),
        ("operator: In", "operator: Out", "no reason"),
        (r"values: \[143\]", "values: [15]", "exits with 143"),
        ("containerName: train", "containerName: main", "no container main"),
        (r"\[PodFailurePolicy\]", "[podFailurePolicy]", "no job fails for"),
        ("action: RestartJobSet.*", "action: FailJobSet", "FailJobSet does not"),
        ("name: checkpoints", "name: checkpoint", "not those that are mounted"),
        ("--folder, /checkpoints", "--folder, /tmp", "not in the volume"),
        ("--distributed", "--distribute-d", "does not start by"),
        ("--distributed, ", "", "does not start by"),
        (f"{TPU}train.py, --d", r"\1trian.py, --d", "train-tpu: train.py does not"),
        (f"{TPU}completions: 4", r"\1completions: 2", "train-tpu: not all pods"),
    ],
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_jobsets(rule):
    assert not list(rule(ROOT))


def test_every_rule_has_a_fault():
    assert_all_planted(RULES, FAULTS)


@each(FAULTS, file=FILE)
def test_planted_fault_is_found(tmp_path, rule, fault):
    (tmp_path / FILE).parent.mkdir()
    (tmp_path / FILE).write_text((ROOT / FILE).read_text())
    assert fault.complaint in complaints(rule, tmp_path, fault)


def test_the_two_jobsets_differ_where_the_hardware_does():
    """What is asked of a pod that saved and stopped is the same on both."""
    gpu, tpu = documents(ROOT)
    assert gpu["spec"]["failurePolicy"] == tpu["spec"]["failurePolicy"]
    jobs = []
    for document in (gpu, tpu):
        job = copy.deepcopy(document["spec"]["replicatedJobs"][0]["template"]["spec"])
        for count in ("parallelism", "completions"):
            del job[count]
        pod = job["template"]["spec"]
        for only_one_has in ("serviceAccountName", "nodeSelector"):
            pod.pop(only_one_has, None)
        del pod["containers"][0]["resources"]
        jobs.append(job)
    assert jobs[0] == jobs[1]


# ------------------------------------------------------------------ the shell scripts


def pretend(folder: Path, name: str, says: str) -> None:
    """Put a program of that name into a folder, to be found before the real one."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{says}\n")
    (folder / name).chmod(0o755)


def run(*words: str, path: str, **more: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        words, cwd=LAUNCH, env={"PATH": path, **more}, capture_output=True, text=True
    )


def test_shell_scripts_are_sound():
    scripts = ["launch/mpirun.sh", "launch/job.sbatch", ".ci/run"]
    tool = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([tool, *scripts], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_mpirun_starts_so_many_processes(tmp_path):
    pretend(tmp_path, "mpirun", r'printf "%s\n" "$@"')
    path = f"{tmp_path}:/usr/bin:/bin"
    done = run("sh", "mpirun.sh", "4", "--emulate", "2", "--steps", "8", path=path)
    *before, program = done.stdout.split("train.py\n")[0].split("\n")
    assert before == ["-n", "4", "--bind-to", "none", "python"]
    assert (LAUNCH / program / "train.py").exists()
    options = done.stdout.split("train.py\n")[1].split()
    assert options == ["--distributed", "--emulate", "2", "--steps", "8"]
    assert starts(options)


@pytest.mark.parametrize("words", [[], ["two"], ["0"], ["-2"], ["--emulate", "4"]])
def test_mpirun_asks_for_a_number(tmp_path, words):
    pretend(tmp_path, "mpirun", "echo started")
    done = run("sh", "mpirun.sh", *words, path=f"{tmp_path}:/usr/bin:/bin")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "usage: sh mpirun.sh PROCESSES [options of train.py]\n"


def test_without_mpirun_it_says_how_to_get_it(tmp_path):
    pretend(tmp_path, "dirname", "echo .")
    done = run("/bin/sh", "mpirun.sh", "2", path=str(tmp_path))
    assert done.returncode == 127
    assert "no mpirun: on Debian and Ubuntu, apt-get install openmpi-bin" in done.stderr


@pytest.mark.parametrize("status", [0, 1, 137, 143])
def test_only_a_job_that_has_saved_goes_back_into_the_queue(tmp_path, status):
    pretend(tmp_path, "srun", f'printf "%s\\n" "$@"; exit {status}')
    pretend(tmp_path, "scontrol", 'echo "scontrol $@"')
    path = f"{tmp_path}:/usr/bin:/bin"
    done = run("bash", "job.sbatch", "--emulate", "2", path=path, SLURM_JOB_ID="7")
    assert (done.returncode, done.stderr) == (status, "")
    *words, last = done.stdout.splitlines()
    if status == 143:
        assert last == "scontrol requeue 7"
    else:
        words.append(last)
    assert words[:3] == ["--kill-on-bad-exit=1", "python", "train.py"]
    assert words[3:] == ["--distributed", "--emulate", "2"]
    assert starts(words[3:])


def test_the_job_asks_slurm_for_what_a_restart_needs():
    lines = (LAUNCH / "job.sbatch").read_text().splitlines()
    told = [line.split()[1] for line in lines if line.startswith("#SBATCH ")]
    first_command = [not line or line[0] == "#" for line in lines].index(False)
    assert {"--requeue", "--signal=TERM@60", "--open-mode=append"} <= {*told}
    assert not any("#SBATCH" in line for line in lines[first_command:])  # not read


# ------------------------------------------------------------------ lab/launchers.py

SAID = """8 cpu devices, 8 rows of a batch on each
step     8  loss 2.010195
step    20  test loss 1.374906, 221 of 261 right
step    24  loss 1.260273
step    48  test loss 0.982307, 232 of 261 right
"""


@pytest.mark.parametrize(
    "old, new, told",
    [
        ("2.010195", "2.010197", []),
        ("2.010195", "2.011195", ["step 8 loss: [2.011195]"]),
        ("0.982307", "0.982507", ["step 48 test loss: [0.982507, 232]"]),
        ("232 of", "231 of", ["step 48 test loss: [0.982307, 231]"]),
        ("1.260273", "nan", ["step 24 loss: no such line"]),
        ("step    24.*\n", "", ["step 24 loss: no such line"]),
        (
            "(?s).*",
            "",
            [
                f"step {n} {kind}: no such line"
                for n, kind in [
                    (8, "loss"),
                    (20, "test loss"),
                    (24, "loss"),
                    (48, "test loss"),
                ]
            ],
        ),
    ],
)
def test_another_number_is_a_difference(old, new, told):
    found = launchers.differences(re.sub(old, new, SAID, count=1), SAID)
    assert [line.split(", one process")[0] for line in found] == told


def test_a_restart_is_compared_from_its_checkpoint_on():
    later = "step    20  restored\n" + SAID[SAID.index("step    20") :]
    assert launchers.differences(later, SAID, restored=20) == []
    [told] = launchers.differences(SAID, SAID, restored=20)
    assert told == "it did not go on after step 20"
    assert launchers.differences(later.replace("1.374906", "1.4"), SAID, restored=20)
    assert launchers.differences("", "") == ["there is nothing to compare"]


# A worker that starts a process, one that ignores SIGTERM and an orphan; it writes down
# which, and waits or fails.
STAND_IN = f"""
import sys, time
sys.path.append({str(ROOT / "tools")!r})
import launchers
from pathlib import Path

notes = Path(sys.argv[-2])
launchers.__file__ = __file__
launchers.unfit = lambda: ""

def work(folder):
    for code in (
        "sleep 999",
        "trap '' TERM; while true; do sleep 1; done",
        "setsid sleep 999 & exit 0",
    ):
        launchers.start(folder / "log", "sh", "-c", code, folder=folder, place=folder)
    started = launchers.started
    while started[2].poll() is None or len(launchers.descendants()) < 4:
        time.sleep(0.05)
    (folder / "socket").touch()
    found = [launchers.os.getppid(), launchers.os.getpid(), *launchers.descendants()]
    (notes / "now").write_text(" ".join(map(str, [folder, *found])))
    (notes / "now").rename(notes / "pids")
    if sys.argv[-1] == "fails":
        sys.exit("a step has failed")
    time.sleep(999 if sys.argv[-1] == "waits" else 0)

launchers.work = work
sys.exit(launchers.main())
"""


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@linux
@pytest.mark.parametrize(
    "ends, number, at, status",
    [
        ("well", None, None, 0),
        ("fails", None, None, 1),
        ("waits", signal.SIGINT, "keeper", 130),
        ("waits", signal.SIGTERM, "keeper", 143),
        ("waits", signal.SIGTERM, "worker", 143),
        ("waits", signal.SIGKILL, "worker", 137),
        ("waits", signal.SIGKILL, "keeper", -9),
    ],
)
def test_nothing_is_left_however_it_ends(tmp_path, ends, number, at, status):
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    words = [sys.executable, script, tmp_path, ends]
    keeper = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    notes = tmp_path / "pids"
    until = time.monotonic() + 60
    while not notes.exists() and time.monotonic() < until:
        time.sleep(0.05)
    folder, *pids = notes.read_text().split()
    pids = [int(pid) for pid in pids]
    assert pids[0] == keeper.pid
    assert len(pids) >= 6  # keeper, worker, two shells, two sleeps
    if number:
        os.kill(pids[0 if at == "keeper" else 1], number)
    _, told = keeper.communicate(timeout=60)
    assert keeper.returncode == status
    assert told == ("a step has failed\n" if ends == "fails" else "")
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)  # where the keeper was killed, the worker still cleans up
    assert not [pid for pid in pids if alive(pid)]
    while Path(folder).exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(folder).exists()


@pytest.mark.parametrize(
    "name, value, told",
    [
        ("shutil.which", lambda program: None, "Debian or Ubuntu"),
        ("sys.platform", "darwin", "Debian or Ubuntu"),
        ("os.geteuid", lambda: 1000, "needs root"),
    ],
)
def test_where_it_cannot_run_it_says_why(monkeypatch, name, value, told):
    monkeypatch.setattr(launchers.sys, "platform", "linux")
    monkeypatch.setattr(
        launchers.shutil, "which", lambda program: f"/usr/bin/{program}"
    )
    monkeypatch.setattr(launchers.os, "geteuid", lambda: 0)
    module, attribute = name.split(".")
    monkeypatch.setattr(getattr(launchers, module), attribute, value)
    assert told in launchers.unfit()
    monkeypatch.setattr(sys, "argv", ["launchers.py"])
    with pytest.raises(SystemExit, match=told):
        launchers.main()


def test_the_session_is_part_of_what_is_run_before_a_release():
    [line] = re.findall(r"(?m)^.*nox -x -s .*", (ROOT / ".ci/run").read_text())
    assert "launchers" in line.split()
    check = (ROOT / ".github/workflows/check.yml").read_text()
    assert "nox -s launchers -- --sudo" in check
