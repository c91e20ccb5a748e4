"""Writes `schemas/gcloud.json`: the arguments of each gcloud command that we use.

    python -m tests.tools.launch.make_gcloud_schema

needs gcloud, but neither an account nor a network. gcloud's own linter parses every
command of the scripts with the parser of the command, and gives the arguments that it
takes. What the linter refuses is printed.
"""

import json
import pathlib
import shlex
import subprocess
import tempfile

from tests.tools.launch.test_scripts import commands

SCHEMA = pathlib.Path(__file__).parent / "schemas" / "gcloud.json"
GLOBAL_FLAGS = {"project", "format", "quiet"}


def lint(commands):
    """Returns what gcloud's linter says of each command."""
    # The linter splits the shell command of ssh at its quotes, which no shell does.
    lines = {
        shlex.join(
            "--command=true" if word.startswith("--command=") else word for word in argv
        )
        for argv in commands
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump([{"command_string": line} for line in sorted(lines)], file)
        file.flush()
        command = ["gcloud", "meta", "lint-gcloud-commands"]
        command.append(f"--commands-file={file.name}")
        result = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(result.stdout)


def trim(node):
    """Returns an argument or a group of arguments, as the test needs it; or None."""
    if "group" in node:
        group = node["group"]
        members = [trim(member) for member in group.get("arguments", [])]
        members = [member for member in members if member is not None]
        facts = {name: True for name in ("mutex", "required") if group.get(name)}
        return {"group": members, **facts} if members else None
    if node.get("global") and node["name"] not in GLOBAL_FLAGS:
        return None
    positional = node.get("positional", False)
    trimmed = {"name": node["name"] if positional else f"--{node['name']}"}
    if node.get("type") == "bool":
        trimmed["switch"] = True
    if node.get("choices"):
        trimmed["choices"] = node["choices"]
    if node.get("required"):
        trimmed["required"] = True
    return trimmed


def main():
    """Lints the commands of the scripts, and writes the schema of their arguments."""
    schema, refused = {}, 0
    for found in lint(commands("gcloud")):
        if not found["success"]:
            refused += 1
            print(f"{found['command_string']}\n    {found['error_message']}")
        name = found["command_string_no_args"].removeprefix("gcloud ")
        nodes = [trim(node) for node in found["args_structure"]["arguments"]]
        schema[name] = [node for node in nodes if node is not None]
    lines = (
        f"{json.dumps(name)}: {json.dumps(schema[name])}" for name in sorted(schema)
    )
    SCHEMA.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(schema)} commands; the linter refuses {refused} of their uses")


if __name__ == "__main__":
    main()
