"""The table of named models: docs/models.md is what the command prints; counts and FLOPs are those
of others.
"""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from conftest import ROOT

import vit_jax
from vit_jax.models import __main__ as models

DOCS = ROOT / "docs/models.md"
BEGIN, END = "<!-- python -m vit_jax.models -->", "<!-- end of the table -->"

# With 1,000 classes at 224, counted by running the published code on shapes:
# google-research/vision_transformer (ViT, hybrids, Mixer), google-research/big_vision (g, G,
# So400m, Mixer S and H, BiT) and timm's vit_giant_patch14_dinov2 (giant2). A distilled model has one token, its position and a second head more
# than the ViT. R50+L/16 is R50+B/16 with the encoder of L/16.
COUNTS = {
    "Ti/16": 5_717_416,
    "S/32": 22_878_952,
    "S/16": 22_050_664,
    "B/32": 88_224_232,
    "B/16": 86_567_656,
    "L/32": 306_535_400,
    "L/16": 304_326_632,
    "H/14": 632_045_800,
    "g/14": 1_012_611_432,
    "G/14": 1_844_440_680,
    "So400m/14 map": 428_833_704,
    "giant2/14 layer_scale": 1_136_306_664,
    "Ti/16 distilled": 5_910_800,
    "S/16 distilled": 22_436_432,
    "B/16 distilled": 87_338_192,
    "R+Ti/16": 6_337_704,
    "R26+S/32": 36_431_912,
    "R50+B/16": 98_659_112,
    "R50+L/32": 328_994_856,
    "R50+L/16": 316_483_624,
    "Mixer-S/32": 19_104_624,
    "Mixer-S/16": 18_528_264,
    "Mixer-B/32": 60_293_428,
    "Mixer-B/16": 59_880_472,
    "Mixer-L/32": 206_939_264,
    "Mixer-L/16": 208_196_168,
    "Mixer-H/14": 432_350_952,
    "R50x1": 25_549_352,
    "R50x2": 97_988_712,
    "R50x3": 217_319_080,
    "R101x1": 44_541_480,
    "R101x3": 387_934_888,
    "R152x1": 60_185_128,
    "R152x2": 236_335_208,
    "R152x4": 936_533_224,
}


def key(variant: str, options: dict) -> str:
    return " ".join([variant, *("map" if name == "pool" else name for name in options)])


ROWS = {key(variant, options): (variant, options) for variant, options, _ in models.ROWS}


@pytest.fixture(scope="module")
def printed() -> str:
    return models.table()


def test_the_docs_hold_what_the_command_prints(printed, monkeypatch, capsys):
    assert DOCS.read_text().split(BEGIN)[1].split(END)[0].strip() == printed
    monkeypatch.setattr(models, "table", lambda: printed)
    assert models.main([]) == 0
    assert capsys.readouterr().out == printed + "\n"


def test_counts_equal_the_published_ones(printed):
    rows = [line.split("|") for line in printed.splitlines()[2:]]
    found = {name: int(row[2].replace(",", "")) for name, row in zip(ROWS, rows, strict=True)}
    assert found == COUNTS
    assert all(variant in row[1] for (variant, _), row in zip(ROWS.values(), rows, strict=True))


def cost(name: str) -> tuple[int, float]:
    """FLOPs of one image by our count and by XLA's, from shapes alone.

    Two blocks stand for all, which have the same shapes, and one bottleneck or two of each stage.
    """
    variant, options = ROWS[name]
    shallow = dict(units=(1, 2, 1, 1)) if re.match(r"R\d+x", variant) else dict(depth=2)
    model = vit_jax.create_model(variant, **options | shallow)
    image = jax.ShapeDtypeStruct((1, *model.image_size, 3), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), image)["params"]
    lowered = jax.jit(lambda params, image: model.apply({"params": params}, image)).lower(
        params, image
    )
    return model.flops, lowered.cost_analysis()["flops"]


@pytest.mark.parametrize("name", ROWS)
def test_flops_agree_with_xla(name):
    ours, counted = cost(name)
    assert ours == pytest.approx(counted, rel=0.03)


def test_a_row_names_the_formats_of_its_architecture():
    cells = [
        cell.strip()
        for cell in models.row("Mixer-S/32", {}, ("published", "ours")).split("|")[1:-1]
    ]
    assert cells == ["`Mixer-S/32`", "19,104,624", "2.00", "49", "x", "", "", "", "x"]
    formats = {key(variant, options): held for variant, options, held in models.ROWS}
    assert formats["B/16"] == models.FORMATS and "published" not in formats["So400m/14 map"]
    assert formats["B/16 distilled"] == ("timm", "hf", "ours") and formats["R50x1"] == (
        "published",
        "ours",
    )


def test_help_works_without_tensorflow():
    code = "import sys, runpy; sys.modules['tensorflow'] = None; sys.argv = ['x', '--help'];"
    code += "runpy.run_module('vit_jax.models', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=DOCS.parent.parent,
        check=False,
    )
    assert done.returncode == 0 and "2 FLOPs" in done.stdout, done.stderr


def test_an_unknown_argument_is_an_error(capsys):
    with pytest.raises(SystemExit) as stop:
        models.main(["--json"])
    assert (
        stop.value.code == 2 and "error: unrecognized arguments: --json" in capsys.readouterr().err
    )
