"""Lists the commands, and runs one: `vit_jax train ...` is `python -m vit_jax.train ...`."""

import importlib
import sys

from vit_jax.errors import UserError, end_on_signals

COMMANDS = {
    "train": "pretrain or fine-tune what a config says",
    "finetune": "fine-tune on a folder of images, or as a config says",
    "evaluate": "measure weights on any data set",
    "predict": "classes or features of images",
    "figures": "draw what weights have learned, and where they look in images",
    "vtab": "check, prepare and run the 19 tasks of VTAB-1k",
    "data": "show a batch, check data sets, prepare them",
    "plan": "memory, time and cost of a config on a TPU pod, by the TPU compiler",
    "convert": "weights from one format to another",
    "models": "the table of models",
    "benchmark": "measure the step, the data, checkpoints or the start",
    "goodput": "where the wall time of runs went",
    "study": "many runs of one recipe, their cost, and what they show together",
    "compare": "where runs begin to differ, and what may be the reason",
    "report": "the page of a run: curves, evaluations, pictures, speed, commands",
    "demo": "pretrain, fine-tune and evaluate on scanned digits",
}


def usage() -> str:
    lines = [f"  {name:<10} {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: vit_jax COMMAND ...",
            "",
            *lines,
            "",
            "vit_jax COMMAND --help has the arguments of each",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the command that the first argument names; returns its exit code."""
    if argv is None:
        end_on_signals()
    name, *arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        from vit_jax import cli  # which takes longer than all else here

        return cli.run(lambda: print(usage()), debug=False)
    if name not in COMMANDS:
        print(
            f"error: {name!r} is not a command: choose one of {', '.join(COMMANDS)}",
            file=sys.stderr,
        )
        return UserError.exit_code
    module = importlib.import_module(f"vit_jax.{name}")
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"vit_jax.{name}.__main__")
    return module.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
