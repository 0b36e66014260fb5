"""What is measured: `python -m twell.bench`."""
