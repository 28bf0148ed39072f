"""The page of a run: what it says, and that nothing in a workdir breaks or enters it."""

import errno
import html.parser
import json
import os
import pathlib

import pytest
import workdirs
from conftest import last_error

from vit_jax import config as configs
from vit_jax.compare import __main__ as compare
from vit_jax.report import __main__ as command
from vit_jax.report import charts, contents, curves, evaluations, page, reference, settings
from vit_jax.train.recipe import held_out
from vit_jax.vtab import report as vtab


@pytest.fixture
def config(tiny):
    return configs.load(tiny, [])


class Parsed(html.parser.HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.tags = []
        self.texts = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] not in ("script", "style") and data.strip():
            self.texts.append(" ".join(data.split()))

    @property
    def text(self) -> str:
        return "\n".join(self.texts)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def read_page(*paths: str, out: str | None = None) -> Parsed:
    return Parsed(page.write([str(path) for path in paths], out).read_text())


# --- what it says ---


def test_one_run(config, tmp_path):
    folder = workdirs.make_run(tmp_path / "run", config)
    workdirs.make_evaluation(tmp_path / "run/evals/test")
    for name in ("pictures/50_attention.png", "pictures/100_attention.png", "figures/a_b.png"):
        workdirs.make_picture(tmp_path / "run" / name)
    found = read_page(folder)
    assert (tmp_path / "run/report.html").exists()
    text = found.text
    assert "done, step 100 of 100" in text
    assert "python -m vit_jax.train --config=tiny.py" in text
    assert "6,400 images, 6.4 epochs, 1.28e+10 FLOPs" in text
    low, high = held_out.interval(0.95, 360)
    assert f"95.00% ({low:.1%} to {high:.1%}, 360 images) at step 100" in text
    low, high = held_out.interval(0.9, 360)
    assert f"90.00% ({low:.1%} to {high:.1%}, 360 images)" in text
    assert "expected calibration error\n2.00%" in text
    assert "top-5" not in text  # of 3 classes
    assert "one\ntwo\n7\ntwo\nzero\n3" in text  # the worst pairs
    assert "goodput\n60.0%" in text and "steps 50; 100" in text
    assert "where the model looks, step 100" in text and "a b" in text
    assert "data/skipped 0" in text
    images = [attributes["src"] for tag, attributes in found.tags if tag == "img"]
    assert len(images) == 5 and all(src.startswith("data:image/") for src in images)


def test_top5_of_more_than_five_classes():
    numbers, _ = evaluations.parse(json.dumps(workdirs.SUMMARY | dict(num_classes=10)))
    assert ["top-5", "99.00%"] in numbers.rows


def test_nothing_comes_from_a_network(config, tmp_path):
    found = read_page(workdirs.make_run(tmp_path / "run", config))
    for tag, attributes in found.tags:
        for name in ("src", "href"):
            assert attributes.get(name, "#").startswith(("#", "data:")), (tag, attributes)
    policy = next(attributes for tag, attributes in found.tags if "http-equiv" in attributes)
    assert policy["content"].startswith("default-src 'none'")


def test_states(config, tmp_path):
    def state_of(name: str, **more) -> str:
        folder = pathlib.Path(workdirs.make_run(tmp_path / name, config, workdirs.make_lines(10)))
        goodput = json.dumps(dict(records=[workdirs.START | dict(last_step=50)]))
        (folder / "goodput.json").write_text(goodput)
        (folder / "checkpoints/100").rmdir()
        for file, content in more.items():
            (folder / f"{file}.json").write_text(json.dumps(content))
        (run,) = contents.read([str(folder)]).runs
        return run.state

    here = contents.run.lock.process_facts()
    assert state_of("stopped") == "stopped at step 50 of 100; the same command continues"
    assert state_of("here", lock=here | dict(renewed="12:00")) == (
        "running, step 50 of 100; last sign of life 12:00"
    )
    assert state_of("dead", lock=here | dict(born="0")).startswith("stopped")
    elsewhere = dict(host="pod-7", pid=1, born="5", machine="another")
    assert state_of("elsewhere", lock=elsewhere) == "running, step 50 of 100"
    assert "not finite" in state_of("nan", nonfinite=dict(loss="nan", example_ids={}))


def test_several_runs_are_compared(config, tiny, tmp_path, monkeypatch):
    other = configs.load(tiny, ["--config.optim.lr=0.5", "--config.seed=3"])
    words = ["/x/bin/vit_jax", "train", "--config=tiny.py", "--config.optim.lr=0.5"]
    paths = [
        workdirs.make_run(tmp_path / "a/run", config),
        workdirs.make_run(tmp_path / "b/run", other, command=words),
    ]
    monkeypatch.chdir(tmp_path)
    found = read_page(*paths, paths[0])  # one given twice is one
    assert (tmp_path / "report.html").exists()
    page.write([paths[0], f"{paths[0]}/"])
    assert (tmp_path / "a/run/report.html").exists()
    assert "2 runs" in found.text and "a/run" in found.texts and "b/run" in found.texts
    assert "optim.lr\n0.001\n0.5" in found.text and "seed\n0\n3" in found.text
    between = found.text.partition("What differs between the runs")[2]
    assert "optim.name" not in between.partition("What differs from the defaults")[0]


def test_a_reference_run_beside_its_workdir(config, tmp_path, monkeypatch):
    run = workdirs.make_run(tmp_path / "run", config)
    path = str(tmp_path / "kept.json")
    reference.write([compare.read(run, "run")], path)
    monkeypatch.chdir(tmp_path)
    text = read_page(path).text
    assert (tmp_path / "report.html").exists()
    assert "done, step 100 of 100" in text and f"python -m vit_jax.report {path}" in text
    assert text.count("python -m vit_jax.train --config=tiny.py\n") == 2  # in facts and commands
    assert "vit_jax.predict" not in text  # it has no weights
    both = contents.read([path, run])
    train, kept = (one.series["train/loss"].value.tolist() for one in both.runs)
    assert train == kept == [line["train/loss"] for line in workdirs.make_lines()]
    assert contents.read([workdirs.make_run(tmp_path / "a.json", config)]).runs[0].checkpoints


def test_runs_without_sizes_have_the_axes_that_their_config_gives(config, tmp_path):
    """As older versions wrote them."""
    old = workdirs.make_run(tmp_path / "old", config, sizes={})
    new = workdirs.make_run(tmp_path / "new", config)
    runs = contents.read([old]).runs
    assert [axis.name for axis in curves.axes_of(runs)] == ["step", "image", "time"]
    assert runs[0].size("total_steps") == 12
    read = contents.read([old, new])
    text = page.html(read)
    assert "over this axis: epochs: old" in text and "over this axis: FLOPs: old" in text
    runs = read.runs
    factors = {axis.name: axis.factors for axis in curves.axes_of(runs)}
    assert factors["step"] == (1, 1) and factors["image"] == (64, 64)
    assert factors["epoch"][1] == 0.064 and factors["epoch"][0] != factors["epoch"][0]
    # In GFLOPs, as 100 steps of 64 images of 2 MFLOPs are 12.8 of them.
    assert factors["compute"][1] == pytest.approx(0.128)
    # In seconds, of which 3,600 are an hour.
    assert factors["time"] == pytest.approx((3600, 3600))


def test_a_run_without_the_time_of_its_steps_is_named(config, tmp_path):
    lines = [{"step": step, "train/loss": 1 / step} for step in (1, 2)]
    untimed = workdirs.make_run(tmp_path / "untimed", config, lines)
    drawing = charts.Drawing(
        contents.read([untimed, workdirs.make_run(tmp_path / "timed", config)]).runs
    )
    assert drawing.unknown() == ["time: untimed"]


def test_long_names_of_runs_show_both_ends(config, tmp_path):
    folders = [tmp_path / (first + "x" * 60 + last) for first, last in ("ab", "cb", "ad")]
    runs = contents.read([workdirs.make_run(folder, config) for folder in folders]).runs
    drawing = charts.Drawing(runs)
    assert len({drawing.name(i) for i in range(3)}) == 3
    assert max(len(drawing.name(i)) for i in range(3)) < 40


def test_the_units_of_time_and_compute(config, tmp_path):
    lines = [{"step": 10**6, "perf/step_ms": 1e3, "a": 1.0}, {"step": 2 * 10**6, "a": 2.0}]
    sizes = workdirs.SIZES | dict(train_flops_per_image=10**11)
    runs = contents.read([workdirs.make_run(tmp_path / "run", config, lines, sizes=sizes)]).runs
    labels = [axis.label for axis in curves.axes_of(runs)]
    assert labels[-2:] == ["training time, hours", "training compute, EFLOPs"]
    assert curves.axes_of(runs)[-1].factors[0] * 2e6 == pytest.approx(2e6 * 64 * 1e11 / 1e18)


def test_what_is_not_finite_is_a_gap_that_is_named(config, tmp_path):
    lines = workdirs.make_lines()
    lines[3]["train/loss"] = float("nan")
    lines[5]["train/loss"] = float("inf")
    lines[7]["train/loss"] = 1e300  # which is infinite in float32
    found = read_page(workdirs.make_run(tmp_path / "run", config, lines))
    assert "not finite: 2 of 20 values, the first at step 20" in found.text


def test_a_loss_over_orders_of_magnitude_has_a_logarithmic_axis(config, tmp_path):
    lines = [{"step": i, "train/loss": 10.0**-i, "train/lr": 10.0**-i} for i in range(1, 6)]
    drawing = charts.Drawing(contents.read([workdirs.make_run(tmp_path / "a", config, lines)]).runs)
    kinds = {
        chart.key: type(panel.y_scale).__name__
        for chart, panel in zip(drawing.choice.charts, drawing.figures, strict=True)
    }
    assert kinds == {"train/loss": "LogScale", "train/lr": "LinearScale"}


# --- configs and commands ---


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["/a b/vit_jax/train/__main__.py", "--workdir=a b"], "train '--workdir=a b'"),
        (["/x/vit_jax/finetune.py", "photos"], "finetune photos"),
        (["/x/vit_jax/__main__.py", "vtab", "run"], "vtab run"),
        (["/usr/bin/vit_jax", "train", "--config=a.py"], "train --config=a.py"),
        (["/me/vit_jax/vit_jax/finetune.py", "photos"], "finetune photos"),  # in a clone
        (["/me/vit_jax/vit_jax/__main__.py", "vtab", "run"], "vtab run"),
        (["/me/vit_jax/vit_jax/train/__main__.py"], "train"),
        (["/usr/bin/vit_jax"], None),
        (["/home/me/vit_jax/my_experiment.py", "--x"], None),
        (["/x/ipykernel_launcher.py", "-f", "k.json"], None),
        ([""], None),
        ([], None),
    ],
)
def test_the_command_to_repeat_a_run(words, expected):
    text = settings.command_text(words)
    assert text == (f"python -m vit_jax.{expected}" if expected else "")


def test_overrides_and_the_recipe_of_a_command():
    words = ["x", "--config", "a.py:B/16", "--config.optim.lr=1=2", "--workdir=w", "--config.seed"]
    words += ["7", "--noconfig.data.flip", "-config.model.scan"]
    assert settings.recipe(words) == "a.py:B/16"
    expected = ["optim.lr=1=2", "seed=7", "data.flip=False", "model.scan=True"]
    assert settings.overrides(words) == expected
    assert settings.recipe(["x", "--config=b.py"]) == "b.py"
    assert settings.recipe(["x"]) == ""


def test_the_command_to_evaluate_a_run(config, tmp_path):
    def text_of(folder: str, data: str, **more) -> str | None:
        values = configs.to_json(config)
        values["data"]["name"] = data
        values["evals"]["val"]["data"].update(more)
        path = workdirs.make_run(tmp_path / folder, config, config=values)
        (run,) = contents.read([path]).runs
        found = dict(contents.commands(run)).get("Evaluate it, with confusion matrix and mistakes")
        return found and found.replace(path, "RUN")

    def expected(argument: str) -> str:
        words = f"--config={argument} --init_from=RUN --out=RUN/evals"
        return f"python -m vit_jax.evaluate {words}"

    assert text_of("known", "cifar10") == expected("configs/evaluate.py:cifar10")
    assert text_of("own", "folder:a") == expected("configs/evaluate.py:folder:a,val")
    other = text_of("other", "folder:a", name="csv:b.csv", split="test")
    assert other == expected("configs/evaluate.py:csv:b.csv,test")
    assert text_of("held_out", "folder:a", rest=True) is None
    assert text_of("comma", "folder:a,b") is None


def test_differences_from_the_defaults(config):
    flat = dict(configs.flatten(configs.to_json(config)))
    rows = {key: (value, default) for key, value, default, _ in settings.from_defaults(flat)}
    assert rows["image_size"] == ("8", "224") and rows["evals.val.every"] == ("6", "0")
    assert "prng" not in rows and "model.scan" not in rows
    (removed,) = settings.from_defaults({"no.such.key": 1})
    assert removed[:3] == ("no.such.key", "1", "(unset)")


# --- folders of several runs ---


def test_a_fine_tuning(config, tmp_path):
    root = tmp_path / "tuned"
    for name in ("lr_0.003", "lr_0.01", "final"):
        workdirs.make_run(root / name, config)
    workdirs.make_evaluation(root / "final/evals/held_out")
    (root / "finetune.json").write_text(
        json.dumps(dict(about={}, tried={"0.003": 0.25, "0.01": None}))
    )
    rows = [["model", "all of it", "there is enough data"]]
    about = dict(config=dict(checkpoint=dict(keep_best="eval/held_out/loss")), rows=rows)
    (root / "config.json").write_text(json.dumps(about))
    found = read_page(root)
    assert "Fine-tuning: tuned" in found.text
    assert "eval/held_out/loss of the trial run\n0.003\n0.25\n0.01\nnot finite" in found.text
    assert "model\nall of it\nthere is enough data" in found.text
    runs = contents.read([str(root)]).runs
    assert [run.label for run in runs] == ["final", "lr_0.003", "lr_0.01"]
    assert found.text.count("expected calibration error") == 1
    both = contents.read([str(root), workdirs.make_run(tmp_path / "run", config)])
    assert page.title(both) == "2 runs"


@pytest.mark.parametrize("tried", [3, {"0.01": "a"}, {"0.01": {}}, {"0.01": [1]}])
def test_a_fine_tuning_that_is_damaged_or_has_just_begun(tried, tmp_path):
    (tmp_path / "final").mkdir()
    (tmp_path / "finetune.json").write_text(json.dumps(dict(about={}, tried=tried)))
    about = dict(config=dict(checkpoint=dict(keep_best="")), rows=[[]])
    (tmp_path / "config.json").write_text(json.dumps(about))
    found = read_page(tmp_path)
    assert "Fine-tuning in" in found.text
    assert "finetune.json can't be read" in found.text and "config.json can't be" in found.text


def test_a_suite_of_vtab(config, tmp_path):
    root = tmp_path / "suite"
    root.mkdir()
    empty = dict(group="natural") | vtab.PENDING
    done = empty | dict(status="done", top1=0.625, seeds=[0.625], num_test=10_000)
    tasks = dict(cifar100=done, dtd=empty, svhn=empty | dict(status="failed", error="no <memory>"))
    results = dict(protocol="standard", standard=False, departures=["seed: 0 -> 1"], tasks=tasks)
    means = dict(natural=None, specialized=None, structured=None, all=None)
    (root / "vtab.json").write_text(json.dumps(results | dict(checkpoint="w.npz", means=means)))
    workdirs.make_picture(root / "vtab.png")
    words = ["/x/vit_jax/vtab/__main__.py", "run", "--workdir=suite"]
    (root / "config.json").write_text(json.dumps(dict(command=words)))
    found = read_page(root)
    for text in ("62.50", "pending", "failed: no <memory>", "seed: 0 -> 1"):
        assert text in found.texts
    assert "python -m vit_jax.vtab run --workdir=suite" in found.texts
    assert found.count("img") == 1 and found.count("script") == 0
    (root / "vtab.json").write_text(json.dumps(dict(tasks={"cifar100": 3})))
    assert "vtab.json can't be read" in read_page(root).text


# --- hostile and damaged ---

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>'\"\\`${1}{{2}}</style>"


def test_nothing_in_a_workdir_becomes_part_of_the_page(config, tmp_path):
    plain = read_page(workdirs.make_run(tmp_path / "plain", config))
    name = HOSTILE.replace("/", "_") + "😀\udcff\x1b[2J"
    lines = [line | {f"eval/{HOSTILE}/top1": line["step"] / 100} for line in workdirs.make_lines()]
    words = ["/x/vit_jax/train/__main__.py", f"--config={HOSTILE}", f"--config.user.a={HOSTILE}"]
    hostile = configs.to_json(config) | dict(user={HOSTILE: HOSTILE}, init_from=HOSTILE)
    folder = tmp_path / name
    more = dict(command=words, config=hostile, commit=HOSTILE, versions={HOSTILE: HOSTILE})
    workdirs.make_run(folder, config, lines, **more)
    names = dict(class_names=[HOSTILE] * 3, weights=HOSTILE, step=None)
    workdirs.make_evaluation(folder / "evals" / name, **names)
    workdirs.make_picture(folder / f"figures/{name}.png")
    skipped = dict(use="train", id=1, name=HOSTILE, reason=HOSTILE)
    (folder / "skipped.jsonl").write_text(json.dumps(skipped) + "\n")
    out = str(tmp_path / "out.html")
    found = read_page(str(folder), out=out)
    assert found.count("script") == plain.count("script")
    assert found.count("style") == plain.count("style")
    assert not [attributes for _, attributes in found.tags if "onerror" in attributes]
    assert HOSTILE in found.texts and "\\xff\\x1b[2J" in found.text
    data = pathlib.Path(out).read_text()
    assert "</script><img" not in data and "\x1b" not in data


def test_secrets_of_addresses_are_not_shown(config, tmp_path):
    address = "https://me:hunter2@host/weights.npz"
    words = ["/x/vit_jax/train/__main__.py", f"--config.init_from={address}"]
    found = read_page(workdirs.make_run(tmp_path / "run", config, command=words))
    assert "hunter2" not in found.text and "https://...@host/weights.npz" in found.text


FILES = ("config.json", "metrics.jsonl", "goodput.json", "lock.json", "skipped.jsonl")
FILES += ("left_out.json", "nonfinite.json", "evals/test/summary.json", "evals/test/confusion.png")
GARBAGE = (b"", b"{", b"[]", b"null", b'{"config": 3}', b'{"records": [1]}', b"\xff\x00\x80", b"7")
GARBAGE += (b'{"step": 1, "a": 1e999}\n{"step": 99999999999999999999999, "a": 2}', b"[" * 10_000)
GARBAGE += (
    b'{"top1": "x", "pairs": 3, "class_names": 3}',
    b'{"config": {"evals": 3}, "command": 1}',
)


@pytest.mark.parametrize("name", FILES)
def test_damaged_files_cost_only_their_part(name, config, tmp_path):
    lines = [{"step": 100, "train/loss": 1.0}]  # no charts, which take time
    folder = workdirs.make_run(tmp_path / "run", config, lines)
    workdirs.make_evaluation(tmp_path / "run/evals/test")
    path = tmp_path / "run" / name

    def text() -> str:
        found = Parsed(page.html(contents.read([folder])))
        assert {"What was run", "Evaluations", "Config", "Commands"} <= set(found.texts)
        return found.text

    for content in GARBAGE:
        path.write_bytes(content)
        text()
    path.unlink()
    assert "could not be read" not in text()
    os.mkfifo(path)
    assert "is a FIFO" in text()
    path.unlink()
    path.mkdir()
    assert "could not be read" in text()


def test_lines_of_metrics_that_are_damaged_are_named_and_the_others_drawn(config, tmp_path):
    lines = [json.dumps(line).encode() for line in workdirs.make_lines()]
    lines[3] = b"\xff\xfe\x00"
    lines[5] = b'{"step": 6'
    lines[-1] = b'{"step": 7'  # which may be written at this moment
    folder = workdirs.make_run(tmp_path / "run", config)
    (tmp_path / "run/metrics.jsonl").write_bytes(b"\n".join(lines))
    read = contents.read([folder])
    (problem,) = read.problems
    assert problem.endswith("metrics.jsonl has damaged lines: 2, the first is line 4")
    assert len(read.runs[0].series["train/loss"].step) == 17


def test_numbers_that_are_too_large(config, tmp_path):
    folder = pathlib.Path(workdirs.make_run(tmp_path / "run", config))
    (folder / "checkpoints" / ("9" * 30)).mkdir()
    record = workdirs.START | dict(begun=9e11)  # in the year 30489
    (folder / "goodput.json").write_text(json.dumps(dict(records=[record])))
    assert "999,999,999" in read_page(folder).text


def test_a_run_that_has_just_begun(config, tmp_path):
    folder = workdirs.make_run(tmp_path / "run", config)
    (tmp_path / "run/goodput.json").unlink()
    for text in ("", '{"step": 1, "train/loss": 2.0}\n{"step": 2, "tra'):
        (tmp_path / "run/metrics.jsonl").write_text(text)
        found = read_page(folder)
        assert "could not be read" not in found.text and "None yet" in found.text


def test_a_folder_without_a_run_is_an_error(config, tmp_path, capsys):
    assert command.main([str(tmp_path)]) == 2
    assert "has no run: give the workdir of vit_jax.train" in last_error(capsys)
    assert command.main([str(tmp_path / "none")]) == 2
    assert "none has no run" in last_error(capsys)
    workdirs.make_run(tmp_path / "inner", config)
    assert command.main([str(tmp_path)]) == 2
    assert f"give the folders of runs in it ({tmp_path}/inner)" in last_error(capsys)
    assert command.main([f"{tmp_path}/inner", f"--out={tmp_path}"]) == 2
    assert "is a folder" in last_error(capsys)
    assert command.main([f"{tmp_path}/inner", f"--out={tmp_path}/no/a.html"]) == 2
    assert "does not exist" in last_error(capsys)
    assert command.main([f"{tmp_path}/inner", f"--out={tmp_path}/a.html"]) == 0
    assert capsys.readouterr().out == f"Page: {tmp_path}/a.html\n"


def test_a_full_disk_is_one_line(config, tmp_path, monkeypatch, capsys):
    folder = workdirs.make_run(tmp_path / "run", config)

    def fail(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(page.cli, "replace_file", fail)
    assert command.main([folder]) == 2
    assert "no space is left on the device" in last_error(capsys)


# --- its size ---


def test_a_page_stays_small(config, tmp_path):
    """With 100,000 points of a run, and pictures of more than the page may have."""
    lines = [
        {"step": step, **{f"train/{key}": step / (key + 1) for key in range(10)}}
        for step in range(1, 10_001)
    ]
    folder = workdirs.make_run(tmp_path / "run", config, lines)
    for number in range(6):
        workdirs.make_picture(tmp_path / f"run/figures/{number}.png", 400, 600)
    small = tmp_path / "run/figures/small.png"
    workdirs.make_picture(small)
    path = page.write([folder])
    assert path.stat().length < 5_000_000
    found = Parsed(path.read_text())
    assert found.count("img") == 7 and found.text.count("made smaller for this page") == 6
    drawing = charts.Drawing(contents.read([folder]).runs)
    sources = [panel.renderers[0].data_source for panel in drawing.figures]
    assert len(sources) == 10
    for source in sources:
        assert len(source.data["value"]) <= curves.MOST_POINTS
        assert source.data["value"].dtype == "float32"


def test_many_metrics_of_many_runs_are_bounded(config, tmp_path, monkeypatch):
    monkeypatch.setattr(curves, "MOST_CURVES", 24)
    lines = [{"step": i, **{f"train/{key:02}": i * key for key in range(1, 81)}} for i in range(4)]
    paths = [workdirs.make_run(tmp_path / f"run{i}", config, lines) for i in range(6)]
    read = contents.read(paths)
    choice = curves.choose(read.runs)
    assert sum(len(chart.curves) for chart in choice.charts) == 24
    assert len(choice.charts) + len(choice.too_many) == 80
    text = Parsed(page.html(read)).text
    assert "Too many for one page: train/05, train/06" in text
    (run,) = contents.read(paths[:1]).runs
    assert len(curves.choose([run]).charts) == 24
