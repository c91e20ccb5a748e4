"""Directories of vocabularies: any names of features survive."""

import tpu_embedding as te
from tpu_embedding.strings.string_ids import (
    load_vocabularies,
    save_vocabularies,
)


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
