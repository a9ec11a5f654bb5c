"""The programs that run inside the sandbox: standard library only, and nothing else of this package."""
