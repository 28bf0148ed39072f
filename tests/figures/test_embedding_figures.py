"""Principal components, filters and similarity of positions against scikit-learn and loops."""

import jax
import numpy as np
import pytest
from sklearn.decomposition import PCA
from sklearn.metrics.pairwise import cosine_similarity

import vit_jax
from vit_jax import figures
from vit_jax.figures import vectors
from vit_jax.weights import scan_layout

SIZES = dict(width=24, depth=2, mlp_dim=8, num_heads=3, patch_size=4, image_size=(8, 12))


def random(model) -> dict:
    """Parameters of which every leaf is random."""
    rng = np.random.default_rng(0)
    image = jax.ShapeDtypeStruct((1, *model.image_size, 3), np.float32)
    leaves = jax.eval_shape(model.init, jax.random.key(0), image)["params"]
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), leaves)


@pytest.mark.parametrize(("count", "width"), [(50, 6), (6, 50), (2, 3), (3, 1)])
def test_principal_components_are_those_of_scikit_learn(count, width):
    x = np.random.default_rng(0).normal(3, 2, (count, width)) * np.linspace(1, 3, width)
    found = vectors.principal_components(x, 4)
    known = min(len(found), count - 1)  # the rest has no variance, and so no direction
    wanted = PCA(known, svd_solver="full").fit(x).components_
    np.testing.assert_allclose(found[:known], wanted, atol=1e-8)
    assert len(found) == min(4, count, width)


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_the_scale_of_vectors_does_not_matter(scale):
    x = np.random.default_rng(0).normal(size=(9, 4))
    found = vectors.principal_components(scale * x, 2)
    np.testing.assert_allclose(found, vectors.principal_components(x, 2), atol=1e-8)


def test_vectors_that_are_alike_or_alone_have_components_of_length_one():
    for x in (np.ones((5, 3)), np.zeros((1, 4))):
        found = vectors.principal_components(x, 2)
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1)


def test_cosine_similarity_is_that_of_scikit_learn():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 3)) * np.float64([1e-200, 1, 1e100, 0, 5])[:, None]
    y = rng.normal(size=(4, 3))
    found = vectors.cosine_similarity(x, y)
    np.testing.assert_allclose(found, cosine_similarity(x, y), atol=1e-12)
    assert not found[3].any()


@pytest.mark.parametrize("x", [np.full((2, 2), np.nan), [[np.inf, 0]], np.zeros((0, 3)), [1.0]])
def test_vectors_that_are_refused(x):
    with pytest.raises(ValueError, match=r"not finite|give \[count, width\]"):
        vectors.principal_components(x, 1)


def test_filters_are_components_of_the_kernel_as_small_images():
    kernel = np.random.default_rng(0).normal(size=(2, 4, 3, 40)).astype(np.float32)
    found = figures.filters(kernel)
    assert found.shape == (24, 2, 4, 3)  # as many as numbers
    samples = np.array([kernel[..., i].ravel() for i in range(40)])
    wanted = PCA(24, svd_solver="full").fit(samples.astype(np.float64)).components_
    np.testing.assert_allclose(found.reshape(24, 24), wanted, atol=1e-6)
    assert figures.filters(kernel[..., :9]).shape == (8, 2, 4, 3)
    assert figures.filters(kernel[..., :1]).shape == (1, 2, 4, 3)


def test_the_first_filter_is_what_filters_have_in_common():
    rng = np.random.default_rng(0)
    edge = np.zeros((4, 4, 3))
    edge[:, :2] = 1
    edge[:, 2:] = -1
    kernel = edge[..., None] * rng.normal(0, 5, 30) + rng.normal(0, 0.01, (4, 4, 3, 30))
    found = figures.filters(kernel, 1)[0]
    assert abs((found * edge).sum()) / np.linalg.norm(edge) > 0.999


MIXER = dict(architecture="mixer", width=16, depth=1, patch_size=4, image_size=8)
KERNELS = {
    "embedding/kernel": SIZES,
    "stem/kernel": MIXER | dict(tokens_mlp_dim=4, channels_mlp_dim=8),
    "conv_root/kernel": SIZES | dict(patch_size=1, image_size=16, stem_units=(1,), stem_width=32),
    "root_block/conv_root/kernel": dict(architecture="bit", units=(1,), width_factor=0.5),
}


@pytest.mark.parametrize("name", KERNELS)
def test_the_first_kernel_of_every_architecture(name):
    model = vit_jax.create_model(num_classes=2, **KERNELS[name])
    params = random(model)
    found, kernel = figures.first_kernel(model, params)
    wanted = np.float64(scan_layout.flatten(params)[name])
    if "conv_root" in name:  # as the convolution applies it
        wanted = (wanted - wanted.mean((0, 1, 2))) / wanted.std((0, 1, 2))
    assert found == name and kernel.shape[2] == 3
    np.testing.assert_allclose(kernel, wanted, atol=1e-3)


def similar(model, params) -> np.ndarray:
    """[patches, patches]"""
    found = figures.position_similarity(model, params)
    assert found.shape == (*model.grid, *model.grid)
    return found.reshape(np.prod(model.grid), -1)


PREFIXES = [dict(pool="gap"), dict(), dict(distilled=True), dict(registers=4)]


@pytest.mark.parametrize("prefix", PREFIXES, ids=str)
def test_similarity_of_learned_positions_leaves_out_prefix_tokens(prefix):
    model = vit_jax.create_model(**SIZES, **prefix)
    params = random(model)
    rows = params["Transformer"]["posembed_input"]["pos_embedding"][0]
    rows[-1] = 0
    wanted = cosine_similarity(rows[len(rows) - 6 :])
    np.testing.assert_allclose(similar(model, params), wanted, atol=1e-6)


def test_similarity_of_positions_by_row_and_column():
    model = vit_jax.create_model(**SIZES, posemb="learn2d")
    params = random(model)
    parts = params["Transformer"]["posembed_input"]
    x = parts["pos_embedding_x"][0, 0]
    y = parts["pos_embedding_y"][0, :, 0]
    rows = [np.concatenate([x[j], y[i]]) for i in range(2) for j in range(3)]
    np.testing.assert_allclose(similar(model, params), cosine_similarity(rows), atol=1e-6)


def test_similarity_of_fixed_positions_depends_on_the_offset_alone():
    model = vit_jax.create_model(**SIZES | dict(image_size=(16, 20)), posemb="sincos2d")
    found = figures.position_similarity(model, {})
    np.testing.assert_allclose(found[0, 0, 2, 1], found[1, 3, 3, 4], atol=1e-6)
    omega = 1 / 10_000 ** (np.arange(6) / 5)
    wanted = (np.cos(2 * omega).mean() + np.cos(omega).mean()) / 2  # 2 rows, 1 column
    np.testing.assert_allclose(found[0, 0, 2, 1], wanted, atol=1e-6)


@pytest.mark.parametrize("scan", [False, True])
def test_similarity_of_positions_in_layers(scan):
    """In every layer: that of the first one. Relative: of a distance with none, over the layers."""

    def layout(params):
        return scan_layout.stack_blocks(params) if scan else params

    model = vit_jax.create_model(**SIZES, posemb_at="every")
    params = random(model)
    first = params["Transformer"]["encoderblock_0"]["posembed_input"]["pos_embedding"][0]
    wanted = cosine_similarity(first[1:])
    np.testing.assert_allclose(similar(model, layout(params)), wanted, atol=1e-6)

    model = vit_jax.create_model(**SIZES, posemb="relative")
    params = random(model)
    wanted = np.zeros((6, 6))
    for i in range(2):
        layer = params["Transformer"][f"encoderblock_{i}"]["MultiHeadDotProductAttention_1"]
        table = cosine_similarity(layer["relative_embedding"])
        for query, key in np.ndindex(6, 6):  # tokens query + 1 and key + 1 of 7
            wanted[query, key] += table[query - key + 6, 6] / 2
    np.testing.assert_allclose(similar(model, layout(params)), wanted, atol=1e-6)


def test_models_without_positions():
    none = vit_jax.create_model(**SIZES, posemb="none")
    assert figures.position_similarity(none, random(none)) is None
    no_layers = vit_jax.create_model(**SIZES | dict(depth=0), posemb="relative")
    assert figures.position_similarity(no_layers, {}) is None
    mixer = vit_jax.create_model(num_classes=2, **KERNELS["stem/kernel"])
    assert figures.position_similarity(mixer, {}) is None
