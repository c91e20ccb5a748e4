"""The config `synthetic`, with data that process 1 finds wrong, or a full disk."""

import dataclasses
import errno
import resource
import time

from tpu_embedding.checkpoint.run_checkpoints import RunCheckpoints
from tpu_embedding.distributed import current_job
from tpu_embedding.tools.data.synthetic_clicks import SyntheticClicks
from tpu_embedding.tools.train import DataError, SyntheticClicksSource, load_config
from tpu_embedding.tools.train.loop.reporting import RunReport


class DamagedClicks(SyntheticClicks):
    """Clicks with a damaged line, or without the last evaluation batch."""

    damage: str

    def train_batch(self, step):
        if self.damage == "line" and step == 3 and current_job().process_index == 1:
            raise DataError("clicks.tsv, line 7: expected 40 fields, got 39.")
        return super().train_batch(step)

    def evaluation_batches(self):
        batches = list(super().evaluation_batches())
        if self.damage == "evaluation" and current_job().process_index == 1:
            batches.pop()
        return iter(batches)


def refuse_plot(self, *_):
    """Fails once the other processes have had the time to leave."""
    time.sleep(2)
    raise OSError(errno.ENOSPC, "No space left on device", "curves.png")


def fill_disk_after(saved):
    """Lets process 1 write no table any more, once the first checkpoint is complete."""

    def and_fill(self, step):
        saved(self, step)
        if current_job().process_index == 1:
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))

    return and_fill


def hang_in_second_save(save):
    """Lets process 1 hang in the second save, as on a disk that does not answer."""

    def and_hang(self, step, *arguments):
        if self.latest_step and current_job().process_index == 1:
            time.sleep(3600)
        save(self, step, *arguments)

    return and_hang


@dataclasses.dataclass(frozen=True)
class DamagedSource:
    damage: str = "line"
    num_evaluation_samples: int = 40

    def open(self, data_dir, *, batch_size, seed):
        del data_dir
        if self.damage == "plot":
            RunReport.plot = refuse_plot
        if self.damage == "disk":
            RunReport.saved = fill_disk_after(RunReport.saved)
        if self.damage == "hanging disk":
            RunCheckpoints.save = hang_in_second_save(RunCheckpoints.save)
        source = SyntheticClicksSource(
            num_evaluation_samples=self.num_evaluation_samples
        )
        data = DamagedClicks(source, batch_size=batch_size, seed=seed)
        data.damage = self.damage
        return data


config = dataclasses.replace(load_config("synthetic"), data=DamagedSource())
