"""Begins a driver inside of its task's computer, where the packages of its virtual environment are somewhere else."""

import os
import runpy
import site
import sys


def main() -> None:
    """Run the driver of the arguments with the packages of the arguments, and no others of this Python's."""
    packages, driver = sys.argv[1:]
    if "HARNESS_LIBRARY_PATH" in os.environ:  # this interpreter has its library; others have theirs
        before = os.environ.pop("HARNESS_LIBRARY_PATH")
        os.environ.pop("LD_LIBRARY_PATH", None)
        os.environ.update({"LD_LIBRARY_PATH": before} if before else {})
    site.addsitedir(packages)
    site.setquit()
    sys.argv = [os.path.join(os.path.dirname(__file__), driver)]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
