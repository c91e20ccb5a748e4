"""Threads that play the processes of a job, with a store in memory."""

import concurrent.futures

from tpu_embedding.distributed.job import Job
from tpu_embedding.distributed.store import MemoryStore


def make_jobs(num_processes):
    store = MemoryStore()
    return [Job(process, num_processes, store) for process in range(num_processes)]


def on_each(jobs, function):
    """Runs `function(job)` in a thread per job; returns the results, or the errors."""
    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        futures = [pool.submit(function, job) for job in jobs]
        return [
            future.exception(timeout=60) or future.result(timeout=60)
            for future in futures
        ]
