"""Runtimes: a computer for each task, with a shell, files and limits, on which what the policy says is done."""
