"""Changes that make files of an export or delta malformed, drawn from a seed.

Digests and identities are made anew afterwards, as someone would who means harm, so
that each check behind them is reached.
"""

import json

import numpy as np

from tpu_embedding.export.delta_chain import identity_of
from tpu_embedding.export.digests import digests_of_files, file_digest
from tpu_embedding.export.tensor_files import writable_tensor

OTHER_KINDS = (None, True, 1.5, "x", [], {}, [[]], 10**400)
OUTSIDE = ("../victim", "/victim", "a/../../victim", "", ".", "a\\b", "a\0", "a//b")
OPTIONAL = {"error", "dynamic", "deltas", "program", "saved_model", "applying"}
HEADERS = {
    "dtype": (None, 5, "F63", ["F32"]),
    "shape": (None, "3", [-1], ["3"], [2.0], [2**70], [1] * 40, [True], {"0": 3}),
    "data_offsets": (None, [0], [0, 1.5], ["0", "4"], [-4, 0], [4, 2**70], [1, 2]),
}
BROKEN_TEXTS = (
    "",
    "{",
    "[]",
    "7",
    "null",
    "[" * 100_000,
    "\ufeff{}",
    '{"a": 1, "a": 1}',
)


def nodes(document, path=()):
    """Yields the paths to all values of a document but itself."""
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from nodes(value, (*path, key))


def mutate_document(document, draw):
    """Gives one field another kind, removes it, or adds one; returns the text."""
    # `write_delta` makes the identity anew.
    path = draw.choice([p for p in nodes(document) if p != ("identity",)])
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    value, key = parent[path[-1]], path[-1]
    change = draw.choice(["kind", "kind", "kind", "remove", "add", "repeat", "text"])
    if change == "remove" and isinstance(key, str) and key not in OPTIONAL:
        if path[0] != "files" or len(path) == 1:
            del parent[key]
            return json.dumps(document)
    if change == "add" and isinstance(parent, dict) and len(path) < 2:
        parent["unknown"] = 1
        return json.dumps(document)
    if change == "repeat":
        return '{"format": 1, ' + json.dumps(document)[1:]
    if change == "text":
        return draw.choice(BROKEN_TEXTS)
    if key == "file" or (path[0] == "files" and len(path) == 2):
        if key != "file":
            parent[draw.choice(OUTSIDE)] = parent.pop(key)
        else:
            parent[key] = draw.choice(OUTSIDE)
        return json.dumps(document)
    parent[key] = draw.choice([x for x in OTHER_KINDS if not same_kind(x, value)])
    return json.dumps(document)


def same_kind(new, old):
    """Returns True if a field that holds the one may hold the other as well."""
    numbers = (int, float, type(None), str)
    if isinstance(new, bool) or isinstance(old, bool):
        return type(new) is type(old)
    if new is None or isinstance(new, str):
        return type(old) in numbers
    if type(new) is int:
        return False
    return type(new) is type(old) or (not new and isinstance(old, dict | list))


def mutate_header(path, draw):
    """Damages the header of a safetensors file."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    name = draw.choice([name for name in header if name != "__metadata__"])
    change = draw.choice(["field", "field", "remove", "name", "text", "length", "cut"])
    match change:
        case "field":
            field = draw.choice(list(HEADERS))
            header[name][field] = draw.choice(HEADERS[field])
        case "remove":
            del header[name][draw.choice(list(HEADERS))]
        case "name":
            header["other"] = header.pop(name)
    text = json.dumps(header)
    if change == "text":
        text = draw.choice(BROKEN_TEXTS)
    encoded = text.encode()
    size = draw.choice([2**63, 0, length - 1]) if change == "length" else len(encoded)
    content = size.to_bytes(8, "little") + encoded + content[8 + length :]
    path.write_bytes(content[:-1] if change == "cut" else content)


def mutate_rows(path, name, draw):
    """Gives a tensor of a delta values that it must not have."""
    tensor = writable_tensor(path, name)
    if tensor.dtype.kind == "f":
        tensor.reshape(-1)[draw.randrange(tensor.size)] = draw.choice(
            [np.nan, np.inf, -np.inf]
        )
    else:
        change = draw.choice(["repeat", "fall", "beyond", "negative"])
        match change:
            case "repeat":
                tensor[1] = tensor[0]
            case "fall":
                tensor[:] = tensor[::-1].copy()
            case "beyond":
                tensor[-1] = 10_000
            case "negative":
                tensor[0] = -1
    tensor.flush()


def seal_delta(directory):
    """Makes digests and identity of a delta anew, where the document still has them."""
    path = directory / "delta.json"
    document = json.loads(path.read_text())
    for entry in document["tables"].values():
        if "file" in entry:
            entry["sha256"] = file_digest(directory / entry["file"])
    write_delta(path, json.dumps(document))


def write_delta(path, text):
    """Writes `delta.json` with the identity of what it holds, if it can have one."""
    try:
        document = json.loads(text)
        body = {k: v for k, v in document.items() if k != "identity"}
        if document.get("identity") not in (None, identity_of(body)):
            text = json.dumps(body | {"identity": identity_of(body)})
    except (ValueError, AttributeError, KeyError, RecursionError):
        pass
    path.write_text(text)


def seal_export(directory):
    """Makes the digests of an export anew."""
    path = directory / "export.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"files": digests_of_files(directory)}))
