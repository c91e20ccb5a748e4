"""Sets up all tests: eight CPU devices, strict shapes, warnings as errors.

`tests.tiers` says which tests run in which tier; `tests.program_cache` keeps their
programs. `--shuffle SEED` runs the files, and the tests of each file, in another order.
"""

import collections
import gc
import os
import pathlib
import random

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

from tests.tiers import mark_exhaustive_cases, quick_cases, with_ids  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Examples compile XLA programs; how long that takes says nothing about the code.
hypothesis.settings.register_profile(
    "default", deadline=None, derandomize=True, print_blob=False
)
hypothesis.settings.load_profile("default")

# Needs libraries that tests do without.
collect_ignore_glob = ["golden/make_*.py"]

pytest_plugins = ["tests.child_processes", "tests.program_cache"]

STRICT_FOLDERS = ("functional", "inputs", "lookup", "recommenders", "rows")

GOLDEN = pathlib.Path(__file__).parent / "golden"


def pytest_sessionstart() -> None:
    """Starts JAX, so that no command starts it with another number of devices.

    Here and not on import: a process that a test spawns imports this file.
    """
    jax.devices()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option that shows whether tests depend on their order."""
    parser.addoption("--shuffle", type=int, metavar="SEED", help="order of the tests")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by `-m`
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Marks exhaustive cases; shuffles files, and tests within them."""
    mark_exhaustive_cases(items)
    seed = config.getoption("shuffle")
    if seed is not None:
        order = random.Random(seed)
        places = collections.defaultdict(order.random)
        items.sort(key=lambda item: (places[item.path], order.random()))


def pytest_collection_finish() -> None:
    """Spares what lives to the end, modules and tests, from garbage collections.

    They take 4 % of the time of a run otherwise.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(autouse=True)
def strict_dtypes(request):
    """Lets no operation of the layer promote a dtype.

    optax's optimizers and schedules multiply floats by counts of steps, so tests of
    optimizers and of whole models cannot ask for it.
    """
    folder = request.path.relative_to(pathlib.Path(__file__).parent).parts[0]
    # These test products of bfloat16 and float32, and losses of integer labels.
    promotes = request.path.name in ("test_expansion.py", "test_ranking_losses.py")
    is_strict = folder in STRICT_FOLDERS and not promotes
    with jax.numpy_dtype_promotion("strict" if is_strict else "standard"):
        yield


MESHES = quick_cases(
    with_ids({f"{n}devices": n for n in (1, 2, 3, 8)}), "1devices", "2devices"
)


@pytest.fixture(params=MESHES)
def mesh(request) -> Mesh:
    """A mesh of 1 or 2 emulated devices; in the full tier, also of 3 and 8."""
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
