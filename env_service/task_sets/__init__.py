"""Sets of tasks that are done in runtimes and judged by tests: Harbor's folders, and rows of repositories."""
