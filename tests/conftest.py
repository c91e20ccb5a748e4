"""Set-up of all tests: eight CPU devices, strict shapes, warnings as errors."""

import itertools
import os
import pathlib

# Before jax is imported: tests must not look for accelerators, and several test
# processes may compile for TPU topologies at once.
os.environ["JAX_PLATFORMS"] = "cpu"
# What a program computes is tested, not how fast: two thirds of the compile time.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
)
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Examples compile XLA programs; how long that takes says nothing about the code.
hypothesis.settings.register_profile(
    "default", deadline=None, derandomize=True, print_blob=False
)
hypothesis.settings.load_profile("default")

GOLDEN = pathlib.Path(__file__).parent / "golden"


needs_kernels = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="kernels need jax 0.12"
)

TESTS_PER_CACHE = 60
_tests_run = itertools.count(1)


@pytest.fixture(autouse=True)
def _drop_compiled_programs():
    """Frees compiled programs now and then.

    Each maps memory, and a process that keeps some thousand of them reaches the limit
    of the operating system, which ends it within the compiler.
    """
    yield
    if next(_tests_run) % TESTS_PER_CACHE == 0:
        jax.clear_caches()


@pytest.fixture(params=[1, 2, 3, 8], ids=lambda n: f"{n}devices")
def mesh(request) -> Mesh:
    """A mesh of 1, 2, 3 or 8 emulated devices."""
    return mesh_of(request.param)


def mesh_of(num_devices: int) -> Mesh:
    """Returns a mesh of the first devices, along one axis."""
    return Mesh(np.asarray(jax.devices()[:num_devices]), ("shard",))


@pytest.fixture(scope="session")
def movielens_dir() -> pathlib.Path:
    """The folder of MovieLens-100K, whose licence forbids to ship it.

    Taken from the environment variable MOVIELENS_100K, else from a folder `shared`
    beside the checkout.
    """
    beside = pathlib.Path(__file__).parents[2] / "shared" / "data" / "ml-100k"
    path = pathlib.Path(os.environ.get("MOVIELENS_100K", beside))
    if not (path / "u.item").is_file():
        pytest.skip(
            "MovieLens-100K is absent: set MOVIELENS_100K to the folder ml-100k of "
            "GroupLens' archive"
        )
    return path
