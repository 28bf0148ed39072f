"""Runs a command on a pod of Cloud TPU VMs: requests the TPUs, sets them up, runs the command,
watches it, and restarts it after preemptions.

python -m launch.tpu_vm up --name=NAME --zone=ZONE --project=PROJECT \\
  --accelerator=v5litepod-256 -- COMMAND ...
"""

import argparse
import concurrent.futures
import dataclasses
import datetime
import os
import shlex
import shutil
import subprocess
import sys
import time

from launch import archive, tpu_pod
from launch import command as commands
from launch.gcloud import GcloudFailed, ask, call
from launch.tpu_pod import ACTIONS, Pod, plan
from vit_jax import cli, errors
from vit_jax.errors import NegativeResult, Preempted, UserError, printable
from vit_jax.train.goodput import REQUESTED_AT

POLL_SECONDS = 60
SSH_TIMEOUT_SECONDS = 300  # ssh to a machine that no longer exists hangs for long
MAX_SILENT = 3  # polls without an answer, after which the workers count as lost
MAX_SPLIT = 10  # polls in which only some workers run, after which they count as hanging
MAX_FAILURES = 5  # in a row, not counting preemptions


def say(message: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {printable(message)}", file=sys.stderr, flush=True)


def state_of(pod: Pod) -> str:
    """State of the queued resource, such as ACTIVE; "" if there is none."""
    return ask(pod.describe())


def wait_to_count(pod: Pod) -> list[str]:
    """Words before a command that say since when it waited for the TPUs: see vit_jax.goodput."""
    created = ask(pod.describe("createTime"))
    try:
        since = datetime.datetime.fromisoformat(created).timestamp()
    except ValueError:  # no reason not to train
        return []
    return ["env", f"{REQUESTED_AT}={since:.0f}"]


def settled(pod: Pod) -> str:
    """Waits while the platform processes the request; returns ACTIVE, FAILED, SUSPENDED or "" (no
    such request).
    """
    before = None
    while True:
        state = state_of(pod)
        if state in ("ACTIVE", "FAILED", "SUSPENDED", ""):
            return state
        if state != before:
            say(f"{pod.name} is {state}")
        before = state
        time.sleep(POLL_SECONDS)


def poll(pod: Pod) -> list[tuple[str, str, str]]:
    """(host, state, last line of the log) of every worker, from worker.sh; [] if one does not
    answer.
    """

    def report(command: list[str]) -> str | None:
        options = dict(capture_output=True, text=True, check=True, timeout=SSH_TIMEOUT_SECONDS)
        try:
            return subprocess.run(command, **options).stdout
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            return None

    with concurrent.futures.ThreadPoolExecutor(pod.num_slices) as threads:
        answers = list(threads.map(report, pod.workers("status")))
    if None in answers:
        return []
    lines = "".join(answers).splitlines()
    return [tuple(line.split("\t")[1:4]) for line in lines if line.startswith("vit_jax\t")]


def create(pod: Pod) -> None:
    call(pod.create())
    state = settled(pod)
    if state != "ACTIVE":
        raise NegativeResult(
            f"{pod.name} is {state or 'gone'}: delete it and request it again, in another zone or "
            "with fewer chips"
        )


def check(pod: Pod, action: str, command: list[str]) -> None:
    """Raises UserError if the command does not fit the TPUs, as far as that is known here."""
    if action == "up":
        commands.check_workdir(command, "lost with the disks of the TPU VMs")
    if pod.accelerator is None or pod.num_slices > 1 or not pod.target.has_one_host:
        commands.check_workdir(command, "another folder on each host of the pod")
    if pod.accelerator:
        commands.check_recipe(command, pod.target, pod.num_slices)


def pack(pod: Pod, command: list[str], max_mb: float) -> None:
    """Makes the archive that `setup` copies, and says what is in it."""
    file = commands.config_file(command)
    for line in archive.check(tpu_pod.ROOT, pod.untracked, max_mb, file):
        say(line)
    call(pod.pack())
    say(f"{pod.archive} has {os.path.getsize(pod.archive) / 1e6:.1f} MB")


def setup(pod: Pod) -> None:
    """Copies the archive of `Pod.pack` to every worker and installs it; a second time it does
    little.
    """
    for node in pod.nodes:  # one after the other, since the first may have to create the ssh key
        call(pod.copy(node))
    call(*pod.setup())


def judge(pod: Pod, workers: list[tuple[str, str, str]]) -> str:
    """How the command ended on its workers: "done", "again" (preempted) or "failed" (crashed).

    Raises:
      Preempted: `stop` was called.
      UserError, NegativeResult: the command ended with 2 or 1, or can't be started; a restart would
        fail again.
    """
    ended = {state: (host, line) for host, state, line in workers if state != "running"}
    if "stopped" in ended:
        say(f"stopped: the same command continues; {pod.name} costs money until you delete it")
        raise Preempted
    if ended.keys() == {"exit 0"}:
        return "done"
    # After a preemption, other workers may end with any error.
    if "exit 75" in ended or state_of(pod) != "ACTIVE":
        say(f"{pod.name} was preempted")
        return "again"
    for state in ("exit 1", "exit 2", "exit 126", "exit 127"):
        # "lost" is a machine that was rebooted, after which other workers end with an error.
        if state in ended and "lost" not in ended:
            host, line = ended[state]
            kind = NegativeResult if state == "exit 1" else UserError
            raise kind(
                f"{state} on {host}: {line}: fix it and run again; {pod.name} costs money until "
                "you delete it"
            )
    say(f"{pod.name} ended with {', '.join(sorted(ended))}")
    return "failed"


def watch(pod: Pod) -> str:
    """Waits for the end of the command; returns what `judge` does, or "again" without TPUs."""
    silent = 0
    split = 0
    while True:
        time.sleep(POLL_SECONDS)
        try:
            state = state_of(pod)
        except GcloudFailed as error:  # perhaps this machine is offline, but not the job
            say(errors.one_line(error))
            continue
        if state != "ACTIVE":
            say(f"{pod.name} was preempted: it is {state or 'gone'}")
            return "again"
        workers = poll(pod)
        silent = 0 if workers else silent + 1
        if silent == MAX_SILENT:
            say(f"the workers of {pod.name} do not answer: deleting it")
            call(pod.delete())
            return "again"
        running = sum(state == "running" for _, state, _ in workers)
        split = split + 1 if running < len(workers) else 0
        if split and (running == 0 or split == MAX_SPLIT):
            return judge(pod, workers)


def attempt(pod: Pod, command: list[str]) -> str:
    """Requests the TPUs if there are none; else starts the command unless it runs, and watches."""
    state = settled(pod)
    if state != "ACTIVE":
        say(f"{pod.name} is {state or 'gone'}: requesting it again")
        if state:
            call(pod.delete())
        call(pod.create())
        return "failed" if state == "FAILED" else "again"
    states = {state for _, state, _ in poll(pod)}
    if states != {"running"}:
        if "running" in states:
            call(*pod.workers("stop"))
        setup(pod)
        waited = [] if states else wait_to_count(pod)  # without an answer, the TPUs are new
        call(*pod.workers("run", *waited, *command))
    say(
        f"{pod.name} is running: python -m launch.tpu_vm logs shows its log; you may interrupt "
        "this command and start it again later"
    )
    return watch(pod)


def up(pod: Pod, command: list[str], keep: bool, max_mb: float) -> None:
    """Everything from the request to the end of `command`; raises what `judge` does, and
    NegativeResult after MAX_FAILURES.
    """
    create = pod.create()  # wrong flags must show now and not after a preemption
    pack(pod, command, max_mb)  # once, so that a run never continues with code edited since
    if not state_of(pod):
        call(create)
    failures = 0
    while failures < MAX_FAILURES:
        try:
            outcome = attempt(pod, command)
        except GcloudFailed as error:
            say(errors.one_line(error))
            outcome = "failed"
            time.sleep(POLL_SECONDS)
        if outcome == "done":
            say("done")
            if not keep:
                call(pod.delete())
            return
        failures = failures + 1 if outcome == "failed" else 0
    raise NegativeResult(
        f"{failures} failures in a row, see above: fix the cause; {pod.name} costs money until you "
        "delete it"
    )


def status(pod: Pod) -> None:
    state = state_of(pod)
    print(f"{pod.name}: {state or 'there is none'}")
    if state == "ACTIVE":
        workers = ["  ".join(worker) for worker in poll(pod)]
        print(*workers or ["its workers do not answer: run the action setup"], sep="\n")


def act(args: argparse.Namespace, pod: Pod, command: list[str]) -> None:
    if (args.action in ("run", "up")) != bool(command):
        raise UserError(
            f"{args.action} takes {'no' if command else 'a'} command after --: see --help"
        )
    if command:
        check(pod, args.action, command)
    if args.dry_run:
        print(*plan(pod, args.action, command, args.all_workers, args.keep), sep="\n")
        return
    if shutil.which("gcloud") is None:
        raise UserError(
            "gcloud is not found: install the Google Cloud CLI, "
            "https://cloud.google.com/sdk/docs/install"
        )
    match args.action:
        case "create":
            create(pod)
        case "setup":
            pack(pod, command, args.max_mb)
            setup(pod)
        case "run" | "stop":
            call(*pod.workers(args.action, *command))
        case "logs":
            call(*pod.logs(args.all_workers))
        case "status":
            status(pod)
        case "delete":
            call(pod.delete())
        case "up":
            up(pod, command, args.keep, args.max_mb)


def parse(argv: list[str]) -> argparse.Namespace:
    actions = "\n".join(f"  {name:7} {text}" for name, text in ACTIONS.items())
    parser = cli.ArgumentParser(
        "launch.tpu_vm",
        usage="%(prog)s ACTION --name=NAME --zone=ZONE --project=PROJECT [options] [-- COMMAND]",
        description=f"{__doc__}\nactions:\n{actions}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "action",
        choices=ACTIONS,
        metavar="ACTION",
        help="one of these; all take the same options",
    )
    parser.add_argument("--name", required=True, help="name of the queued resource and its nodes")
    parser.add_argument("--zone", required=True)
    parser.add_argument("--project", required=True)
    parser.add_argument(
        "--accelerator", help="of each slice, such as v5litepod-256; for create and up"
    )
    parser.add_argument("--num_slices", type=int, default=1)
    parser.add_argument("--spot", action="store_true", help="cheaper; may be preempted at any time")
    parser.add_argument(
        "--runtime", help="software of the TPU VM; default: the one for the accelerator"
    )
    parser.add_argument(
        "--create_args", type=shlex.split, default=[], help="more flags of gcloud's create"
    )
    parser.add_argument(
        "--unlisted",
        action="store_true",
        help="accept an accelerator or zone that launch/tpu_types.py does not list",
    )
    parser.add_argument(
        "--untracked",
        action="store_true",
        help="also send files that git does not track, except those that it ignores",
    )
    parser.add_argument(
        "--max_mb",
        type=float,
        default=100,
        metavar="MB",
        help="send no more to the workers than this (default: %(default)s)",
    )
    parser.add_argument("--all_workers", action="store_true", help="follow the logs of all workers")
    parser.add_argument(
        "--keep", action="store_true", help="do not delete the TPUs at the end of up"
    )
    parser.add_argument(
        "--dry_run", action="store_true", help="print the commands without running them"
    )
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    cut = argv.index("--") if "--" in argv else len(argv)
    args = parse(argv[:cut])
    fields = {field.name: getattr(args, field.name) for field in dataclasses.fields(Pod)}
    return cli.run(lambda: act(args, Pod(**fields), argv[cut + 1 :]), debug=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
