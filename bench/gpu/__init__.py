"""What the device side costs, and whether it is exact: `python -m bench.gpu`."""
