"""`python -m optimus`."""

from optimus.cli import main

main()
