"""The times of two programs beside each other."""

import types

from tpu_embedding.tools.doctor import row_speed


def program(name):
    device = types.SimpleNamespace(platform="cpu")
    devices = types.SimpleNamespace(flat=[device])
    plan = types.SimpleNamespace(mesh=types.SimpleNamespace(devices=devices))
    return types.SimpleNamespace(name=name, plan=plan)


def test_each_program_is_the_first_of_a_turn_in_its_turn(monkeypatch):
    """A machine may slow down within a turn, always in the same way."""
    calls = []

    def timer(program):
        def seconds_of(num_calls):
            calls.append((program.name, num_calls))
            return {"kernels": 0.01, "xla": 0.03}[program.name]

        return seconds_of

    monkeypatch.setattr(row_speed, "_timer", timer)
    figures = row_speed.time_programs(program("kernels"), program("xla"))
    assert figures == {
        "xla_seconds_per_call": 0.03,
        "seconds_per_call": 0.01,
        "speed_ratio": 3.0,
    }
    turns = [name for name, _ in calls[2:]]
    assert turns == ["kernels", "xla", "xla", "kernels", "kernels", "xla"]
    assert figures.keys() > row_speed.time_programs(None, program("xla")).keys()
