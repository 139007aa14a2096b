"""What the first worker of a Trainer leaves in its output folder: records, their header, the run report."""

from pathlib import Path

from transformers import TrainerState

from hf_edgc.hook import EDGCState
from hf_edgc.logs import get_logger
from hf_edgc.records import RecordWriter
from hf_edgc.run_info import STATE_FILE, RunInfo


class Recording:
    """Records one run, from its first step to its report.

    Args:
        state: of the model in training; its ``on_record`` is taken.
        total_steps: optimizer steps of the run.
        path: file of the records; everything else goes into its folder.
    """

    def __init__(self, state: EDGCState, total_steps: int, path: Path) -> None:
        """Start the files; records of the steps before a checkpoint that was resumed from are kept."""
        self._state, self._total_steps, self._path = state, total_steps, path
        self._writer = RecordWriter(path, first_step=state.controller.step)
        self._write_info()
        state.on_record = self._writer.write

    def end(self, trainer_state: TrainerState, report: bool) -> None:
        """Close the records, and write the report if it is wanted."""
        self._writer.close()
        self._state.on_record = None
        self._write_info()  # what was found out about the link came after the start
        if report:
            # As Trainer.save_state does; it has the loss.
            trainer_state.save_to_json(str(self._path.parent / STATE_FILE))
            write_report_if_possible(self._path)

    def _write_info(self) -> None:
        RunInfo.of(self._state, self._total_steps).write(self._path.parent)


def write_report_if_possible(run: Path) -> None:
    """Write the report of ``run``, an output folder or a file of records; say in one line why that was not possible.

    It comes after training and before the model is saved, so that nothing may end it with an error.
    """
    try:
        from hf_edgc.report import write_report

        page = write_report([run])
    except ModuleNotFoundError as error:
        get_logger().info("No run report: %s is not installed (pip install hf_edgc[report]).", error.name)
    except Exception as error:  # see above
        get_logger().warning("No run report: %s: %s", type(error).__name__, error)
    else:
        get_logger().info("run report: %s", page)
