"""The example of several processes, run by two of them and by one."""

import re
import subprocess
import sys

import pytest

from tests.docs.test_doc_examples import DOCS, SYBIL
from tests.processes.test_processes import environment_of, free_port


@pytest.mark.exhaustive
def test_two_processes_compute_the_loss_of_one(tmp_path, capsys):
    page = SYBIL.parse(DOCS / "guides" / "several_processes.md")
    (program,) = (block.parsed for block in page.examples())
    assert program.endswith("main()\n")
    file = tmp_path / "my_training.py"
    places = (
        "import sys",
        "main(*(int(a) if a.isdigit() else a for a in sys.argv[1:]))",
    )
    file.write_text(program.removesuffix("main()\n") + "\n".join(places) + "\n")
    address = f"127.0.0.1:{free_port()}"
    jobs = [
        subprocess.Popen(
            [sys.executable, file, address, "2", process],
            env=environment_of(num_devices=2),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in "01"
    ]
    outputs = []
    for job in jobs:
        output, _ = job.communicate(timeout=300)
        assert job.returncode == 0, output
        outputs.append(re.findall(r"loss (\S+) on 4 devices", output))
    (two,), silent = outputs
    assert not silent
    exec(program, {})  # in this process, on eight devices
    one = re.findall(r"loss (\S+) on 8 devices", capsys.readouterr().out)[0]
    assert float(two) == pytest.approx(float(one), abs=1e-6)  # gloo's order of sums
