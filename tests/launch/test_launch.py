"""launch/ without a cloud: manifests against schemas, and a gcloud, srun and ssh that this file
stands in for.
"""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import time

import jsonschema
import kubernetes_validate
import pytest
import yaml
from conftest import ROOT

from launch import archive, gke, tpu_pod, tpu_types, tpu_vm
from launch import command as commands
from vit_jax import config as configs
from vit_jax.errors import UserError

GOLDEN = pathlib.Path(__file__).parent / "golden"
# Words that a shell or YAML would change.
HARD = ["it's", 'a "b"', "$HOME `id` \\", "", "*", "é  ;&|", "-- x", "1e-4"]

PLACE = ["--zone=us-west4-a", "--project=example.com:my-project"]
TRAIN = [
    "python",
    "-m",
    "vit_jax.train",
    "--config=configs/pretrain.py:L/16,imagenet21k",
    "--workdir=gs://BUCKET/l16",
]
POD = ["--name=l16", *PLACE, "--accelerator=v5litepod-256"]
DRY_RUNS = {
    "tpu_vm_one_slice": ["up", *POD, "--dry_run", "--", *TRAIN],
    "tpu_vm_slices": [
        "up",
        *POD,
        "--num_slices=2",
        "--create_args=--network='my net'",
        "--dry_run",
        "--",
        *TRAIN,
    ],
    "tpu_vm_spot": [
        "up",
        "--name=s16",
        "--zone=us-east5-b",
        "--project=my-project",
        "--accelerator=v6e-8",
        "--spot",
        "--keep",
        "--dry_run",
        "--",
        *HARD,
    ],
    **{
        f"tpu_vm_{action}": [action, *POD, "--num_slices=2", "--dry_run"]
        for action in ("create", "setup", "status", "stop", "delete")
    },
    "tpu_vm_run": ["run", *POD, "--num_slices=2", "--dry_run", "--", *TRAIN],
    "tpu_vm_logs": ["logs", *POD, "--num_slices=2", "--all_workers", "--dry_run"],
}
MANIFESTS = {
    "gke_one_slice": ["--name=l16", "--image=IMAGE", "--topology=v5e:16x16", "--", *TRAIN],
    "gke_slices": [
        *["--name=h14", "--image=IMAGE", "--topology=v5p:4x4x8", "--num_slices=4", "--spot"],
        *["--", *HARD],
    ],
}


def printed(main, arguments: list[str], capsys) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out.replace(str(ROOT), "ROOT")


def shellcheck(text: str, *ignored: str) -> None:
    program = pathlib.Path(sys.executable).parent / "shellcheck"
    options = ["--shell=bash", f"--exclude={','.join(ignored)}", "-"]
    done = subprocess.run(
        [program, *options], input=text, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", DRY_RUNS)
def test_dry_runs(name, capsys):
    text = printed(tpu_vm.main, DRY_RUNS[name], capsys)
    assert text == (GOLDEN / f"{name}.txt").read_text()
    shellcheck(text, "SC2016", "SC1003")  # these suspect $ and ' in quotes, which users may give


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests(name, capsys):
    assert printed(gke.main, MANIFESTS[name], capsys) == (GOLDEN / f"{name}.yaml").read_text()


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_follow_the_schemas(name):
    """That of the JobSet is ours (kubernetes-sigs/jobset has the fields), that of the Job inside is
    Kubernetes'.
    """
    manifest = yaml.safe_load((GOLDEN / f"{name}.yaml").read_text())
    schema = json.loads((GOLDEN / "jobset.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(manifest, schema)
    (job,) = manifest["spec"]["replicatedJobs"]
    meta = dict(apiVersion="batch/v1", kind="Job", metadata=dict(name="x"))
    kubernetes_validate.validate(
        meta | job["template"], kubernetes_validate.latest_version(), strict=True
    )
    manifest["spec"]["replicas"] = 1
    with pytest.raises(jsonschema.ValidationError, match="replicas"):
        jsonschema.validate(manifest, schema)


def test_a_manifest_carries_every_word_to_the_process():
    manifest = yaml.safe_load((GOLDEN / "gke_slices.yaml").read_text())
    spec = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    words = spec["template"]["spec"]["containers"][0]["command"]
    assert [word.replace("$$", "$") for word in words] == HARD
    assert not re.search(r"(?<!\$)\$(\$\$)*\(", "".join(words))


@pytest.mark.parametrize(
    ("topology", "hosts", "chips", "machine"),
    [
        ("v4:2x2x1", 1, 4, "ct4p-hightpu"),
        ("v4:8x8x12", 192, 4, "ct4p-hightpu"),
        ("v5e:1x1", 1, 1, "ct5lp-hightpu"),
        ("v5e:2x4", 2, 4, "ct5lp-hightpu"),
        ("v5p:16x16x24", 1536, 4, "ct5p-hightpu"),
        ("v6e:16x16", 64, 4, "ct6e-standard"),
    ],
)
def test_slices(topology, hosts, chips, machine):
    chip, shape, *found = gke.slice_shape(topology)
    assert (found, chip.machine, shape) == ([hosts, chips], machine, topology.split(":")[1])


IMAGE = ["--name=l16", "--image=IMAGE"]
BAD = [
    (
        gke.main,
        [*IMAGE, "--topology=v9:2x2", "--", "x"],
        "v9:2x2: the TPU is not one of v4, v5e, v5p, v6e",
    ),
    (gke.main, [*IMAGE, "--topology=v5e:3x3", "--", "x"], "no slice of v5e has the shape '3x3'"),
    (gke.main, [*IMAGE, "--topology=v4:8x4x4", "--", "x"], "A <= B <= C"),
    (gke.main, [*IMAGE, "--topology=v5p:16x16x32", "--", "x"], "up to 6144 chips"),
    (gke.main, [*IMAGE, "--topology=v6e:0x4", "--", "x"], "no slice of v6e"),
    (gke.main, [*IMAGE, "--topology=v4:0x0x0", "--", "x"], "no slice of v4"),
    (
        gke.main,
        [*IMAGE, "--topology=v5e:2x2", "--num_slices=2", "--", "x"],
        "GKE joins only slices of several",
    ),
    (
        gke.main,
        [*IMAGE, "--topology=v5e:4x4", "--num_slices=0", "--", "x"],
        "--num_slices=0 is less than 1",
    ),
    (gke.main, [*IMAGE, "--topology=v5e:4x4"], "no command"),
    (
        gke.main,
        ["--name=L_16", "--image=IMAGE", "--topology=v5e:4x4", "--", "x"],
        "--name=L_16 is not a valid name: choose",
    ),
    (gke.main, ["--name=l16"], "the following arguments are required: --image, --topology"),
    (tpu_vm.main, ["fly", *POD], "invalid choice: 'fly'"),
    (tpu_vm.main, ["run", *POD], "run takes a command after --"),
    (tpu_vm.main, ["stop", *POD, "--", "x"], "stop takes no command"),
    (tpu_vm.main, ["status", "--name=Vit 1", *PLACE], "--name=Vit 1 is not a valid name: choose"),
    (
        tpu_vm.main,
        ["status", "--name=l16", "--zone=us-west4", "--project=p"],
        "--zone=us-west4 is not a zone",
    ),
    (tpu_vm.main, ["status", *POD, "--num_slices=0"], "--num_slices=0 is less than 1"),
    (
        tpu_vm.main,
        ["create", "--name=l16", *PLACE, "--dry_run"],
        "--accelerator=None: give one of v2-N",
    ),
    (
        tpu_vm.main,
        ["create", "--name=l16", *PLACE, "--accelerator=tpu7x-8"],
        "newer TPUs: launch.gke",
    ),
    (tpu_vm.main, ["create", *POD, "--create_args='"], "--create_args: invalid"),
    (tpu_vm.main, ["up", *POD, "--", "python", "--workdir=run"], "--workdir=run would be lost"),
    (
        tpu_vm.main,
        ["up", *PLACE, "--name=one", "--accelerator=v5litepod-8", "--", "x", "--workdir", "run"],
        "--workdir=run would be lost with the disks",
    ),
    (
        tpu_vm.main,
        ["run", *POD, "--", "python", "--workdir", "/run"],
        "--workdir=/run would be another folder on each host",
    ),
    (
        tpu_vm.main,
        ["run", *PLACE, "--name=one", "--", "x", "--workdir=run"],
        "--workdir=run would be another folder on each host",
    ),
    (
        gke.main,
        [*IMAGE, "--topology=v5e:2x2", "--", "x", "--workdir", "run"],
        "--workdir=run would be lost with the pod",
    ),
    (
        tpu_vm.main,
        ["create", "--name=l16", *PLACE, "--accelerator=v5litepod-60"],
        "v5litepod-60 does not exist: N of v5litepod-N counts chips and is 1, 4, 8, 16, 32,",
    ),
    (
        tpu_vm.main,
        ["create", "--name=l16", *PLACE, "--accelerator=v5p-96", "--dry_run"],
        "v5p-96 does not exist: N of v5p-N counts cores, two per chip, and is 8, 16, 32, 64 or a "
        "multiple of 128 up to 12288",
    ),
    (
        tpu_vm.main,
        ["up", "--name=l16", *PLACE, "--accelerator=v4-64", "--", "x"],
        "--zone=us-west4-a has no v4: choose one of us-central2-b, or add --unlisted",
    ),
    (
        tpu_vm.main,
        ["up", *POD, "--", *TRAIN, "--config=configs/pods.py:L/16,v5e"],
        "is meant for v5e:8x8, 64 chips of v5e, but --accelerator=v5litepod-256 has 256 of v5e: "
        "give --accelerator=v5litepod-64, or add --config.topology= to the command",
    ),
    (
        tpu_vm.main,
        ["run", *POD, "--", *TRAIN, "--config", "configs/pods.py:L/16,v4"],
        "is meant for v4:4x4x4, 64 chips of v4, but --accelerator=v5litepod-256 has 256 of v5e: "
        "give --accelerator=v4-128",
    ),
    (
        gke.main,
        [*IMAGE, "--topology=v5p:2x2x4", "--", *TRAIN, "--config=configs/pods.py:B/32,v5p"],
        "is meant for v5p:2x2x2, 8 chips of v5p, but --topology=v5p:2x2x4 has 16 of v5p: give "
        "--topology=v5p:2x2x2",
    ),
    (
        tpu_vm.main,
        ["up", *POD, "--", *TRAIN, "--config.mesh.data=100"],
        "config.mesh asks for replica=1 x data=100 x fsdp=1 x tensor=1 = 100 devices, but there "
        "are 256",
    ),
    (
        gke.main,
        [*IMAGE, "--topology=v5e:4x4", "--num_slices=3", "--", *TRAIN, "--config.mesh.fsdp=48"],
        "config.mesh has replica=1 and data=1, but the devices form 3 slices",
    ),
    (tpu_vm.main, ["up", *POD, "--", *TRAIN, "--config.optim.lrr", "1"], "did you mean optim.lr?"),
    (
        tpu_vm.main,
        ["up", *POD, "--", *TRAIN, "--config=mine.py"],
        "--config=mine.py is not in the checkout",
    ),
]


@pytest.mark.parametrize(
    ("zone", "accelerator", "chips", "devices", "has_one_host"),
    [
        ("us-central1-b", "v2-8", 4, 8, True),
        ("europe-west4-a", "v3-2048", 1024, 2048, False),
        ("us-central2-b", "v4-8", 4, 4, True),
        ("us-central2-b", "v4-384", 192, 192, False),
        ("us-west4-a", "v5litepod-1", 1, 1, True),
        ("us-west4-a", "v5litepod-8", 8, 8, True),
        ("us-west4-a", "v5litepod-16", 16, 16, False),
        ("us-east5-a", "v5p-12288", 6144, 6144, False),
        ("europe-west4-a", "v6e-256", 256, 256, False),
    ],
)
def test_accelerator_types(zone, accelerator, chips, devices, has_one_host):
    """From Google's page of each TPU: up to v5p the number counts cores, of which a chip has two;
    JAX has one device per core of v2 and v3, and per chip since.
    """
    found = tpu_types.parse(accelerator, zone, unlisted=False)
    assert (found.chips, found.devices, found.has_one_host) == (chips, devices, has_one_host)


def test_what_google_adds_can_be_used(capsys):
    new = ["create", "--name=new", "--zone=mars-west1-ai2b", "--project=p", "--dry_run"]
    new += ["--accelerator=v6e-512"]
    assert tpu_vm.main([*new, "--unlisted"]) == 0
    assert "--accelerator-type=v6e-512" in capsys.readouterr().out
    assert tpu_vm.main(new) == 2


def test_recipes_run_on_the_slices_that_they_name(capsys):
    """The topology of each recipe is one that both launchers have."""
    pods = configs.import_file(ROOT / "configs/pods.py").PODS
    for variant in ("B/32", "L/16", "G/14"):
        for chip, topology in pods[variant].items():
            command = ["python", f"--config=configs/pods.py:{variant},{chip}"]
            accelerator = tpu_types.accelerator(topology)
            zone = tpu_types.KINDS[accelerator.split("-")[0]].zones.split()[0]
            target = tpu_types.parse(accelerator, zone, unlisted=False)
            commands.check_recipe(command, target, num_slices=1)
            commands.check_recipe(command, gke.target(topology), num_slices=2)
    other = tpu_types.parse("v5litepod-256", "us-west4-a", unlisted=False)
    commands.check_recipe(
        ["x", "--config=configs/pods.py:L/16,v5e", "--config.topology="], other, 1
    )
    commands.check_recipe(["x", "--config=/workers/only.py"], other, 1)


def commit(folder: pathlib.Path, **files: str) -> None:
    for name, text in files.items():
        (folder / name).write_text(text)
    git = ["git", "-C", folder, "-c", "user.name=me", "-c", "user.email=me@example.com"]
    subprocess.run([*git, "add", *files], check=True)
    subprocess.run([*git, "commit", "--quiet", "--message=files"], check=True)


def test_a_user_hears_what_is_sent_to_the_workers(tmp_path):
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    with pytest.raises(UserError, match="git tracks no file of"):
        archive.check(tmp_path, False, 100, None)
    commit(tmp_path, **{"a.py": "1", "b.py": "22", ".gitignore": "ignored\n"})
    assert archive.check(tmp_path, False, 100, "a.py") == [
        "sending 3 files, 0.0 MB, to every worker"
    ]
    (tmp_path / "b.py").write_text("changed")
    (tmp_path / "weights.npz").write_bytes(bytes(3_000_000))
    (tmp_path / "ignored").write_bytes(bytes(9_000_000))
    assert archive.check(tmp_path, False, 100, None)[1:] == [
        "with changes that are not committed: b.py",
        "without files that git does not track: weights.npz; --untracked sends them",
    ]
    assert archive.check(tmp_path, True, 100, "weights.npz") == [
        "sending 4 files, 3.0 MB, to every worker",
        "with changes that are not committed: b.py",
    ]
    with pytest.raises(
        UserError, match=r"3.0 MB would be .* --max_mb=2, .* weights.npz \(3.0 MB\)"
    ):
        archive.check(tmp_path, True, 2, None)
    with pytest.raises(UserError, match=r"weights.npz is not tracked by git, so no worker would"):
        archive.check(tmp_path, False, 100, "weights.npz")
    with pytest.raises(UserError, match=r"git can't list the files of /proc"):
        archive.check(pathlib.Path("/proc"), False, 100, None)


@pytest.mark.parametrize(
    ("main", "arguments", "message"), BAD, ids=[message for *_, message in BAD]
)
def test_bad_arguments(main, arguments, message, cloud, capsys):
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert code == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err
    assert cloud.calls() == []


def test_scripts_and_what_is_sent_to_workers():
    for script in ("worker.sh", "slurm.sbatch"):
        shellcheck((ROOT / "launch" / script).read_text())
    shellcheck(archive.PACK)
    shellcheck(tpu_pod.UNPACK)


# What gcloud would do: a folder is the home of the (only) worker of a node, and ssh is bash with
# that home. The states of the queued resource are a list, of which `describe` takes the next until
# the last one remains.
GCLOUD = """#!{python} -IS
import json, os, pathlib, shutil, signal, subprocess, sys
root = pathlib.Path("{root}")
words = sys.argv[1:]
kind, verb, target = words[2:5]
flags = dict(word[2:].split("=", 1) for word in words[5:] if "=" in word and word.startswith("--"))
with open(root / "calls", "a") as calls:
    calls.write(json.dumps(["gcloud", *words]) + "\\n")
states, pods = root / "states", root / "pods"
if verb == "create":
    for node in [flags.get("node-id")] if "node-id" in flags else [target + "-%d" % i for i in range(2)]:
        (pods / node).mkdir(parents=True)
    states.write_text(flags.get("network", "WAITING_FOR_RESOURCES PROVISIONING ACTIVE"))
elif verb == "delete":
    for pid in pods.glob("*/vit_jax_job/pid"):
        if not (pid.parent / "exit_code").exists():
            os.kill(int(pid.read_text()), signal.SIGKILL)
    while pods.exists():  # a job that was killed may still write
        shutil.rmtree(pods, ignore_errors=True)
    states.unlink()
elif verb == "describe":
    if not states.exists():
        sys.exit("ERROR: NOT_FOUND: Resource was not found")
    if "createTime" in flags["format"]:
        print("2026-11-24T08:30:00.123456789Z")
        sys.exit()
    first, *rest = states.read_text().split()
    states.write_text(" ".join(rest or [first]))
    print(first)
elif verb == "scp":
    target, place = words[4].split(":") if ":" in words[4] else words[5].split(":")
    shutil.copy(words[4], pods / target / place)
elif verb == "ssh":
    if not (pods / target).exists():
        sys.exit("ERROR: no such node")
    home = dict(os.environ, HOME=str(pods / target))
    sys.exit(subprocess.run(["bash", "-c", flags["command"]], env=home, cwd=pods / target).returncode)
"""


class Cloud:
    """Folders and programs that stand for Google's cloud."""

    def __init__(self, root: pathlib.Path):
        self.root = root

    def program(self, name: str, text: str) -> None:
        path = self.root / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def calls(self) -> list[list[str]]:
        path = self.root / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def verbs(self) -> list[str]:
        """Calls without the questions, each one for all slices: `ssh` by what it makes the worker
        do.
        """
        names = [re.sub(r".*worker.sh (\w+).*", r"\1", call[-3], flags=re.S) if call[4] == "ssh" else call[4]
                 for call in self.calls()]  # fmt: skip
        return [name for name in names if name not in ("describe", "status")]

    def job(self, *steps: str) -> list[str]:
        """A command that writes its words down and does the next of `steps` each time that it is
        started.
        """
        (self.root / "steps").write_text("\n".join(steps) + "\n")
        script = f"""
        printf '%s\\n' "$@" > {self.root}/words; echo "a line of the log"
        step=$(head -n 1 {self.root}/steps); sed -i 1d {self.root}/steps; eval "$step"
        """
        return ["bash", "-c", script, "job", *HARD]


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    cloud = Cloud(tmp_path)
    for folder in ("bin", "code/launch"):
        (tmp_path / folder).mkdir(parents=True)
    cloud.program("gcloud", GCLOUD.format(python=sys.executable, root=tmp_path))
    cloud.program(
        "python3", "#!/bin/bash\nmkdir -p .venv/bin && ln -sf /bin/true .venv/bin/python\n"
    )
    cloud.program("sudo", "#!/bin/bash\ncat > /dev/null\n")
    shutil.copy(ROOT / "launch/worker.sh", tmp_path / "code/launch")
    (tmp_path / "code/.gitignore").write_text("ignored\n")
    (tmp_path / "code/ignored").touch()
    subprocess.run(["git", "init", "--quiet", tmp_path / "code"], check=True)
    subprocess.run(["git", "add", "launch", ".gitignore"], cwd=tmp_path / "code", check=True)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setattr(tpu_pod, "ROOT", tmp_path / "code")
    monkeypatch.setattr(tpu_pod, "ARCHIVES", tmp_path)
    monkeypatch.setattr(tpu_vm, "POLL_SECONDS", 0.05)
    return cloud


SMALL = ["--name=small", *PLACE, "--accelerator=v5litepod-8"]
START = ["create", "scp", "setup", "run"]


def test_up_survives_preemption_until_the_command_is_done(cloud, tmp_path, capfd):
    """75 on TPUs that remain, TPUs that are gone while it runs, a crash, the end."""
    waited = f'echo "since ${{VIT_JAX_REQUESTED_AT:-}}" >> {tmp_path}/waited'
    gone = f"echo SUSPENDING SUSPENDED > {tmp_path}/states; exec sleep 60"
    steps = [f"{waited}; {end}" for end in ("exit 75", gone, "exit 134", "exit 0")]
    assert tpu_vm.main(["up", *SMALL, "--", *cloud.job(*steps)]) == 0
    # Only a start on new TPUs has waited for them.
    since = (tmp_path / "waited").read_text().splitlines()
    assert since == ["since 1795509000", "since ", "since 1795509000", "since "]
    twice = [*START, "scp", "setup", "run", "delete"]
    assert cloud.verbs() == [*twice, *twice]
    assert (tmp_path / "words").read_text().splitlines() == HARD
    assert not (tmp_path / "pods").exists()
    err = capfd.readouterr().err
    assert "sending 2 files, 0.0 MB, to every worker" in err
    assert "with changes that are not committed: .gitignore, launch/worker.sh" in err
    assert "is PROVISIONING" in err and "was preempted: it is SUSPENDING" in err
    assert "ended with exit 134" in err


def test_up_of_two_slices(cloud, tmp_path):
    arguments = ["up", *SMALL, "--num_slices=2", "--keep", "--"]
    assert tpu_vm.main([*arguments, *cloud.job("exit 0", "exit 0")]) == 0
    verbs = cloud.verbs()
    assert verbs == ["create", *["scp"] * 2, *["setup"] * 2, *["run"] * 2]
    assert (tmp_path / "pods").exists()


@pytest.mark.parametrize(("step", "code"), [("exit 1", 1), ("exit 2", 2), ("exec /nowhere", 2)])
def test_up_stops_if_a_restart_would_fail_again(step, code, cloud, tmp_path, capfd):
    command = cloud.job(f"echo 'error: no such config'; {step}")
    assert tpu_vm.main(["up", *SMALL, "--", *command]) == code
    assert cloud.verbs() == START
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("error: exit ") and "fix it and run again" in last
    assert "error: no such config" in last or step == "exec /nowhere"


def test_up_gives_up_after_repeated_crashes(cloud, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(tpu_vm, "MAX_FAILURES", 2)
    assert tpu_vm.main(["up", *SMALL, "--", *cloud.job("exit 139", "exit 139")]) == 1
    assert "2 failures in a row" in capfd.readouterr().err.splitlines()[-1]
    assert "delete" not in cloud.verbs()


def test_up_gives_up_on_a_request_that_fails(cloud, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(tpu_vm, "MAX_FAILURES", 2)
    assert tpu_vm.main(["up", *SMALL, "--create_args=--network=FAILED", "--", "x"]) == 1
    assert cloud.verbs() == ["create", "delete", "create", "delete", "create"]
    assert tpu_vm.main(["delete", *SMALL]) == 0
    assert tpu_vm.main(["create", *SMALL, "--create_args=--network=FAILED"]) == 1
    assert "is FAILED: delete it and request it again" in capfd.readouterr().err.splitlines()[-1]


def test_up_replaces_a_pod_that_does_not_answer(cloud, tmp_path, capfd):
    lost = f"rm -r {tmp_path}/pods/*/vit_jax; exec sleep 60"
    assert tpu_vm.main(["up", *SMALL, "--", *cloud.job(lost, "exit 0")]) == 0
    assert cloud.verbs() == [*START, "delete", *START, "delete"]
    assert "do not answer" in capfd.readouterr().err


def test_up_finds_a_running_job_again_and_ends_after_stop(cloud, tmp_path, capfd):
    assert tpu_vm.main(["create", *SMALL]) == tpu_vm.main(["setup", *SMALL]) == 0
    command = cloud.job("trap 'exit 75' TERM; while true; do sleep 0.1; done")
    assert tpu_vm.main(["run", *SMALL, "--", *command]) == 0
    assert tpu_vm.main(["run", *SMALL, "--", *command]) == 1
    assert "runs on" in capfd.readouterr().err
    while not (tmp_path / "pods/small/vit_jax_job/log.txt").read_text():
        time.sleep(0.05)
    assert tpu_vm.main(["status", *SMALL]) == 0
    assert "running  a line of the log" in capfd.readouterr().out
    wait = f"until [ $(grep -c 'worker.sh status' {tmp_path}/calls) -ge 3 ]; do sleep 0.05; done"
    words = [sys.executable, "-m", "launch.tpu_vm", "stop", *SMALL]
    with subprocess.Popen(f"{wait}; {shlex.join(words)}", shell=True, cwd=ROOT):
        assert tpu_vm.main(["up", *SMALL, "--", *command]) == 75
    assert "stopped: the same command continues" in capfd.readouterr().err
    assert cloud.verbs() == [*START, "run", "stop"]
    assert tpu_vm.main(["delete", *SMALL]) == 0
    assert tpu_vm.main(["status", *SMALL]) == 0
    assert "there is none" in capfd.readouterr().out


def test_the_logs_and_a_cloud_that_refuses(cloud, tmp_path, capfd):
    cloud.program("tail", "#!/bin/bash\necho a line\n")  # the real one follows for ever
    assert tpu_vm.main(["create", *SMALL]) == tpu_vm.main(["setup", *SMALL]) == 0
    assert tpu_vm.main(["logs", *SMALL]) == 0
    assert capfd.readouterr().out.endswith(": a line\n")
    cloud.program(
        "gcloud",
        "#!/bin/bash\necho 'ERROR: you have no account\nRun: gcloud auth login' >&2; exit 1\n",
    )
    assert tpu_vm.main(["status", *SMALL]) == 1
    assert capfd.readouterr().err.endswith(
        "ERROR: you have no account Run: gcloud auth login: fix it and try again\n"
    )


def test_without_gcloud(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    assert tpu_vm.main(["status", *POD]) == 2
    assert "gcloud is not found: install" in capsys.readouterr().err


def test_a_dry_run_can_be_pasted(cloud, tmp_path, capsys):
    """In bash it does the same as without --dry_run; the archive has the files as they are, and
    with --untracked also those that git neither tracks nor ignores.
    """
    cloud.program("sleep", "#!/bin/bash\n")
    (tmp_path / "code/new file").touch()
    with (tmp_path / "code/launch/worker.sh").open("a") as script:
        script.write("# changed\n")
    arguments = ["up", *SMALL, "--num_slices=2", "--keep", "--untracked", "--dry_run", "--"]
    text = printed(tpu_vm.main, [*arguments, *cloud.job("exit 0", "exit 0")], capsys)
    subprocess.run(["bash", "-e", "-c", text], check=True, stdout=subprocess.DEVNULL)
    assert cloud.verbs() == ["create", "scp", "scp", "setup", "setup", "run", "run"]
    assert (tmp_path / "words").read_text().splitlines() == HARD
    (copy, _) = sorted((tmp_path / "pods").glob("*/vit_jax"))
    assert {path.name for path in copy.iterdir()} == {".gitignore", "launch", "new file", ".venv"}
    assert (copy / "launch/worker.sh").read_text().endswith("# changed\n")
    assert archive.files(tmp_path / "code") == [".gitignore", "launch/worker.sh"]
    words = archive.command(tmp_path / "code", f"{tmp_path}/tracked.tar.gz", untracked=False)
    subprocess.run(words, check=True)
    with tarfile.open(tmp_path / "tracked.tar.gz") as sent:
        assert sent.getnames() == [".gitignore", "launch", "launch/worker.sh"]


def test_the_page_about_launching_says_what_works(cloud, tmp_path, capsys):
    """Its commands in one bash, with programs that only record their words; ours then run as far as
    they can here.
    """
    record = f'printf \'%s\\0\' "${{0##*/}}" "$@" >> {tmp_path}/said; echo >> {tmp_path}/said'
    for name in ("gcloud", "docker", "kubectl", "sbatch", "python"):
        cloud.program(name, f"#!/bin/bash\n{record}\n")
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/launch.md").read_text(), re.DOTALL)
    subprocess.run(["bash", "-e", "-c", "".join(blocks)], check=True, cwd=tmp_path)
    said = [line.split("\0")[:-1] for line in (tmp_path / "said").read_text().splitlines()]
    mains = {"launch.tpu_vm": tpu_vm.main, "launch.gke": gke.main}
    ours = [words[2:] for words in said if words[0] == "python" and words[2] in mains]
    assert [module for module, *_ in ours] == ["launch.tpu_vm"] * 5 + ["launch.gke"]
    for module, *words in ours:
        cut = words.index("--") if "--" in words else len(words)
        dry_run = ["--dry_run"] if module == "launch.tpu_vm" else []
        assert mains[module]([*words[:cut], *dry_run, *words[cut:]]) == 0
    assert "gs://my-bucket/l16" in capsys.readouterr().out
    trained = [words[words.index("vit_jax.train") :] for words in said if "vit_jax.train" in words]
    assert len(trained) == 5 and all(words[1].startswith("--config=configs/") for words in trained)


# What srun does: starts the tasks of all nodes (two), with %j and %t of --output replaced; gives
# the highest exit code.
SRUN = """#!/bin/bash
count=$((2 * ${{SLURM_NTASKS_PER_NODE:-1}})); jobs=()
while [[ $1 == --* ]]; do [[ $1 == --output=* ]] && output=${{1#*=}}; shift; done
echo "cpus ${{SRUN_CPUS_PER_TASK:-}}" > {root}/srun
for ((i = 0; i < count; i++)); do
  log=${{output//%j/$SLURM_JOB_ID}}
  SLURM_NTASKS=$count SLURM_PROCID=$i SLURM_LOCALID=$((i % (count / 2))) SLURM_STEP_NODELIST=localhost \\
    SLURM_STEP_NUM_NODES=2 "$@" >> "${{log//%t/$i}}" 2>&1 &
  jobs+=($!)
done
worst=0
for job in "${{jobs[@]}}"; do wait "$job"; code=$?; [ "$code" -gt "$worst" ] && worst=$code; done
exit "$worst"
"""


def sbatch(cloud, *command: str, **variables: str) -> subprocess.CompletedProcess:
    cloud.program("srun", SRUN.format(root=cloud.root))
    cloud.program("scontrol", f'#!/bin/bash\necho "$@" >> {cloud.root}/scontrol\n')
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("SLURM_")
    }
    environment |= dict(SLURM_JOB_ID="4711") | variables
    return subprocess.run(
        ["bash", ROOT / "launch/slurm.sbatch", *command],
        cwd=cloud.root, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


EIGHT = dict(SLURM_GPUS_ON_NODE="4", SLURM_NTASKS_PER_NODE="4", SLURM_CPUS_PER_TASK="12")


@pytest.mark.parametrize("code", [0, 1, 75, 130])
def test_slurm(code, cloud, tmp_path):
    script = f'printf "%s\\n" "$SLURM_PROCID of $SLURM_NTASKS" "$@"; exit {code}'
    queue = f'#!/bin/bash\necho "$@" > {tmp_path}/squeue\necho 2026-11-24T08:30:00\n'
    cloud.program("squeue", queue)
    if code == 1:
        script = f'echo "$VIT_JAX_REQUESTED_AT" > {tmp_path}/requested; {script}'
    done = sbatch(cloud, "bash", "-c", script, "job", *HARD, TZ="UTC", **EIGHT)
    assert done.returncode == code and ("error: exit code 1" in done.stderr) == (code in (1, 130))
    logs = sorted(path.name for path in (tmp_path / "slurm_logs").iterdir())
    assert logs == [f"4711.{i}.log" for i in range(8)]
    assert (tmp_path / "srun").read_text() == "cpus 12\n"
    assert (tmp_path / "slurm_logs/4711.5.log").read_text().splitlines() == ["5 of 8", *HARD]
    assert (tmp_path / "squeue").read_text() == "--noheader --jobs=4711 --format=%V\n"
    assert code != 1 or (tmp_path / "requested").read_text() == "1795509000\n"
    requeued = tmp_path / "scontrol"
    assert requeued.exists() == (code == 75)
    assert code != 75 or requeued.read_text() == "requeue 4711\n"


@pytest.mark.parametrize("code", [69, 134, 137])
def test_slurm_runs_crashed_jobs_again_but_not_for_ever(code, cloud, tmp_path):
    """One of eight processes is killed, or loses another; after 75 it is counted afresh."""
    crash = f"exit $((SLURM_PROCID == 3 ? {code} : 1))"
    for command in [crash] * 4 + ["exit 75"] + [crash] * 5:
        done = sbatch(cloud, "bash", "-c", command, **EIGHT)
    assert done.returncode == code and "five crashes in a row" in done.stderr
    assert (tmp_path / "scontrol").read_text() == "requeue 4711\n" * 9


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            EIGHT | dict(SLURM_NTASKS_PER_NODE="1"),
            "1 processes for 4 GPUs on each node: add --ntasks-per-node=4",
        ),
        (EIGHT | dict(SLURM_GPUS_PER_TASK="1"), "give --gpus-per-node alone"),
    ],
)
def test_slurm_refuses_what_would_leave_gpus_idle(variables, message, cloud, tmp_path):
    done = sbatch(cloud, "true", **variables)
    assert done.returncode == 2 and message in done.stderr and not (tmp_path / "srun").exists()
    assert sbatch(cloud, **EIGHT).returncode == 2


def test_slurm_options_reach_the_processes():
    text = (ROOT / "launch/slurm.sbatch").read_text()
    options = re.findall(r"^#SBATCH (\S+)$", text, re.MULTILINE)
    assert {"--requeue", "--signal=TERM@120", "--open-mode=append"} <= set(options)
    # sbatch stops reading options at the first command.
    assert text.index("#SBATCH --signal") < text.index("set -uo pipefail")


JOIN = "import jax; jax.distributed.initialize(); print(jax.process_index(), jax.process_count(), jax.device_count())"


@pytest.mark.slow
def test_jax_finds_the_processes_of_slurm(cloud, tmp_path):
    variables = dict(JAX_PLATFORMS="cpu", XLA_FLAGS="", SLURM_JOB_ID=str(time.time_ns() % 4096))
    done = sbatch(cloud, sys.executable, "-c", JOIN, **variables)
    logs = sorted((tmp_path / "slurm_logs").iterdir())
    assert done.returncode == 0, [log.read_text() for log in logs]
    assert [log.read_text().splitlines()[-1] for log in logs] == ["0 2 2", "1 2 2"]


@pytest.mark.slow
def test_jax_finds_the_processes_of_slices_on_gke():
    """The variables are those that GKE adds to the pods of a JobSet; JAX_FORCE_TPU_INIT stands for
    the chips.
    """
    gke_adds = dict(
        MEGASCALE_COORDINATOR_ADDRESS="localhost",
        MEGASCALE_NUM_SLICES="2",
        TPU_WORKER_HOSTNAMES="localhost",
    )
    gke_adds |= dict(
        TPU_WORKER_ID="0",
        JAX_FORCE_TPU_INIT="1",
        TPU_SKIP_MDS_QUERY="1",
        JAX_PLATFORMS="cpu",
        XLA_FLAGS="",
    )
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", JOIN], env=os.environ | gke_adds | dict(MEGASCALE_SLICE_ID=str(i)),
            stdout=subprocess.PIPE, text=True,
        ) for i in range(2)
    ]  # fmt: skip
    assert [job.communicate(timeout=120)[0].splitlines()[-1] for job in jobs] == ["0 2 2", "1 2 2"]
