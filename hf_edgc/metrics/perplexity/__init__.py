"""The `evaluate` metric; load it by the path of this folder."""
