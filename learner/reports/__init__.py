"""Reports of a run to its user: metrics, samples, progress, the summary and the picture."""
