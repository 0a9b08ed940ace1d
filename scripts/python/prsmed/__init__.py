"""The compiled `prsmed` program and its launcher. This package has no Python interface."""
