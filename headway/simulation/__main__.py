"""`python -m headway.simulation`."""

from headway.simulation.command import main

main()
