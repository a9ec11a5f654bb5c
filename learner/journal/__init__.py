"""The files by which a run can be resumed: journal, checkpoints, the run's folder."""
