"""What a run keeps on disk so that it can be taken up again: journal, checkpoints, the run's folder."""
