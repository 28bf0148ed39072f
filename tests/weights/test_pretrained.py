"""The pair that `from_pretrained` returns also says what it is."""

import copy
import dataclasses
import pickle

import numpy as np
from conftest import golden_file

import vit_jax
from vit_jax.weights import load


def test_it_is_a_pair_with_names_and_a_report(tmp_path):
    path = golden_file(tmp_path, "vit_token_rep")
    pretrained = vit_jax.from_pretrained(path, num_classes=3, image_size=48)
    model, params = pretrained
    assert isinstance(pretrained, tuple) and len(pretrained) == 2
    assert pretrained[0] is pretrained.model is model and pretrained.params is params
    assert pretrained.class_names == ("class 0", "class 1", "class 2")
    assert pretrained.path == str(path) and not pretrained.is_multi_label
    report = pretrained.report
    actions = {name: action for action, name, _ in report.changes}
    assert actions["Transformer/posembed_input/pos_embedding"] == "resampled"
    assert actions["head/kernel"] == "new" and actions["pre_logits/kernel"] == "dropped"
    assert "cls" in report.loaded and not set(report.loaded) & actions.keys()


def test_it_shows_what_was_changed(tmp_path):
    weights = load.read(golden_file(tmp_path, "vit_token_norep"))
    names = ("cat", "<b>dog</b>", "\x1b[2J")
    pretrained = load.build(dataclasses.replace(weights, class_names=names), image_size=48)
    text = repr(pretrained)
    assert "vit_token_norep.npz" in text and "cat, <b>dog</b>, \\x1b[2J" in text
    assert "resampled  Transformer/posembed_input/pos_embedding  (1, 17, " in text
    assert "the whole image resized to 48, bilinear" in text
    count = sum(np.size(leaf) for leaf in weights.params.values())
    grown = pretrained.model.width * (6 * 6 - 4 * 4)
    assert f"{count + grown:,} parameters" in text
    page = pretrained._repr_html_()
    assert page.startswith("<table>") and page.count("<tr>") == page.count("</tr>") > 4
    assert "&lt;b&gt;dog&lt;/b&gt;" in page and "<td>resampled</td>" in page
    assert "\x1b" not in page


def test_copies_keep_everything(tmp_path):
    weights = load.read(golden_file(tmp_path, "vit_token_norep"))
    pretrained = load.build(dataclasses.replace(weights, class_names=("cat",), loss="sigmoid_xent"))
    for same in (copy.copy(pretrained), pickle.loads(pickle.dumps(pretrained))):
        assert same.class_names == pretrained.class_names and same.class_names[0] == "cat"
        assert same.is_multi_label and same.report.loaded == pretrained.report.loaded
        assert same.model == pretrained.model and same.params.keys() == pretrained.params.keys()
