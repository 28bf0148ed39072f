"""Trials with generated mistakes in configs and on command lines: each ends in one line and exit
code 2, and no run begins.
"""

import contextlib
import io
import pathlib
import random
import string

from conftest import TINY
from processes_at_hand import error_lines, expect

from vit_jax import config as configs
from vit_jax.config import KEYS
from vit_jax.config.key import LARGEST
from vit_jax.evaluate import __main__ as evaluate
from vit_jax.train import __main__ as train


def called(key: str) -> str:
    return key.replace("evals.*", "evals.val")


def word(rng) -> str:
    letters = string.ascii_lowercase + "._-/ "
    text = "".join(rng.choice(letters) for _ in range(rng.randrange(1, 12)))
    return text.strip() or "x"


def of_another_type(rng, value) -> str:
    if isinstance(value, bool):
        return rng.choice(("2", "maybe", "1.5"))
    if isinstance(value, int):
        return rng.choice(("1.5", "ten", "1e3", "", "None", "(1, 2)", "[", "0x"))
    if isinstance(value, float):
        return rng.choice(("much", "", "1,5", "(0.1,)", "{}", "--"))
    return rng.choice(("3", "(1, 2, 3)", "('a',)", "((1, 2), 3)", "(('a', 'b'),)", "(("))


def wrong_type(rng, known) -> list[str]:
    key = rng.choice([key for key, value in known.items() if not isinstance(value, str)])
    return [f"--config.{called(key)}={of_another_type(rng, known[key])}"]


def out_of_range(rng, known) -> list[str]:
    name = rng.choice(
        [
            name
            for name, key in KEYS.items()
            if key.within != (0, LARGEST) and not key.pairs and not key.items
        ]
    )
    low, high = KEYS[name].within
    above = high + 1 if isinstance(high, int) else high + 0.5
    value = rng.choice((low - 1, low - 10**6, above, high * 10 + 1))
    return [f"--config.{called(name)}={value}"]


def not_a_choice(rng, known) -> list[str]:
    name = rng.choice(
        [name for name, key in KEYS.items() if key.choices and isinstance(key.default, str)]
    )
    return [f"--config.{called(name)}={word(rng)}q"]


def misspelled(rng, known) -> list[str]:
    name = called(rng.choice(list(known)))
    at = rng.randrange(len(name))
    wrong = name[:at] + rng.choice("qxz") + name[at + 1 :]
    return [f"--config.{wrong}={known[rng.choice(list(known))]}"]


def other_branch(rng, known) -> list[str]:
    name = rng.choice(
        [
            name
            for name, key in KEYS.items()
            if not key.pairs and any(KEYS[selector].choices for selector in key.only_if)
        ]
    )
    ((selector, allowed),) = KEYS[name].only_if.items()
    other = rng.choice([value for value in KEYS[selector].choices if value not in allowed])
    value = "('a',)" if isinstance(known[name], tuple) else known[name]
    return [f"--config.{called(selector)}={other}", f"--config.{called(name)}={value}"]


def bad_argument(rng, known) -> list[str]:
    first = f"--{word(rng)}"
    second = word(rng)
    last = f"--dry_run={word(rng)}"
    return [rng.choice((first, second, "--config.", "--config", "--=", last))]


def contradiction(rng, known) -> list[str]:
    many = [
        ["--config.total_epochs=3.0", "--config.total_steps=9"],
        [f"--config.accum_steps={rng.choice((3, 5, 7, 100))}"],
        ["--config.init_from=a", "--config.branch_from=b"],
        ["--config.total_steps=0"],
        [f"--config.checkpoint.keep_best=eval/{word(rng)}/top1"],
        [f"--config.optim.wd_mults=(('{rng.choice('([*+?')}', 1.0),)"],
        [f"--config.mesh.data={rng.choice((3, 7, 10**6))}"],
        ["--config.mesh.data=-1", "--config.mesh.fsdp=-1"],
        ["--config.optim.schedule=stair"],
        [f"--config.data.repeats={rng.choice((3, 5, 7))}"],
        [f"--config.model.variant={word(rng)}"],
        [f"--config.data.subset={word(rng)}"],
        [f"--config.topology={word(rng)}"],
        [f"--config.optim.cooldown_steps={rng.randrange(13, 99)}"],
        ["--config.label_smoothing=0.1", "--config.loss=multilabel_xent"],
    ]
    return rng.choice(many)


def broken_file(rng, folder: pathlib.Path) -> str:
    """A config file that is truncated, or has a wrong line."""
    lines = TINY.splitlines()
    name = "".join(rng.choices(string.ascii_lowercase, k=7))
    at = rng.randrange(4, len(lines) - 1)
    result = rng.choice(("1", "None", "[]", "config.seed", name))
    broken = [
        "\n".join(lines[:at]) + "\n    config.model = dict(",
        TINY.replace("    return config", f"    config.{name} = 1\n    return config"),
        TINY.replace("return config", f"return {result}"),
        TINY.replace("def get_config", "def get"),
        TINY.replace("import ml_collections", f"import {name}"),
        TINY.replace("64", rng.choice(("'64'", "None", "-64", "6.4", "[64]"))),
        "\0" + TINY,
        "",
    ]  # fmt: skip
    path = folder / f"broken_{rng.randrange(10**9)}.py"
    path.write_text(rng.choice(broken))
    return str(path)


MISTAKES = (
    wrong_type,
    out_of_range,
    not_a_choice,
    misspelled,
    other_branch,
    bad_argument,
    contradiction,
)


def bad_input(rng: random.Random, folder: pathlib.Path, count: int) -> dict:
    """Runs commands with a mistake in this process."""
    (folder / "tiny.py").write_text(TINY)
    known = configs.known_keys()
    for number in range(count):
        make = (*MISTAKES, None)[number % (len(MISTAKES) + 1)]
        file = folder / "tiny.py" if make else broken_file(rng, folder)
        mistake = make(rng, known) if make else []
        workdir = folder / f"run_{number}"
        command, more = rng.choice(
            ((train, [f"--workdir={workdir}"]), (train, ["--dry_run"]), (evaluate, []))
        )
        if make in (contradiction, None):
            command, more = train, [f"--workdir={workdir}"]
        arguments = [f"--config={file}", *more, *mistake]
        err = io.StringIO()
        out = io.StringIO()
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(out):
            try:
                code = command.main(arguments)
            except SystemExit as stop:  # argparse
                code = stop.code
        text = err.getvalue()
        lines = error_lines(text)
        expect(code == 2 and len(lines) == 1, f"{arguments}: exit {code}, {text[-600:]}")
        expect(len(lines[0]) < 2000 and "Traceback" not in text, f"{arguments}: {text[-600:]}")
        expect(not (workdir / "config.json").exists(), f"{arguments}: the run began")
    return dict(tried=count)
