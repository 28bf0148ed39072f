"""Runs a command on a pod of Cloud TPU VMs: asks for the TPUs, sets them up, runs, watches,
restarts after preemption.

python -m launch.tpu_vm up --name=NAME --zone=ZONE --project=PROJECT --accelerator=v5litepod-256 -- COMMAND ...
"""

import argparse
import concurrent.futures
import dataclasses
import shlex
import shutil
import subprocess
import sys
import time

from launch.tpu_pod import ACTIONS, Pod, plan
from vit_jax import cli, errors
from vit_jax.errors import NegativeResult, Preempted, UserError

POLL_SECONDS = 60
ASK_SECONDS = 300  # ssh to a machine that is gone hangs for long
MAX_SILENT = 3  # polls without an answer from the workers until the pod counts as lost
MAX_SPLIT = (
    10  # polls in which some workers have ended and others run, which will not end by themselves
)
MAX_FAILURES = 5  # in a row; preemptions are none


class GcloudFailed(NegativeResult):
    """A gcloud command failed, which may pass: the network, a login that has expired."""


def say(message: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)


def call(*commands: list[str]) -> None:
    """Runs the commands side by side; raises GcloudFailed where one fails, behind what it printed."""
    jobs = [subprocess.Popen(command) for command in commands]
    for job, code in [(job, job.wait()) for job in jobs]:
        if code:
            raise GcloudFailed(
                f"exit code {code} of {shlex.join(job.args)}: mend what it says above and try again"
            )


def state_of(pod: Pod) -> str:
    """State of the queued resource, such as ACTIVE; "" where there is none; GcloudFailed where it
    can't be asked.
    """
    done = subprocess.run(pod.describe(), capture_output=True, text=True, check=False)
    if done.returncode and "NOT_FOUND" not in done.stderr:
        raise GcloudFailed(
            f"{shlex.join(pod.describe())} says {done.stderr.strip()}: mend it and try again"
        )
    return "" if done.returncode else done.stdout.strip()


def settled(pod: Pod) -> str:
    """Waits while the platform works at the request; returns ACTIVE, FAILED, SUSPENDED or "" (there
    is none).
    """
    told = None
    while (state := state_of(pod)) not in ("ACTIVE", "FAILED", "SUSPENDED", ""):
        if state != told:
            say(f"{pod.name} is {state}")
        told = state
        time.sleep(POLL_SECONDS)
    return state


def poll(pod: Pod) -> list[tuple[str, str, str]]:
    """(host, state, last line of the log) of every worker, as worker.sh says; [] where one of them
    does not answer.
    """

    def ask(command: list[str]) -> str | None:
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=ASK_SECONDS
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            return None
        return done.stdout

    with concurrent.futures.ThreadPoolExecutor(pod.num_slices) as threads:
        answers = list(threads.map(ask, pod.workers("status")))
    if None in answers:
        return []
    return [
        tuple(line.split("\t")[1:4])
        for line in "".join(answers).splitlines()
        if line.startswith("vit_jax\t")
    ]


def create(pod: Pod) -> None:
    call(pod.create())
    if (state := settled(pod)) != "ACTIVE":
        raise NegativeResult(
            f"{pod.name} is {state or 'gone'}: delete it and ask again, elsewhere or for less"
        )


def setup(pod: Pod) -> None:
    """Brings what `Pod.pack` has packed to every worker and installs it; does little where that was
    done before.
    """
    for node in pod.nodes:  # one after the other: the first may have to make the ssh key
        call(pod.copy(node))
    call(*pod.setup())


def judge(pod: Pod, workers: list[tuple[str, str, str]]) -> str:
    """Says "done", "again" (preempted) or "failed" (crashed) of workers that have ended.

    Raises:
      Preempted: `stop` was called.
      UserError, NegativeResult: the command ended with 2 or 1, or can't be started; it would do so
        again.
    """
    ended = {state: (host, line) for host, state, line in workers if state != "running"}
    if "stopped" in ended:
        say(
            f"stopped: the same command continues; {pod.name} is kept, and costs, until you delete "
            "it"
        )
        raise Preempted
    if ended.keys() == {"exit 0"}:
        return "done"
    if (
        "exit 75" in ended or state_of(pod) != "ACTIVE"
    ):  # others then end with whatever error that led to
        say(f"{pod.name} was preempted")
        return "again"
    for state in ("exit 1", "exit 2", "exit 126", "exit 127"):
        if (
            state in ended and "lost" not in ended
        ):  # a machine that started anew; others then end with an error
            host, line = ended[state]
            kind = NegativeResult if state == "exit 1" else UserError
            raise kind(
                f"{state} on {host}: {line}: mend it and run again; {pod.name} costs until you "
                "delete it"
            )
    say(f"{pod.name} ended with {', '.join(sorted(ended))}")
    return "failed"


def watch(pod: Pod) -> str:
    """Waits for the end of the command: what `judge` says, or "again" where the TPUs are gone."""
    silent = split = 0
    while True:
        time.sleep(POLL_SECONDS)
        try:
            if (state := state_of(pod)) != "ACTIVE":
                say(f"{pod.name} was preempted: it is {state or 'gone'}")
                return "again"
        except GcloudFailed as error:  # this machine may be off the network; the job is not
            say(errors.one_line(error))
            continue
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
    """Asks for the TPUs where there are none, else starts the command where it does not run, and
    watches it.
    """
    if (state := settled(pod)) != "ACTIVE":
        say(f"{pod.name} is {state or 'gone'}: asking for it again")
        if state:
            call(pod.delete())
        call(pod.create())
        return "failed" if state == "FAILED" else "again"
    states = {state for _, state, _ in poll(pod)}
    if states != {"running"}:
        if "running" in states:
            call(*pod.workers("stop"))
        setup(pod)
        call(*pod.workers("run", *command))
    say(
        f"{pod.name} is running; python -m launch.tpu_vm logs shows its log, and you may interrupt "
        "this and come back"
    )
    return watch(pod)


def up(pod: Pod, command: list[str], keep: bool) -> None:
    """Everything from nothing to the end of `command`; raises what `judge` raises, and after
    MAX_FAILURES.
    """
    create = pod.create()  # what is wrong with it must show now and not after a preemption
    for word in command:
        if word.startswith("--workdir=") and not word.startswith("--workdir=gs://"):
            raise UserError(
                f"{word} would be lost with the TPUs' own disks: give a folder on gs://"
            )
    call(pod.pack())  # once: what is edited later must not slip into a run that continues
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
            return None if keep else call(pod.delete())
        failures = failures + 1 if outcome == "failed" else 0
    raise NegativeResult(
        f"{failures} failures in a row, see above: mend it; {pod.name} costs until you delete it"
    )


def status(pod: Pod) -> None:
    state = state_of(pod)
    print(f"{pod.name}: {state or 'there is none'}")
    if state == "ACTIVE":
        workers = ["  ".join(worker) for worker in poll(pod)]
        print(*workers or ["its workers do not answer: set it up"], sep="\n")


def act(args: argparse.Namespace, pod: Pod, command: list[str]) -> None:
    if (args.action in ("run", "up")) != bool(command):
        raise UserError(
            f"{args.action} takes {'no' if command else 'a'} command behind --: see --help"
        )
    if args.dry_run:
        return print(*plan(pod, args.action, command, args.all_workers, args.keep), sep="\n")
    if shutil.which("gcloud") is None:
        raise UserError(
            "gcloud is not found: install the Google Cloud CLI, "
            "https://cloud.google.com/sdk/docs/install"
        )
    match args.action:
        case "create":
            create(pod)
        case "setup":
            call(pod.pack())
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
            up(pod, command, args.keep)


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
        help="one of the above; all take the same options",
    )
    parser.add_argument("--name", required=True, help="of the queued resource, and of its nodes")
    parser.add_argument("--zone", required=True)
    parser.add_argument("--project", required=True)
    parser.add_argument("--accelerator", help="of each slice, as v5litepod-256; for create and up")
    parser.add_argument("--num_slices", type=int, default=1)
    parser.add_argument(
        "--spot", action="store_true", help="cheaper; may be taken away at any time"
    )
    parser.add_argument(
        "--runtime", help="software of the TPU VM; default: the one for the accelerator"
    )
    parser.add_argument(
        "--create_args", type=shlex.split, default=[], help="further flags of gcloud's create"
    )
    parser.add_argument("--all_workers", action="store_true", help="logs of all workers")
    parser.add_argument("--keep", action="store_true", help="up does not delete at the end")
    parser.add_argument("--dry_run", action="store_true", help="print the commands and run none")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    cut = argv.index("--") if "--" in argv else len(argv)
    args = parse(argv[:cut])
    fields = {field.name: getattr(args, field.name) for field in dataclasses.fields(Pod)}
    return cli.run(lambda: act(args, Pod(**fields), argv[cut + 1 :]), debug=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
