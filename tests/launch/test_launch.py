"""``mmnnx launch``: what it prints arrives as it was given, and is what JAX reads."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest
import yaml

from mmnnx.cli import main

HARD = [
    "two words",
    "$HOME",
    "$(NAME)",
    "$$",
    "--",
    "'",
    '"',
    "\\n",
    "a\nb",
    "é\x7f\U0001f600",
    "#SBATCH",
    "`id`",
]
SLURM = ["--slurm", "--nodes", "2", "--gpus-per-node", "4"]
GPUS = ["--gke", "--image", "registry.example/it:1", "--nodes", "2", "--gpus-per-node", "4"]
TPUS = ["--gke", "--image", "it", "--nodes", "4", "--tpus-per-node", "4", "--accelerator", "tpu-v5p-slice"]
POD = ["--tpu-pod", "my-slice", "--zone", "us-central2-b"]


@pytest.fixture
def launch(capsys):
    """What is printed for these arguments."""

    def launch(*args: str) -> str:
        assert main(["launch", *args]) == 0
        out, errors = capsys.readouterr()
        assert errors == ""
        return out

    return launch


@pytest.fixture
def fake(tmp_path):
    """The environment of a shell in which a program of this name prints its arguments, as Python has them."""

    def fake(name: str) -> dict[str, str]:
        program = tmp_path / name
        program.write_text(f"#!{sys.executable}\nimport sys\nprint(ascii(sys.argv[1:]))\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        return os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    return fake


def shell(text: str, environment: dict[str, str] | None = None) -> str:
    return subprocess.run(
        ["bash"], input=text, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def test_a_line_for_each_host(launch):
    lines = launch(
        "--hosts", "a", "b.example", "--", "train", "--stages", "4", "--out", "my run"
    ).splitlines()
    shared = "JAX_COORDINATOR_ADDRESS=a:7733 JAX_NUM_PROCESSES=2"
    assert lines[:4] == [
        "# on a",
        f"{shared} JAX_PROCESS_ID=0 mmnnx train --stages 4 --out 'my run'",
        "# on b.example",
        f"{shared} JAX_PROCESS_ID=1 mmnnx train --stages 4 --out 'my run'",
    ]
    assert len(lines) == 5 and "closed to the outside (docs/processes.md)" in lines[4]


def test_a_line_of_a_host_runs_in_a_shell(launch):
    """With any command, quoted as the shell wants it, and an IPv6 address."""
    script = "import os, sys; print(ascii(sys.argv[1:]), os.environ['JAX_COORDINATOR_ADDRESS'])"
    text = launch("--port", "99", "--hosts", "::1", "--", sys.executable, "-c", script, *HARD)
    assert shell(text) == f"{HARD!a} [::1]:99\n"


def test_slurm(launch, fake):
    options = ["--time", "2-12:00:00", "--partition", "gpu", "--account", "lab-1", "--cpus-per-task", "6"]
    script = launch(*SLURM, *options, "--", "train", "--stages", "4", "--name", "my run")
    subprocess.run(["bash", "-n"], input=script, check=True, text=True)
    lines = script.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert set(lines[1 : lines.index("")]) == {
        "#SBATCH --job-name=mmnnx",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --cpus-per-task=6",
        "#SBATCH --partition=gpu",
        "#SBATCH --account=lab-1",
        "#SBATCH --time=2-12:00:00",
    }
    given = ["mmnnx", "train", "--cluster", "--stages", "4", "--name", "my run"]
    assert shell(script, fake("srun")) == f"{['--cpus-per-task=6', '--kill-on-bad-exit=1', *given]}\n"
    script = launch("--slurm", "--nodes", "3", "--gpus-per-node", "0", "--", "python", *HARD)
    assert "--ntasks-per-node=1" in script and "gpus" not in script
    assert shell(script, fake("srun")) == f"{['--kill-on-bad-exit=1', 'python', *HARD]!a}\n"


def test_gke_with_gpus(launch):
    text = launch(*GPUS, "--name", "r1", "--volume", "runs:/mnt/runs", "--", "python", *HARD)
    service, job = yaml.safe_load_all(text)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert service["metadata"]["name"] == pod["subdomain"] == job["metadata"]["name"] == "r1"
    assert service["spec"] | {"selector": {"job-name": "r1"}, "clusterIP": "None"} == service["spec"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["parallelism"] == job["spec"]["completions"] == 2
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert "nodeSelector" not in pod
    # Kubernetes makes a dollar of two.
    assert [word.replace("$$", "$") for word in container["command"]] == ["python", *HARD]
    (mount,), (volume,) = container["volumeMounts"], pod["volumes"]
    assert mount == {"name": volume["name"], "mountPath": "/mnt/runs"}
    assert volume["persistentVolumeClaim"] == {"claimName": "runs"}
    found = {variable["name"]: variable for variable in container["env"]}
    number = found.pop("JAX_PROCESS_ID")["valueFrom"]["fieldRef"]["fieldPath"]
    assert number == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert {name: variable["value"] for name, variable in found.items()} == {
        "JAX_COORDINATOR_ADDRESS": "r1-0.r1:7733",
        "JAX_NUM_PROCESSES": "2",
        "JAX_LOCAL_DEVICE_IDS": "0,1,2,3",
    }


def test_gke_with_tpus(launch):
    """GKE says which process is which, to pods of an indexed Job with a subdomain."""
    _, job = yaml.safe_load_all(launch(*TPUS, "--topology", "2x2x4", "--", "train", "--stages", "8"))
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "2x2x4",
    }
    assert container["resources"]["limits"] == {"google.com/tpu": 4}
    assert container["command"] == ["mmnnx", "train", "--cluster", "--stages", "8"]
    assert "env" not in container and "volumes" not in pod


def test_tpu_pod(launch, fake):
    """The remote shell gets one line, and makes the arguments of it."""
    script = "import sys; print(ascii(sys.argv[1:]))"
    line = launch(*POD, "--project", "p1", "--", sys.executable, "-c", script, *HARD)
    *where, remote = eval(shell(line, fake("gcloud")))
    assert where == [
        *("compute", "tpus", "tpu-vm", "ssh", "my-slice"),
        *("--zone=us-central2-b", "--project=p1", "--worker=all"),
    ]
    assert shell(remote.removeprefix("--command=")) == f"{HARD!a}\n"
    assert launch(*POD, "--", "train").endswith(" '--command=mmnnx train --cluster'\n")


@pytest.mark.parametrize(
    ("options", "says"),
    {
        "--hosts a b": "give the command after --",
        "--hosts a b train": "give the command after --",
        "--hosts a --": "give the command after --",
        "--hosts -- train": "--hosts needs",
        "--hosts a:99 b -- train": "a:99 is neither a name nor an IPv6 address: give the port by --port",
        "--hosts a b;c -- train": "--hosts 'b;c' will not do",
        "--hosts a b -- train --processes 2": "leave it out here",
        "--hosts a b -- train --steps 0": "--steps",
        "--hosts a --port 0 -- train": "--port 0 is no TCP port",
        "--hosts a --port 65536 -- train": "--port 65536 is no TCP port",
        "-- train": "give one of --hosts, --slurm, --gke, --tpu-pod",
        "--slurm --gke -- train": "--tpu-pod, not --slurm and --gke",
        "--slurm --nodes 0 --gpus-per-node 8 -- train": "--nodes 0 must be at least 1",
        "--slurm --nodes 1 --gpus-per-node -1 -- train": "--gpus-per-node -1 must not be below zero",
        "--slurm --nodes 1 --gpus-per-node 1 --time soon -- x": "--time 'soon' will not do",
        "--slurm --nodes 1 --gpus-per-node 1 --partition a;b -- x": "--partition 'a;b' will not do",
        "--slurm --nodes 4 --gpus-per-node 8 -- train": "32 processes cannot share 8 devices",
        "--slurm --nodes 2 --gpus-per-node 2 -- train": "2 in each of 4 processes, which has 1",
        "--slurm --nodes 2 --gpus-per-node 4 -- train --processes 8": "leave it out here",
        "--slurm --nodes 2 --gpus-per-node 4 -- train --stages 16": "--stages 16 is more than there are",
        "--gke --image i --nodes 1 -- x": "either --gpus-per-node or --tpus-per-node",
        "--gke --image i --nodes 1 --gpus-per-node 1 --topology 2x2 -- x": "--topology 2x2 is of TPUs",
        "--gke --image i --nodes 1 --tpus-per-node 4 -- x": "needs --accelerator and --topology",
        "--gke --image i --nodes 1 --gpus-per-node 1 --name A -- x": "--name 'A' will not do",
        "--gke --image i --nodes 1 --gpus-per-node 1 --volume a -- x": "--volume 'a' will not do",
        "--tpu-pod a;b --zone z -- x": "--tpu-pod 'a;b' will not do",
    }.items(),
)
def test_mistakes_are_told_in_one_line(options, says, capsys):
    assert main(["launch", *options.split()]) == 2
    out, errors = capsys.readouterr()
    assert says in errors and out == ""
    assert errors.startswith("mmnnx: ") and errors.count("\n") == 1


def test_a_slice_has_the_chips_of_its_nodes(capsys):
    for nodes, each, topology, says in [
        ("2", "4", "4x4", "--topology 4x4 has 16 chips, and --nodes 2 with --tpus-per-node 4 have 8"),
        ("2", "8", "4x4", "--tpus-per-node 8: a TPU node of GKE has 1, 4 or 8 chips; 4 if a slice has"),
        ("1", "2", "1x2", "--tpus-per-node 2: a TPU node of GKE has 1, 4 or 8"),
    ]:
        options = ["--nodes", nodes, "--tpus-per-node", each, "--topology", topology]
        assert main(["launch", *TPUS, *options, "--", "python"]) == 2
        assert says in capsys.readouterr().err


def test_help(capsys):
    assert main(["launch", "--help"]) == 0
    assert "mmnnx launch --tpu-pod NAME" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["launch", "--tpu-pod", "--help"])
    assert "--zone STR" in capsys.readouterr().out
    with pytest.raises(SystemExit) as error:
        main(["launch", "--slurm", "--help"])
    out, _ = capsys.readouterr()
    assert error.value.code == 0 and "--cpus-per-task" in out and "--topology" not in out


def test_what_are_no_options_of_train(capsys):
    with pytest.raises(SystemExit) as error:
        main(["launch", *SLURM, "--", "train", "--stags", "4"])
    assert error.value.code == 2
    assert "--stags" in capsys.readouterr().err


def test_options_of_every_command(launch, capsys):
    assert "--quiet" in launch(*SLURM, "--", "train", "--quiet", "--log-level", "info")
    assert main(["launch", *SLURM, "--", "train", "--log-level", "loud"]) == 2
    assert "mmnnx: --log-level is one of debug, info, warning, error, not 'loud'" in capsys.readouterr().err


def test_the_folder_of_a_job_is_not_looked_for_here(launch):
    assert "--resume" in launch(*SLURM, "--", "train", "--resume", "--out", "/not/here")


def test_a_mistake_names_the_help_that_lists_the_options(capsys):
    with pytest.raises(SystemExit):
        main(["launch", "--gke", "--nodes", "2", "--", "train"])
    assert "mmnnx launch --gke --help" in "".join(capsys.readouterr())
