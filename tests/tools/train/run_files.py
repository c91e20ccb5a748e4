"""Reads the TensorBoard files and the profile of a run."""

import glob
import struct

import jax
from tensorboardX.proto import event_pb2


def read_events(path):
    """Yields the events of a file of TFRecords."""
    with open(path, "rb") as file:
        while header := file.read(12):
            (length,) = struct.unpack("<Q", header[:8])
            yield event_pb2.Event.FromString(file.read(length))
            file.read(4)  # checksum


def read_curves(directory):
    """Returns the values by scalar and step as TensorBoard does, restarts included."""
    curves = {}
    for path in sorted(glob.glob(str(directory / "events*"))):
        for event in read_events(path):
            if event.session_log.status == event_pb2.SessionLog.START:
                for values in curves.values():
                    for step in [s for s in values if s >= event.step]:
                        del values[step]
            for value in event.summary.value:
                curves.setdefault(value.tag, {})[event.step] = value.simple_value
    return curves


def recorded_steps(directory):
    """Returns the step numbers of all annotated steps in the profile."""
    (path,) = directory.rglob("*.xplane.pb")
    return sorted(
        dict(event.stats)["step_num"]
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes
        for line in plane.lines
        for event in line.events
        if event.name == "train_step"
    )
