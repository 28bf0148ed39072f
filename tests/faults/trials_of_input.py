"""Generated mistakes in configs and on command lines: each ends in one line and exit code 2, and
starts nothing.
"""

import contextlib
import io
import pathlib
import random
import string

from conftest import TINY
from processes_at_hand import expect

from vit_jax import config as configs
from vit_jax.config import KEYS
from vit_jax.config.key import LARGEST
from vit_jax.evaluate import __main__ as evaluate
from vit_jax.train import __main__ as train


def called(key: str) -> str:
    return key.replace("evals.*", "evals.val")


def word(chance) -> str:
    return (
        "".join(
            chance.choice(string.ascii_lowercase + "._-/ ") for _ in range(chance.randrange(1, 12))
        ).strip()
        or "x"
    )


def of_another_type(chance, value) -> str:
    if isinstance(value, bool):
        return chance.choice(("2", "maybe", "1.5"))
    if isinstance(value, int):
        return chance.choice(("1.5", "ten", "1e3", "", "None", "(1, 2)", "[", "0x"))
    if isinstance(value, float):
        return chance.choice(("much", "", "1,5", "(0.1,)", "{}", "--"))
    return chance.choice(("3", "(1, 2, 3)", "('a',)", "((1, 2), 3)", "(('a', 'b'),)", "(("))


def wrong_type(chance, known) -> list[str]:
    key = chance.choice([key for key, value in known.items() if not isinstance(value, str)])
    return [f"--config.{called(key)}={of_another_type(chance, known[key])}"]


def out_of_range(chance, known) -> list[str]:
    key = chance.choice(
        [
            name
            for name, key in KEYS.items()
            if key.within != (0, LARGEST) and not key.pairs and not key.items
        ]
    )
    low, high = KEYS[key].within
    off = chance.choice(
        (low - 1, low - 10**6, high + 1 if isinstance(high, int) else high + 0.5, high * 10 + 1)
    )
    return [f"--config.{called(key)}={off}"]


def no_choice(chance, known) -> list[str]:
    key = chance.choice(
        [name for name, key in KEYS.items() if key.choices and isinstance(key.default, str)]
    )
    return [f"--config.{called(key)}={word(chance)}q"]


def misspelt(chance, known) -> list[str]:
    key = called(chance.choice(list(known)))
    at = chance.randrange(len(key))
    return [
        f"--config.{key[:at]}{chance.choice('qxz')}{key[at + 1 :]}={known[chance.choice(list(known))]}"
    ]


def other_branch(chance, known) -> list[str]:
    key = chance.choice(
        [
            name
            for name, key in KEYS.items()
            if not key.pairs and any(KEYS[selector].choices for selector in key.only_if)
        ]
    )
    ((selector, allowed),) = KEYS[key].only_if.items()
    other = chance.choice([value for value in KEYS[selector].choices if value not in allowed])
    value = known[key] if not isinstance(known[key], tuple) else "('a',)"
    return [f"--config.{called(selector)}={other}", f"--config.{called(key)}={value}"]


def bad_argument(chance, known) -> list[str]:
    return [
        chance.choice(
            (
                f"--{word(chance)}",
                word(chance),
                "--config.",
                "--config",
                "--=",
                f"--dry_run={word(chance)}",
            )
        )
    ]


def contradiction(chance, known) -> list[str]:
    many = [
        ["--config.total_epochs=3.0", "--config.total_steps=9"],
        [f"--config.accum_steps={chance.choice((3, 5, 7, 100))}"],
        ["--config.init_from=a", "--config.branch_from=b"],
        ["--config.total_steps=0"],
        [f"--config.checkpoint.keep_best=eval/{word(chance)}/top1"],
        [f"--config.optim.wd_mults=(('{chance.choice('([*+?')}', 1.0),)"],
        [f"--config.mesh.data={chance.choice((3, 7, 10**6))}"],
        ["--config.mesh.data=-1", "--config.mesh.fsdp=-1"],
        ["--config.optim.schedule=stair"],
        [f"--config.data.repeats={chance.choice((3, 5, 7))}"],
        [f"--config.model.variant={word(chance)}"],
        [f"--config.data.subset={word(chance)}"],
        [f"--config.topology={word(chance)}"],
        [f"--config.optim.cooldown_steps={chance.randrange(13, 99)}"],
        ["--config.label_smoothing=0.1", "--config.loss=multilabel_xent"],
    ]
    return chance.choice(many)


def broken_file(chance, folder: pathlib.Path) -> str:
    """A config file that is cut off, or has a line too many."""
    lines, name = TINY.splitlines(), "".join(chance.choices(string.ascii_lowercase, k=7))
    at = chance.randrange(4, len(lines) - 1)
    broken = [
        "\n".join(lines[:at]) + "\n    config.model = dict(",
        TINY.replace("    return config", f"    config.{name} = 1\n    return config"),
        TINY.replace("return config", f"return {chance.choice(('1', 'None', '[]', 'config.seed', name))}"),
        TINY.replace("def get_config", "def get"),
        TINY.replace("import ml_collections", f"import {name}"),
        TINY.replace("64", chance.choice(("'64'", "None", "-64", "6.4", "[64]"))),
        "\0" + TINY,
        "",
    ]  # fmt: skip
    path = folder / f"broken_{chance.randrange(10**9)}.py"
    path.write_text(chance.choice(broken))
    return str(path)


MISTAKES = (
    wrong_type,
    out_of_range,
    no_choice,
    misspelt,
    other_branch,
    bad_argument,
    contradiction,
)


def bad_input(chance: random.Random, folder: pathlib.Path, count: int) -> dict:
    """Commands with a mistake, in this process."""
    (folder / "tiny.py").write_text(TINY)
    known = configs.known_keys()
    for number in range(count):
        make = (*MISTAKES, None)[number % (len(MISTAKES) + 1)]
        file = folder / "tiny.py" if make else broken_file(chance, folder)
        mistake = make(chance, known) if make else []
        workdir = folder / f"run_{number}"
        command, more = chance.choice(
            ((train, [f"--workdir={workdir}"]), (train, ["--dry_run"]), (evaluate, []))
        )
        if make in (contradiction, None):
            command, more = train, [f"--workdir={workdir}"]
        arguments = [f"--config={file}", *more, *mistake]
        err, out = io.StringIO(), io.StringIO()
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(out):
            try:
                code = command.main(arguments)
            except SystemExit as stop:  # argparse
                code = stop.code
        said = [line for line in err.getvalue().splitlines() if line.startswith("error: ")]
        expect(code == 2 and len(said) == 1, f"{arguments}: exit {code}, {err.getvalue()[-600:]}")
        expect(
            len(said[0]) < 2000 and "Traceback" not in err.getvalue(),
            f"{arguments}: {err.getvalue()[-600:]}",
        )
        expect(not (workdir / "config.json").exists(), f"{arguments}: the run was begun")
    return dict(tried=count)
