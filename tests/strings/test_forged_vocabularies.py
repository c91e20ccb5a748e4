"""Vocabularies that somebody else wrote are data, and cost memory like their size."""

import functools
import json
import os
import re
import sys
import tracemalloc

import pytest

import tpu_embedding as te
from tests.rejections import rejects
from tpu_embedding.strings.string_ids import load_vocabularies, save_vocabularies

MIB = 2**20
FIELDS = {
    "format": "tpu_embedding.vocabulary 1",
    "num_oov_buckets": 1,
    "mask_token": None,
    "strip_whitespace": False,
    "tokens": ["[UNK]", "a", "b"],
}
_opened: list[str] | None = None


def audit(event, arguments):
    if _opened is not None and event == "open":
        _opened.append(os.fspath(arguments[0]))
    elif _opened is not None and event in ("exec", "import", "os.system"):
        _opened.append(event)


@functools.cache
def watch():
    """Installs the hook of this process; hooks cannot be removed."""
    sys.addaudithook(audit)


def forged(**changes):
    return json.dumps({k: v for k, v in (FIELDS | changes).items() if v is not ...})


def bomb(opening, closing, size):
    part = opening * 900 + closing * 900
    return forged(tokens=["[UNK]", 5]).replace(
        "5]", f"{','.join([part] * (size // len(part)))}]"
    )


FILES = {
    "empty": "",
    "binary": bytes(range(256)) * 16,
    "zeros": bytes(4096),
    "latin 1": forged(tokens=["[UNK]", "?"]).replace("?", "é").encode("latin-1"),
    "byte order mark": "\ufeff" + forged(),
    "UTF-16": forged().encode("utf-16"),
    "truncated": forged()[:-4],
    "truncated in a string": forged()[:-7],
    "two documents": forged() * 2,
    "pickle": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x0btouch /tmp/x\x85R.",
    "list": '["a", "b"]',
    "text": "a\nb\n",
    "only a format": '{"format": "tpu_embedding.vocabulary 1"}',
    "number": "7",
    "null": "null",
    "no commas": forged().replace(",", ""),
    "other format": forged(format="tpu_embedding.vocabulary 9"),
    "format is a list": forged(format=["tpu_embedding.vocabulary 1"]),
    "no tokens": forged(tokens=...),
    "no tokens but special ones": forged(tokens=["[UNK]"]),
    "no list of tokens": forged(tokens="abc"),
    "empty list of tokens": forged(tokens=[]),
    "tokens are a dict": forged(tokens={"0": "a"}),
    "token is a number": forged(tokens=["[UNK]", 7]),
    "token is null": forged(tokens=["[UNK]", None]),
    "token is a list": forged(tokens=["[UNK]", ["a"]]),
    "token twice": forged(tokens=["[UNK]", "a", "a"]),
    "token is empty": forged(tokens=["[UNK]", ""]),
    "lone surrogate": forged(tokens=["[UNK]", "\ud800"]),
    "mask is a number": forged(mask_token=5, tokens=[5, "[UNK]", "a"]),
    "mask is a list": forged(mask_token=["a"]),
    "mask is missing in tokens": forged(mask_token=""),
    "billions of buckets": forged(num_oov_buckets=2**31 - 3),
    "more buckets than tokens": forged(num_oov_buckets=4),
    "huge number": forged().replace(": 1,", f": {'9' * 100_000},"),
    "negative buckets": forged(num_oov_buckets=-1),
    "buckets are true": forged(num_oov_buckets=True),
    "buckets are a float": forged().replace(": 1,", ": 1e9,"),
    "buckets are NaN": forged(num_oov_buckets=float("nan")),
    "buckets are text": forged(num_oov_buckets="1"),
    "buckets are missing": forged(num_oov_buckets=...),
    "strip is text": forged(strip_whitespace="no"),
    "many fields": json.dumps({str(i): "" for i in range(99_999)}),
    "nested too deep": "[" * MIB,
    "nested lists": bomb("[", "]", 8 * MIB),
    "nested dicts": bomb('{"":', "}", MIB).replace(":}", ":0}"),
    "equal tokens": forged(tokens=["[UNK]", *["ab"] * 100_000]),
    "open quote": '{"format": "' + "a" * MIB,
    "backslashes": '{"format": "' + "\\" * MIB,
}


@pytest.mark.parametrize("name", FILES)
def test_a_forged_file_raises_one_error_within_its_memory(name, tmp_path):
    content, path = FILES[name], tmp_path / "vocabularies" / "0.json"
    save_vocabularies(tmp_path, {"user": te.inputs.Vocabulary(["a"])})
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    global _opened
    watch()
    tracemalloc.start()
    _opened = opened = []
    with rejects(fix=str(path)) as error:
        try:
            load_vocabularies(tmp_path)
        finally:
            _opened = None
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    assert len(str(error.value)) < 2000
    assert peak < 10 * path.stat().st_size + 2 * MIB
    assert set(opened) <= {str(path), str(path.with_name("names.json"))}


DIRECTORIES = {
    "more names than files": ('["user", "movie"]', "1.json", OSError),
    "names are nested": ('[["user"]]', "names.json", ValueError),
    "names are a dict": ('{"user": 0}', "names.json", ValueError),
    "names are not JSON": ("user", "names.json", ValueError),
    "a name twice": ('["user", "user"]', "names.json", ValueError),
}


@pytest.mark.parametrize("name", DIRECTORIES)
def test_forged_names_raise_an_error_that_names_the_file(name, tmp_path):
    names, file, kind = DIRECTORIES[name]
    save_vocabularies(tmp_path, {"user": te.inputs.Vocabulary(["a"])})
    own = tmp_path / "vocabularies"
    (own / "names.json").write_text(names)
    with pytest.raises(kind, match=re.escape(str(own / file))):
        load_vocabularies(tmp_path)


def test_names_of_features(tmp_path):
    names = ["user", "User", "left/user", "../é %2F", "..", "a.json", "", 99 * "long"]
    vocabularies = {name: te.inputs.Vocabulary(["x", f"of {name}"]) for name in names}
    save_vocabularies(tmp_path, vocabularies)
    loaded = load_vocabularies(tmp_path)
    assert {name: v.tokens for name, v in loaded.items()} == {
        name: ("x", f"of {name}") for name in names
    }
    assert {path.parent.name for path in tmp_path.rglob("*.json")} == {"vocabularies"}


def test_without_vocabularies(tmp_path):
    save_vocabularies(tmp_path, {})
    assert load_vocabularies(tmp_path) == {}
    assert not list(tmp_path.iterdir())
