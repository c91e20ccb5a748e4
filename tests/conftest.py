"""Sets up all tests: eight CPU devices, strict shapes, warnings as errors.

Tests run in three tiers. `scripts/test.sh` runs the quick tier, `--all` the full tier,
`--exhaustive` the exhaustive one. Plain `pytest` runs every test,
`pytest -m "not full"` the quick tier, and `pytest -m "not exhaustive"` the full one.

These ways move cases to the full tier:

* A whole test: `@pytest.mark.full`.
* Cases by their ids: `@pytest.mark.full_cases("id", ...)` names those of the full tier,
  `@pytest.mark.quick_cases("id", ...)` those that stay in the quick one.
* One value of a parameter: `pytest.param(value, marks=pytest.mark.full)`. Every
  combination with this value then runs in the full tier only.
* A matrix of several parameters: `@pytest.mark.each_once`. The quick tier runs the
  diagonal of the matrix: each value of each parameter at least once. Parameters of
  fixtures, such as `mesh`, count too.

Of the cases that the full tier adds to a test, it runs two, which lie evenly among
them; the exhaustive tier runs all. `@pytest.mark.every_case` keeps all cases in the
full tier. `@pytest.mark.exhaustive` moves a whole test to the exhaustive tier.

`--shuffle SEED` runs the files, and the tests of each file, in another order.
"""

import collections
import itertools
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
# No verdicts of this machine on kernels: tests store those that they need.
os.environ["TPU_EMBEDDING_VERDICTS"] = "/nonexistent/verdicts"
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Examples compile XLA programs; how long that takes says nothing about the code.
hypothesis.settings.register_profile(
    "default", deadline=None, derandomize=True, print_blob=False
)
hypothesis.settings.load_profile("default")

pytest_plugins = ["tests.child_processes"]

GOLDEN = pathlib.Path(__file__).parent / "golden"


needs_kernels = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="kernels need jax 0.12"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option that shows whether tests depend on their order."""
    parser.addoption("--shuffle", type=int, metavar="SEED", help="order of the tests")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by `-m`
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Marks the cases that markers leave to the full tier, and shuffles all cases."""
    functions = collections.defaultdict(list)
    for item in items:
        _mark_named_cases(item)
        if item.get_closest_marker("each_once") and not item.get_closest_marker("full"):
            functions[item.nodeid.partition("[")[0]].append(item)
    for cases in functions.values():
        off_diagonal = [case for case in cases if not _on_diagonal(case, cases)]
        for case in off_diagonal:
            case.add_marker("full")
    _mark_exhaustive_cases(items)
    seed = config.getoption("shuffle")
    if seed is not None:
        _shuffle(items, seed)


def _shuffle(items: list[pytest.Item], seed: int) -> None:
    """Shuffles files, and tests within files, which may share slow fixtures."""
    order = random.Random(seed)
    places = collections.defaultdict(order.random)
    items.sort(key=lambda item: (places[item.path], order.random()))


FULL_CASES = 2
"""Maximum number of cases that the full tier adds to a test."""


def _mark_exhaustive_cases(items: list[pytest.Item]) -> None:
    """Leaves a few cases of each test in the full tier, and moves the others."""
    functions = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("exhaustive"):
            item.add_marker("full")
        elif item.get_closest_marker("full"):
            if not item.get_closest_marker("every_case"):
                functions[item.nodeid.partition("[")[0]].append(item)
    for cases in functions.values():
        kept = {
            (2 * place + 1) * len(cases) // (2 * FULL_CASES)
            for place in range(FULL_CASES)
        }
        for place, case in enumerate(cases):
            if place not in kept:
                case.add_marker("exhaustive")


def _mark_named_cases(item: pytest.Item) -> None:
    """Applies `full_cases` and `quick_cases`."""
    for marker in item.iter_markers():
        if marker.name not in ("full_cases", "quick_cases"):
            continue
        is_named = item.callspec.id in marker.args
        if is_named == (marker.name == "full_cases"):
            item.add_marker("full")


def _on_diagonal(case: pytest.Item, cases: list[pytest.Item]) -> bool:
    """Returns whether step k of all parameters at once reaches this case, for some k.

    A parameter with fewer values than the longest starts over.
    """
    # One id per `parametrize`; pytest has no public name for them.
    ids_of_cases = [other.callspec._idlist for other in cases]
    parameters = [list(dict.fromkeys(ids)) for ids in zip(*ids_of_cases, strict=True)]
    positions = [
        (values.index(each), len(values))
        for values, each in zip(parameters, case.callspec._idlist, strict=True)
    ]
    longest = max(count for _, count in positions)
    return any(
        all(step % count == position for position, count in positions)
        for step in range(longest)
    )


def pytest_configure(config: pytest.Config) -> None:
    """Keeps compiled programs on disk, for all processes of a run and for later runs.

    The cache is beside pytest's own: `pytest --cache-clear` empties it. Its key is the
    program with all options of the compiler, so a change of the code is seen.
    """
    if config.pluginmanager.has_plugin("cacheprovider"):
        directory = config.cache.mkdir("xla")
        jax.config.update("jax_compilation_cache_dir", str(directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(autouse=True)
def _no_cache_for_tpus(request):
    """Leaves programs for TPU topologies out of the cache: they cannot be read back."""
    is_for_tpu = request.node.get_closest_marker("tpu_compiler") is not None
    if is_for_tpu:
        _enable_cache(False)
    yield
    if is_for_tpu:
        _enable_cache(True)


def _enable_cache(is_enabled: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", is_enabled)
    compilation_cache.reset_cache()  # which looks at the option once only


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


@pytest.fixture(
    params=[1, pytest.param(2, marks=pytest.mark.full), 3, 8],
    ids=lambda n: f"{n}devices",
)
def mesh(request) -> Mesh:
    """A mesh of 1, 3 or 8 emulated devices; in the full tier, also of 2."""
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
