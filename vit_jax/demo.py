"""Runs `make demo`: pretrain on digits, fine-tune at a higher resolution, evaluate both, and write
a page about it.

python -m vit_jax.demo [--workdir=DIR]
"""

import json
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import time

from etils import epath
from rich.table import Table

from vit_jax import cli, errors
from vit_jax.cli.terminal import Console
from vit_jax.errors import NegativeResult, Preempted, printable
from vit_jax.train import curves

STAGES = ("pretrain", "finetune")


def commands(workdir: pathlib.Path) -> list[list[str]]:
    """The commands that a user would type, in order."""
    pretrain, finetune = (workdir / stage for stage in STAGES)

    def module(name: str, config: str, *arguments: str) -> list[str]:
        return ["python", "-m", f"vit_jax.{name}", f"--config=configs/{config}", *arguments]

    def evaluate(folder: pathlib.Path) -> list[str]:
        options = [f"--config.init_from={folder}", f"--json={folder}/test.json"]
        return module("evaluate", "evaluate.py:digits,test", *options, f"--out={folder}/evals")

    init_from = f"--config.init_from={pretrain}"
    figures = ["python", "-m", "vit_jax.figures"]
    report = ["python", "-m", "vit_jax.report"]
    return [
        module("train", "demo.py", f"--workdir={pretrain}"),
        module("train", "demo_finetune.py", init_from, f"--workdir={finetune}"),
        evaluate(pretrain),
        evaluate(finetune),
        [*figures, str(finetune), f"--out={finetune}/figures"],
        [*report, str(pretrain), str(finetune), f"--out={workdir}/report.html"],
    ]


def run_command(command: list[str]) -> None:
    """Prints and runs one command."""
    text = shlex.join(command)
    print(f"\n$ {printable(text)}", flush=True)
    words = [sys.executable, *command[1:]]
    options = dict(stdout=subprocess.DEVNULL, start_new_session=True)
    with (  # whose own session Ctrl-C does not reach
        subprocess.Popen(words, **options) as job,
        errors.handling(errors.SIGNALS, lambda number, _: job.send_signal(number)),
    ):
        code = job.wait()
    if code == Preempted.exit_code:
        raise Preempted
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if code:
        raise NegativeResult(f"`{text}` ended with exit code {code}: see the line above")


def report(workdir: pathlib.Path, seconds: float) -> None:
    """Draws the curves and prints the table."""
    folders = {stage: epath.Path(workdir / stage) for stage in STAGES}
    losses = {"training loss (with mixup)": "train/loss", "validation loss": "eval/val/loss"}
    accuracies = {"validation top-1": "eval/val/top1"}
    curves.draw(folders, losses, epath.Path(workdir / "loss.png"))
    curves.draw(folders, accuracies, epath.Path(workdir / "accuracy.png"))
    table = Table(title=f"digits, {seconds:.0f} seconds in total")
    for column in ("stage", "image size", "validation top-1", "test top-1"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for stage, folder in folders.items():
        size = json.loads((folder / "config.json").read_text())["config"]["image_size"]
        test = json.loads((folder / "test.json").read_text())["eval/test/top1"]
        _, val = curves.series(folder, "eval/val/top1")
        table.add_row(stage, f"{size} x {size}", f"{val[-1]:.2%}", f"{test:.2%}")
    Console().print(table)
    print(printable(f"Workdirs:  {folders['pretrain']}  {folders['finetune']}"))
    print(printable(f"Figures:   {workdir / 'loss.png'}  {workdir / 'accuracy.png'}"))
    print(printable(f"Curves:    tensorboard --logdir={workdir}"))
    print(printable(f"The page:  {workdir / 'report.html'}, with curves, mistakes and attention"))


def add_arguments(parser, part: str) -> None:
    parser.add_argument(
        "--workdir", default="demo_workdir", help="replaced if it exists (default: %(default)s)"
    )


def work(args) -> None:
    workdir = pathlib.Path(args.workdir)
    start = time.monotonic()
    for stage in STAGES:
        shutil.rmtree(workdir / stage, ignore_errors=True)
    for command in commands(workdir):
        run_command(command)
    report(workdir, time.monotonic() - start)


COMMAND = cli.Command("demo", __doc__, work, add_arguments)
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
