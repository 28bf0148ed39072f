"""The demonstration behind `make demo`: pretrain on digits, fine-tune at a higher resolution,
evaluate both.

python -m vit_jax.demo [--workdir=DIR]
"""

import json
import pathlib
import shlex
import shutil
import subprocess
import sys
import time

from etils import epath
from rich.console import Console
from rich.table import Table

from vit_jax import cli, figures
from vit_jax.errors import NegativeResult

STAGES = ("pretrain", "finetune")


def commands(workdir: pathlib.Path) -> list[list[str]]:
    """What a user would type, in order."""
    train, evaluate = ["python", "-m", "vit_jax.train"], ["python", "-m", "vit_jax.evaluate"]
    pretrain, finetune = (workdir / stage for stage in STAGES)
    return [
        [*train, "--config=configs/demo.py", f"--workdir={pretrain}"],
        [
            *train,
            "--config=configs/demo_finetune.py",
            f"--config.init_from={pretrain}",
            f"--workdir={finetune}",
        ],
        *(
            [
                *evaluate,
                "--config=configs/evaluate.py:digits,test",
                f"--config.init_from={folder}",
                f"--json={folder}/test.json",
            ]
            for folder in (pretrain, finetune)
        ),
    ]


def run_command(command: list[str]) -> None:
    """Shows and runs one command.

    Raises:
      NegativeResult: it failed; its own last line says why.
    """
    print(f"\n$ {shlex.join(command)}", flush=True)
    words = [sys.executable, *command[1:]]
    code = subprocess.run(words, stdout=subprocess.DEVNULL, check=False).returncode
    if code:
        raise NegativeResult(
            f"`{shlex.join(command)}` ended with exit code {code}: see its last line above"
        )


def report(workdir: pathlib.Path, seconds: float) -> None:
    """Draws the curves and prints the table."""
    folders = {stage: epath.Path(workdir / stage) for stage in STAGES}
    losses = {"training loss (with mixup)": "train/loss", "validation loss": "eval/val/loss"}
    figures.curves(folders, losses, epath.Path(workdir / "loss.png"))
    figures.curves(
        folders, {"validation top-1": "eval/val/top1"}, epath.Path(workdir / "accuracy.png")
    )
    table = Table(title=f"digits, {seconds:.0f} seconds in all")
    for column in ("stage", "image size", "validation top-1", "test top-1"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for stage, folder in folders.items():
        size = json.loads((folder / "config.json").read_text())["config"]["image_size"]
        test = json.loads((folder / "test.json").read_text())["eval/test/top1"]
        _, val = figures.series(folder, "eval/val/top1")
        table.add_row(stage, f"{size} x {size}", f"{val[-1]:.2%}", f"{test:.2%}")
    Console().print(table)
    print(f"Workdirs:  {folders['pretrain']}  {folders['finetune']}")
    print(f"Figures:   {workdir / 'loss.png'}  {workdir / 'accuracy.png'}")
    print(f"Curves:    tensorboard --logdir={workdir}")


def add_arguments(parser, part: str) -> None:
    parser.add_argument(
        "--workdir", default="demo_workdir", help="replaced if it is there (default: %(default)s)"
    )


def work(args) -> None:
    workdir = pathlib.Path(args.workdir).absolute()
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
