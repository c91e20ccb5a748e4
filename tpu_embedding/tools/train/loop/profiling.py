"""Records a profile of a window of steps, for xprof."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, Final

import jax

from tpu_embedding.tools.train.errors import ConfigError

PROFILE_DIR: Final = "profile"


@dataclasses.dataclass(frozen=True)
class ProfileWindow:
    """The steps of a run to profile: those after `start` steps, up to step `stop`.

    Attributes:
      start: steps done before the window.
      stop: steps done at its end; above `start`.

    Example:
      >>> ProfileWindow.parse("100:105")
      ProfileWindow(start=100, stop=105)
    """

    start: int
    stop: int

    def __post_init__(self):
        if not 0 <= self.start < self.stop:
            raise ValueError(
                "A profile needs START:STOP with 0 <= START < STOP, got "
                f"{self.start}:{self.stop}."
            )

    @classmethod
    def parse(cls, text: str) -> "ProfileWindow":
        """Returns the window of a text `START:STOP`.

        Raises:
          ValueError: if the text is no such window.
        """
        start, separator, stop = text.partition(":")
        if not (separator and start.isdecimal() and stop.isdecimal()):
            raise ValueError(
                "A profile needs START:STOP, two numbers of steps such as 100:105, got "
                f"{text!r}."
            )
        return cls(int(start), int(stop))

    def check_within(self, num_steps: int) -> None:
        """Checks that a run reaches the window.

        Args:
          num_steps: steps of the run, those before a resume included.

        Raises:
          ConfigError: if it ends before.
        """
        if self.stop > num_steps:
            raise ConfigError(
                f"The profile of steps {self.start}:{self.stop} must end with the run, "
                f"which has {num_steps} steps; choose a STOP of at most {num_steps}."
            )


class StepProfiler:
    """Runs steps, and records those of a window. As a context, it ends a recording.

    Attributes:
      directory: directory of the profile of this process.
    """

    def __init__(
        self,
        window: ProfileWindow | None,
        run_directory: pathlib.Path,
        report: Callable[[str], None],
        first_step: int,
    ):
        """Reports if all steps of the window were done before.

        Args:
          window: steps to record; None records nothing.
          run_directory: directory of the run.
          report: prints a line.
          first_step: steps done before a resume.
        """
        self.directory = run_directory / PROFILE_DIR
        if jax.process_count() > 1:
            # Files have the name of the host, which its processes share.
            self.directory /= f"process-{jax.process_index()}"
        self._window = window
        self._report = report
        self._is_tracing = False
        if window is not None and window.stop <= first_step:
            report(f"no profile: steps {window.start}:{window.stop} were done before")

    def __enter__(self) -> "StepProfiler":
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop()

    def run(self, step: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Returns the results of a step, which it records if the window has it.

        Args:
          step: number of steps done before.
          function: runs the step.
          *arguments: of the function.
        """
        window = self._window
        if window is None or not window.start <= step < window.stop:
            return function(*arguments)
        if not self._is_tracing:
            jax.profiler.start_trace(self.directory)
            self._is_tracing = True
        with jax.profiler.StepTraceAnnotation("train_step", step_num=step):
            results = function(*arguments)
        if step + 1 == window.stop:
            jax.block_until_ready(results)
            self._stop()
        return results

    def _stop(self) -> None:
        """Ends a recording. It lacks what the devices have not done yet."""
        if not self._is_tracing:
            return
        self._is_tracing = False
        jax.profiler.stop_trace()
        self._report(
            f"profile in {self.directory}; open it by: pip install xprof && xprof "
            f"--logdir {self.directory}"
        )
