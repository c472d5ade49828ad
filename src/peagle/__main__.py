"""`python -m peagle` is the command `peagle`."""

from peagle.cli.main import run

run()
