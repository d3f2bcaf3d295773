"""The order of samples, and the data modules that ship with the package."""
