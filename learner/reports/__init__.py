"""What a run tells its user: metrics, samples, progress, the summary and the picture."""
