"""See the module names: each holds one step of the way through."""
