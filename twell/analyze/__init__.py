"""How sparse a model is: `python -m twell.analyze`."""
