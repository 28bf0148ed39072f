"""Trials with hostile and mistaken names: what would control the terminal, columns of CSV files,
classes that look the same, and workdirs.
"""

import contextlib
import csv
import errno
import io
import logging
import os
import pathlib
import random
import resource
import tarfile
import unicodedata

import numpy as np
from conftest import TINY
from etils import epath
from processes_at_hand import error_lines, expect

from vit_jax import cli, errors, goodput, predict
from vit_jax.cli import spool
from vit_jax.cli.log import Formatter
from vit_jax.data.check import findings, of_config
from vit_jax.data.check import show as show_check
from vit_jax.data.sources import csv_file, folder, tars
from vit_jax.errors import UserError
from vit_jax.plan import report as plan_report
from vit_jax.train import __main__ as train
from vit_jax.train import console, curves, metrics, workdir
from vit_jax.train.goodput import PARTS
from vit_jax.vtab import check as vtab_check
from vit_jax.vtab import report as vtab_report

# --- what reaches the terminal, and CSV files ---

CONTROL = (
    "\x1b[31m",
    "\x1b]0;title\x07",
    "\x9b2J",
    "\r=2",
    "\b",
    "\u202e",
    "\u2066",
    "\u200b",
    "\udcff",
)
MARKUP = ("[red]", "[/]", "[link=file:///x]y[/link]", ":smile:", "[bold", "]")
WORDS = ("owl", "é", "日本", "=1+1", "a-b")


def hostile(rng: random.Random) -> str:
    inner = rng.choices(CONTROL + MARKUP + WORDS, k=rng.randrange(1, 4))
    return "".join(["<", rng.choice(CONTROL + MARKUP), *inner, ">"])


def goodput_of_one() -> dict:
    return dict(
        wall_s=1.0, goodput=0.5, starts=1, steps_repeated=0, parts=dict.fromkeys(PARTS, 0.1)
    )


def classes_predicted(name: str) -> dict:
    return dict(path=[name], label=np.zeros((1, 1), int), probability=np.ones((1, 1)), names=[name])


def by_error(name: str) -> None:
    def fail():
        raise UserError(name)

    cli.run(fail, debug=False)


def by_arguments(name: str) -> None:
    with contextlib.suppress(SystemExit):
        goodput.main([f"--{name}", "."])


def by_log(name: str) -> None:
    print(Formatter("%(message)s").format(logging.makeLogRecord(dict(msg=name))))


def by_check(name: str) -> None:
    report = dict(use="train", name=name, split="train", ready=True, where=name, splits={name: 1})
    of_config.print_reports([report])


def by_check_of_files(name: str) -> None:
    found = findings.Finding("empty files", 1, [name])
    show_check.report(name, dict(faults=[found], warnings=[]))


def by_vtab(name: str) -> None:
    means = dict.fromkeys([*vtab_report.GROUPS, "all"])
    results = dict(protocol="p", standard=True, departures=[], checkpoint=name, tasks={})
    vtab_report.show(results | dict(means=means))


def by_plan(name: str) -> None:
    hbm = dict.fromkeys(("total", "params", "opt_state", "activations", "batch"), 1.0)
    plan = dict(config=name, topology="v5e", mesh={}, num_slices=1, fits=True, hbm_gib=hbm)
    plan |= dict(model_flops_per_image=1, num_chips=1, params_split=0, params=1, hbm_limit_gib=1)
    plan |= dict(step_ms=None, compile_s=1, compile_cached=False, collectives=[])
    plan |= dict(sharding_constraints=0)
    plan_report.show(plan | dict(suggestions=[name]))


# Each prints a name.
OUTPUTS = (
    by_error,
    by_arguments,
    by_log,
    by_check,
    by_check_of_files,
    by_vtab,
    by_plan,
    lambda name: predict.show(classes_predicted(name)),
    lambda name: goodput.show_parts(goodput_of_one(), name),
    lambda name: goodput.show_runs({name: goodput_of_one()}),
    lambda name: vtab_check.show({"task": dict(state=name, detail=name, fingerprint=None)}),
)


def check_printed(output, name: str) -> None:
    """The name is shown as it is, but for what would control the terminal."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        output(name)
    text = out.getvalue()
    expect(all(c.isprintable() or c == "\n" for c in text), f"{name!a} by {output}: {text!a}")
    forms = (errors.printable(name), errors.printable(errors.one_line(name)))
    shown = "".join(text.split())  # titles are wrapped
    is_shown = any("".join(form.split()) in shown for form in forms)
    expect(is_shown, f"{name!a} is not shown by {output}: {text!a}")


def check_cells(name: str) -> None:
    """What a spreadsheet reads is a name, not a formula."""
    for text in (name, name[1:], f"={name}", f"@{name}"):
        written = predict.as_csv(classes_predicted(text))
        for cell in (cell for row in csv.reader(io.StringIO(written, newline="")) for cell in row):
            expect(not cell.startswith(("=", "+", "-", "@", "\t", "\r")), f"{cell!a} in a CSV")


def printed_names(rng: random.Random, folder: pathlib.Path, count: int) -> dict:
    """Shows a hostile name by one of the outputs."""
    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "2000"  # no name is wrapped
    try:
        for number in range(count):
            name = hostile(rng)
            check_printed(OUTPUTS[number % len(OUTPUTS)], name)
            check_cells(name)
    finally:
        os.environ.pop("COLUMNS")
        os.environ.update({"COLUMNS": columns} if columns else {})
    return dict(tried=count)


# --- CSV files ---


def spelled(rng: random.Random, column: str) -> str:
    """The name of a column as people write it."""
    text = rng.choice((column, column.upper(), column.title()))
    return rng.choice(("", " ", "\t", "\ufeff", "\xa0")) + text + rng.choice(("", " ", "\u200b"))


def good_columns(rng) -> tuple[list[str], str | None]:
    more = rng.sample(("id", "width", "label_id", ""), rng.randrange(3))
    return [*(spelled(rng, column) for column in ("path", "label", "split")), *more], None


def twice(rng) -> tuple[list[str], str]:
    column = rng.choice(("path", "label", "split"))
    return [*good_columns(rng)[0], spelled(rng, column)], " twice: remove one"


def misspelled_split(rng) -> tuple[list[str], str]:
    wrong = rng.choice(("splits", "spilt", "splt", "split_", "plit", "slit", "splut", "Splits "))
    return [
        "path",
        "label",
        wrong,
    ], f"{wrong.strip().lower()!r}, which is not known: call it 'split'"


def too_many_cells(rng) -> tuple[list[str], str]:
    return ["path", "label"], " has 3 cells for 2 columns"


HEADS = (good_columns, good_columns, twice, misspelled_split, too_many_cells)


def csv_text(rng: random.Random, columns: list[str], rows: list[list[str]]) -> tuple[str, int]:
    """(a CSV file, the number of the line in which its first row ends)."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator=rng.choice(("\n", "\r\n")))
    writer.writerow(columns)
    empty = rng.randrange(3)
    text.write("\n" * empty)
    writer.writerows(rows)
    breaks = sum(cell.count("\n") for cell in rows[0])
    return rng.choice(("", "\ufeff")) + text.getvalue(), 2 + empty + breaks


def csv_columns(rng: random.Random, folder: pathlib.Path, count: int) -> dict:
    """Reads CSV files whose first lines are as people write them, or wrong."""
    refused = 0
    for name in ("0.png", "1.png"):
        (folder / name).write_bytes(b"")
    path = folder / "list.csv"
    for number in range(count):
        columns, problem = HEADS[number % len(HEADS)](rng)
        label = rng.choice(("owl", "great\nowl", "owl\n\n, great"))
        rows = [[f"{i}.png", label, split] for i, split in enumerate(("train", "val"))]
        fill = [["x"] * (len(columns) - 3)] * 2
        rows = [row + more for row, more in zip(rows, fill, strict=True)]
        text, first = csv_text(rng, columns, rows)
        path.write_bytes(text.encode())
        try:
            splits = csv_file.load(str(path)).splits
            sizes = {split: list(numbers) for split, numbers in splits.items()}
            expect(problem is None, f"{text!a} is not refused")
            expect(sizes == dict(train=[0], val=[1]), f"{text!a} gives {sizes}")
        except UserError as error:
            refused += 1
            expect(problem and problem in str(error), f"{text!a}: {error}")
            at_line = f"line {first} of" in str(error)
            expect(at_line or "cells" not in problem, f"not in line {first}: {error}, {text!a}")
    return dict(tried=count, refused=refused)


# --- classes that look the same ---


def twin(rng: random.Random, name: str) -> str:
    """Another text that looks like `name`, which is in NFC."""
    at = rng.randrange(1, len(name))
    unseen = rng.choice(("\u200b", "\u200d", "\ufeff", "\xad", "\u2060", "\u202e"))
    return rng.choice(
        (
            unicodedata.normalize("NFD", name),
            name[:at] + unseen + name[at:],
            name + unseen,
            name.replace(" ", rng.choice(("\xa0", "  ", "\u3000"))),
        )
    )


def folder_of(root: pathlib.Path, names: list[str]):
    for name in names:
        (root / name).mkdir(parents=True)
        (root / name / "a.png").write_bytes(b"")
    return folder.load(str(root))


def csv_of(root: pathlib.Path, names: list[str]):
    root.mkdir()
    with (root / "list.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label"])
        for number, name in enumerate(names):
            (root / f"{number}.png").write_bytes(b"")
            writer.writerow([f"{number}.png", name])
    return csv_file.load(str(root / "list.csv"))


def tar_of(root: pathlib.Path, names: list[str]):
    root.mkdir()
    with tarfile.open(root / "a-000.tar", "w") as archive:
        for number, name in enumerate(names):
            archive.addfile(tarfile.TarInfo(f"{name}/{number}.png"))
    return tars.load(str(root))


def like_classes(rng: random.Random, folder: pathlib.Path, count: int) -> dict:
    """Lists data with two classes that look the same, or that differ."""
    refused = 0
    for number in range(count):
        name = rng.choice(("café noir", "grüner Specht", "Ångström Å", "日本 が"))
        is_twin = rng.random() < 0.7
        other = twin(rng, name) if is_twin else rng.choice((f"{name} 2", name.upper() + "x"))
        names = [name, other, "owl"]
        rng.shuffle(names)
        load = (folder_of, csv_of, tar_of)[number % 3]
        try:
            found = load(folder / str(number), names)
            expect(not is_twin, f"{names!a} counts as {len(names)} classes")
            expect(found.num_classes == len(names), f"{names!a}: {found.class_names!a}")
        except UserError as error:
            refused += 1
            shown = ascii(name) in str(error) and ascii(other) in str(error)
            expect(is_twin and shown, f"{names!a}: {error}")
    return dict(tried=count, refused=refused)


# --- workdirs ---

BAD_NAMES = (
    "\udcff",
    "a\udce9b",
    "x/\udc80/y",
    "a[1]",
    "b\\c",
    "n" * 300,
    "loop",
    "dangling",
    "file",
)
GOOD_NAMES = ("é", "日本 語", "\x1bM", "-x", "a b", "=1", "\u202e")
A_FOLDER_INSTEAD = ("log.txt", "config.json", "left_out.json", "skipped.jsonl", "metrics.jsonl")


def run_train(arguments: list[str]) -> str:
    """The error line of a run that must end with exit code 2 before it trains."""
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        code = train.main(arguments)
    text = err.getvalue()
    lines = error_lines(text)
    expect(code == 2 and len(lines) == 1, f"{arguments!a}: exit {code}, {text[-600:]!a}")
    expect("training from step" not in text, f"{arguments!a}: the run began")
    return lines[0]


def bad_name(rng, folder: pathlib.Path, config: str) -> str:
    (folder / "file").write_text("")
    for name, target in (("loop", "loop"), ("dangling", "nowhere")):
        with contextlib.suppress(FileExistsError):
            (folder / name).symlink_to(folder / target)
    name = rng.choice(BAD_NAMES)
    line = run_train([config, f"--workdir={folder / name}"])
    return "" if errors.printable(name[:100]) in line else f"{name!a}: {line}"


def wrong_kind(rng, folder: pathlib.Path, config: str) -> str:
    """A folder is in the place of a file of the run, or a file in that of a folder."""
    run = folder / f"run_{rng.randrange(10**9)}"
    name = rng.choice((*A_FOLDER_INSTEAD, "checkpoints", "profile"))
    more = ["--config.profile.num_steps=2"] if name == "profile" else []
    if name in A_FOLDER_INSTEAD:
        (run / name).mkdir(parents=True)
    else:
        run.mkdir()
        (run / name).write_text("")
    line = run_train([config, f"--workdir={run}", *more])
    return "" if str(run / name) in line else line


def few_files(rng, folder: pathlib.Path, config: str) -> str:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (rng.randrange(20, 200), before[1]))
    try:
        line = run_train([config, f"--workdir={folder / 'few'}"])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    return "" if "ulimit -n" in line and not (folder / "few").exists() else line


def no_file_left(rng, folder: pathlib.Path, config: str) -> str:
    """What a library raises if no file can be opened any more."""
    code = rng.choice((errno.EMFILE, errno.ENFILE))
    error = rng.choice((OSError(code, os.strerror(code)), RuntimeError(os.strerror(code))))

    def fail():
        raise error

    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        ended = cli.run(fail, debug=False)
    return "" if ended == 2 and "too many open files" in err.getvalue() else err.getvalue()


def good_name(rng, folder: pathlib.Path, config: str) -> str:
    made = workdir.make(str(folder / rng.choice(GOOD_NAMES)))
    return "" if made.is_dir() else f"{made} does not exist"


def texts_as_metrics(rng, folder: pathlib.Path, config: str) -> str:
    """Lines with texts where numbers are expected do not count."""
    path = epath.Path(folder) / "metrics.jsonl"
    values = [rng.random() for _ in range(6)]
    lines = [f'{{"step": {step}, "eval/val/top1": {value}}}' for step, value in enumerate(values)]
    at = rng.randrange(6)
    bad = rng.choice(('"abc"', "null", "[1]", "{}", '"\\ud800"'))
    lines.insert(at, f'{{"step": {at}, "eval/val/top1": {bad}}}')
    path.write_text("\n".join(lines) + "\n")
    _, found = curves.series(path.parent, "eval/val/top1")
    shown = console.evaluations(spool.LocalFiles(path.parent))
    metrics.rewind(path, 10)
    kept = [line["eval/val/top1"] for line in metrics.read_lines(path)]
    return "" if found == values == kept and len(shown) < 2 else f"{found}, {kept}, {shown}"


# Those that begin a run take a second.
WORKDIRS = (
    *(bad_name, few_files, no_file_left, good_name, texts_as_metrics) * 4,
    *(wrong_kind,) * 2,
)


def workdirs(rng: random.Random, folder: pathlib.Path, count: int) -> dict:
    """Workdirs with hostile names and with what is not of a run in them."""
    (folder / "tiny.py").write_text(TINY)
    runs = 0
    for number in range(count):
        kind = WORKDIRS[number % len(WORKDIRS)]
        runs += kind is wrong_kind
        problem = kind(rng, folder, f"--config={folder / 'tiny.py'}")
        expect(not problem, f"{kind.__name__}: {problem}")
    return dict(tried=count, runs_begun=runs)
