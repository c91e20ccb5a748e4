"""Exports and deltas that somebody forged, and what comes of reading them.

`python -m tests.export.forged_files DIRECTORY` tries all, and prints what is wrong.
"""

import json
import os
import pathlib
import shutil
import sys

import jax
import numpy as np
import safetensors.numpy
from jax import export as jax_export

import tpu_embedding as te
from tests.export.writers import BATCH, layer_of
from tpu_embedding.export.documents import digests_of_files

MOVIE = "tables/movie.safetensors"
EXTRA_BYTES = 200 * 2**20


def make_originals(path):
    """Writes two programs with a vocabulary, and the delta between them."""
    layer = layer_of(1.0)
    words = te.inputs.Vocabulary(["a", "b"])
    for name in ("program", "later"):
        te.export.save(layer, path / name, BATCH, vocabularies={"movie": words})
        values = layer.embedding_tables()["movie"].copy()
        values[[1, 4, 8]] = 2
        layer.set_embedding_tables({"movie": values})
    te.export.save_delta(path / "later", path / "program", path / "delta")


def edit(file, **changes):
    def forge(path):
        document = json.loads((path / file).read_text())
        (path / file).write_text(json.dumps(document | changes))

    return forge


def write(file, content, size=None):
    def forge(path):
        (path / file).parent.mkdir(exist_ok=True)
        (path / file).unlink(missing_ok=True)
        (path / file).write_bytes(content() if callable(content) else content)
        if size is not None:
            os.truncate(path / file, size)

    return forge


def link(name):
    """Moves a file or directory out, and leaves a link to it."""

    def forge(path):
        outside = path.parent / "outside" / name.replace("/", "_")
        shutil.move(path / name, outside)
        (path / name).symlink_to(outside)

    return forge


def fifo(name):
    def forge(path):
        (path / name).unlink()
        os.mkfifo(path / name)

    return forge


def bytes_of_header(text, length=None):
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    return (length or len(text)).to_bytes(8, "little") + text


def metadata(number):
    return bytes_of_header({"__metadata__": {f"{i}": "" for i in range(number)}})


def empty_tensors(number):
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    return bytes_of_header({f"{i}": empty for i in range(number)})


def entry(**changes):
    shape = {"dtype": "F32", "shape": [9, 8], "data_offsets": [0, 288]}
    return bytes_of_header({"movie": shape | changes}) + bytes(288)


def delta_rows(**changes):
    rows = {"movie:rows": np.array([1, 4, 8]), "movie": np.full((3, 8), 2, np.float32)}
    return lambda path: safetensors.numpy.save_file(rows | changes, path / MOVIE)


def other_program(tables, dense, arrays):
    """Writes a program that takes arguments of other kinds."""

    def forge(path):
        exported = jax_export.export(jax.jit(lambda *x: 0))(tables, dense, arrays)
        (path / "program.stablehlo").write_bytes(exported.serialize())

    return forge


def signature(arguments, *inputs):
    return edit("export.json", signature={"arguments": arguments, "inputs": inputs})


INPUT = {"name": "movie", "path": ["movie"], "kind": "dense_ids"}
DOCUMENTS = {
    "no_files": edit("export.json", files={}),
    "list_of_files": edit("export.json", files=[]),
    "file_outside": edit("export.json", files={"../outside/secret": "0" * 64}),
    "number_as_digest": edit("export.json", files={MOVIE: 7}),
    "other_format": edit("export.json", format="x" * 10**6),
    "empty_signature": edit("export.json", signature=[]),
    "signature_of_zero": edit("export.json", signature=0),
    "signature_of_text": edit("export.json", signature="movie"),
    "no_inputs": signature(["x"]),
    "text_of_arguments": signature("f", INPUT),
    "text_of_path": signature(["f"], INPUT | {"path": "m"}),
    "two_inputs": signature(["f"], INPUT, INPUT),
    "unknown_kind": signature(["f"], INPUT | {"kind": []}),
    "unknown_field": write("export.json", b'{"%s": 1}' % (b"x" * 10**6)),
    "many_lists": write(
        "export.json", lambda: b'{"files":[%s[]]}' % (b"[]," * 2_500_000)
    ),
    "too_many_lists": write("export.json", lambda: b"[%s[]]" % (b"[]," * 20_000_000)),
    "nothing_but_zeros": write("export.json", b"", size=2**30),
    "deep_lists": write("export.json", b"[" * 10**6),
    "large_number": write("export.json", b'{"files":{},"written":%s}' % (b"9" * 10**6)),
    "byte_order_mark": write("export.json", "\ufeff{}".encode()),
    "latin_1": write("export.json", b'{"files": "\xe9"}'),
    "list": write("export.json", b"[]"),
    "null": write("export.json", b"null"),
    "empty": write("export.json", b""),
    "link_to_document": link("export.json"),
    "pipe_of_document": fifo("export.json"),
}
TENSORS = {
    "long_header": bytes_of_header(b"{", 2**63),
    "header_beyond_the_file": bytes_of_header(b"{}", 2**22),
    "large_header": lambda: bytes_of_header(b" " * 2**25),
    "large_metadata": lambda: metadata(900_000),
    "metadata": lambda: metadata(300_000),
    "many_tensors": lambda: empty_tensors(100_000),
    "too_many_tensors": lambda: empty_tensors(600_000),
    "long_shape": entry(shape=[1] * 300_000),
    "huge_shape": entry(shape=[2**62, 4]),
    "huge_empty_shape": entry(shape=[0, 2**62], data_offsets=[0, 0]),
    "negative_shape": entry(shape=[-9, -8]),
    "wrong_offsets": entry(data_offsets=[288, 0]),
    "offsets_beyond": entry(data_offsets=[0, 2**40]),
    "unknown_dtype": entry(dtype="F63"),
    "four_bits": entry(dtype="F4", shape=[9, 64]),
    "one_axis": entry(shape=[72]),
    "no_axis": bytes_of_header(
        {"movie": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}
    ) + bytes(4),
    "list_as_header": bytes_of_header([]),
    "pickle": b"\x80\x04cos\nsystem\n(S'touch ../outside/ran'\ntR.",
    "empty_tensors": b"",
}  # fmt: skip
PROGRAM = "program.stablehlo"
WORDS = "vocabularies/0.json"
OTHERS = {
    "empty_program": write(PROGRAM, b""),
    "zeros_as_program": write(PROGRAM, bytes(10**5)),
    "ones_as_program": write(PROGRAM, b"\xff" * 10**5),
    "pickle_as_program": write(PROGRAM, TENSORS["pickle"]),
    "program_of_lists": other_program([1.0], [2.0], [3.0]),
    "program_of_nothing": other_program(None, None, None),
    "program_of_two": other_program({}, {}, {"other": np.zeros(3)}),
    "names_of_no_kind": write("vocabularies/names.json", b"7"),
    "names_of_lists": write("vocabularies/names.json", b"[[1]]"),
    "names_of_others": write("vocabularies/names.json", b'["x"]'),
    "names_outside": write("vocabularies/names.json", b'["../../outside/secret"]'),
    "names_missing": lambda path: (path / "vocabularies/names.json").unlink(),
    "words_of_no_kind": write(WORDS, b"{}"),
    "words_that_are_none": write(WORDS, b"\xff"),
    "more_words_than_rows": lambda path: te.inputs.Vocabulary(
        [f"{i}" for i in range(99)]
    ).save(path / WORDS),
    "code": write("vocabularies/__init__.py", b"open('../outside/ran', 'w')"),
    "module": write("jax.py", b"open('../outside/ran', 'w')"),
    "same_tensors_twice": lambda path: shutil.copy(
        path / MOVIE, path / "tables/z.safetensors"
    ),
    "loop": lambda path: (path / "tables" / "loop").symlink_to(path / "tables"),
    "dangling": lambda path: (path / "x.safetensors").symlink_to("/nowhere"),
}
DELTAS = {
    "negative_rows": delta_rows(**{"movie:rows": np.array([-1, 4, 8])}),
    "rows_beyond": delta_rows(**{"movie:rows": np.array([1, 4, 2**40])}),
    "rows_of_another_type": delta_rows(**{"movie:rows": np.array([1.0, 4.0, 8.0])}),
    "rows_twice": delta_rows(**{"movie:rows": np.array([1, 1, 8])}),
    "more_rows": delta_rows(movie=np.zeros((4, 8), np.float32)),
    "wider_rows": delta_rows(movie=np.zeros((3, 9), np.float32)),
    "other_rows": delta_rows(**{"movie:rows": np.array([1, 4, 7])}),
    "other_values": delta_rows(movie=np.full((3, 8), np.nan, np.float32)),
    "another_type": delta_rows(movie=np.zeros((3, 8), np.int32)),
    "no_rows": lambda path: safetensors.numpy.save_file({}, path / MOVIE),
    "another_base": edit("base.json", written="never"),
    "link_to_base": link("base.json"),
    "pipe_of_base": fifo("base.json"),
    "large_base": write("base.json", b"", size=2**30),
    "missing_base": lambda path: (path / "base.json").unlink(),
    "base_as_text": write("base.json", b"\xff"),
}
ANYWHERE = {
    **DOCUMENTS,
    **{name: write(MOVIE, content) for name, content in TENSORS.items()},
    "link_to_tables": link("tables"),
    "link_to_table": link(MOVIE),
    "pipe_of_table": fifo(MOVIE),
    "missing_table": lambda path: (path / MOVIE).unlink(),
}
OF_PROGRAMS = {
    **OTHERS,
    **{f"link_to_{name}": link(name) for name in (PROGRAM, "vocabularies", WORDS)},
    **{f"pipe_of_{name}": fifo(name) for name in (PROGRAM, "dense.safetensors")},
    **{f"dense_{name}": write("dense.safetensors", TENSORS[name])
       for name in ("long_header", "many_tensors", "no_axis")},
}  # fmt: skip


def seal(path):
    """Writes the digests of the forged files, as one does who means harm."""
    try:
        document = json.loads((path / "export.json").read_bytes())
        found = digests_of_files(path)
        edit("export.json", files=document["files"] | found)(path)
    except (LookupError, OSError, TypeError, ValueError, RecursionError):
        pass  # It is the document that is forged.


def load(path):
    te.export.load(path)


def load_unverified(path):
    te.export.load(path, verify=False)


def apply(path):
    te.export.apply_delta(path.parent / "program", path, path.parent / "made")


def compare(path):
    te.export.save_delta(path.parent / "later", path, path.parent / "made")


CASES = {
    f"{function.__name__}-{name}": (forge, function, name in DOCUMENTS)
    for forgeries, function in (
        (ANYWHERE | OF_PROGRAMS, load),
        (ANYWHERE | OF_PROGRAMS, load_unverified),
        (ANYWHERE, compare),
        (ANYWHERE | DELTAS, apply),
    )
    for name, forge in forgeries.items()
}


def outcome_of(case, originals, work):
    """Reads one forged directory; returns what went wrong, and the error's text."""
    forge, function, is_document = case
    shutil.copytree(originals, work)
    (work / "outside").mkdir()
    (work / "outside" / "secret").write_text("secret")
    path = work / ("delta" if function is apply else "program")
    for change in (seal, forge) if is_document else (forge, seal):
        change(path)
    before = stats_of(work)
    size = sum(stat.st_size for stat in before.values())
    opened.clear()
    base = reset_peak()
    error = None
    try:
        function(path)
    except te.export.ExportError as raised:
        error = str(raised)
    except Exception as raised:
        return f"raised {raised!r}", None
    used, paths = peak() - base, {os.path.realpath(x) for x in opened}
    after = {k: x for k, x in stats_of(work).items() if "made" not in k.parts}
    problems = {
        f"took {used >> 20} MiB of memory": used > EXTRA_BYTES + 10 * size,
        f"raised {error}": error and (str(path) not in error or len(error) > 2000),
        "left a directory behind": error and (work / "made").exists(),
        "changed files": after != before,
        f"opened {paths}": any("/outside" in x for x in paths),
    }
    return next((name for name, is_so in problems.items() if is_so), None), error


def stats_of(path):
    files = (x for x in path.rglob("*") if x.is_file() and not x.is_symlink())
    # All but the access time.
    return {x: os.stat_result([*x.stat()[:7], 0, *x.stat()[8:10]]) for x in files}


opened: list[str] = []
"""Files that Python opened, and commands that it started, as "/outside"."""


def watch(event, arguments):
    if event == "open" and isinstance(arguments[0], str):
        opened.append(arguments[0])
    elif event in ("subprocess.Popen", "os.system", "os.exec", "pickle.find_class"):
        opened.append(f"/outside/{event}")


def reset_peak():
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak():
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def main(directory, step):
    make_originals(directory / "originals")
    sys.addaudithook(watch)
    found = {}
    cases = list(CASES)[::step]
    for case in cases:
        work = directory / "work"
        problem, _ = outcome_of(CASES[case], directory / "originals", work)
        if problem is not None:
            found[case] = problem
        shutil.rmtree(work)
    print(json.dumps([len(cases), found], indent=1))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
