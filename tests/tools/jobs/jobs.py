"""Jobs of the training command, for tests: real processes that talk by loopback."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

from tests.processes.test_processes import ROOT, environment_of, free_port


class JobServer:
    """Runs jobs in forks of one process; see `job_server.py`."""

    def __init__(self, cache, directory):
        self._directory = pathlib.Path(directory)
        self._num_jobs = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.tools.jobs.job_server"],
            cwd=ROOT,
            env=environment_of()
            | {
                "JAX_COMPILATION_CACHE_DIR": str(cache),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self):
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()

    def start(self, num_processes, *arguments, of_process=None):
        """Starts a job.

        Args:
          num_processes: its processes; 1 is a run without a job.
          *arguments: of `tpu-embedding train`, the same for all processes.
          of_process: further arguments of single processes, by number.
        """
        self._num_jobs += 1
        port = free_port()
        commands, outputs = [], []
        for process in range(num_processes):
            command = ["train", *map(str, arguments)]
            if num_processes > 1:
                command += ["--coordinator", f"127.0.0.1:{port}"]
                command += ["--num-processes", str(num_processes)]
                command += ["--process-id", str(process)]
                # Signals and statuses are those of the process itself.
                command += ["--supervise", "never"]
            command += (of_process or {}).get(process, [])
            commands.append(command)
            output = self._directory / f"job-{self._num_jobs}-{process}.log"
            output.touch()  # A test may read it before its process has started.
            outputs.append(output)
        request = [
            (command, str(output))
            for command, output in zip(commands, outputs, strict=True)
        ]
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return RunningJob(self._process.stdout, outputs)

    def run(self, num_processes, *arguments, status=0, **options):
        """Runs a job to its end, and checks the status of each process."""
        job = self.start(num_processes, *arguments, **options)
        statuses = job.wait()
        assert statuses == [status] * num_processes, "\n".join(job.outputs())
        return job


class RunningJob:
    """The processes of a job.

    Attributes:
      pids: numbers of the processes at the operating system.
    """

    def __init__(self, lines, files):
        self._lines, self._files = lines, files
        self.pids = json.loads(lines.readline())

    def wait(self, seconds=300.0):
        """Returns the exit statuses; kills what still runs after some time."""
        timer = threading.Timer(seconds, self.send, (signal.SIGKILL, *self.pids))
        timer.start()
        try:
            return json.loads(self._lines.readline())
        finally:
            timer.cancel()

    def send(self, number, *pids):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def outputs(self):
        return [path.read_text() for path in self._files]

    def wait_for(self, words, process=0, seconds=200.0):
        """Waits until a process has printed some words."""
        end = time.monotonic() + seconds
        while words not in self._files[process].read_text():
            assert time.monotonic() < end, "\n".join(self.outputs())
            time.sleep(0.02)  # A file of another process gives no event.
