"""Runs compared on a page: `python -m twell.report`."""
