"""Configurations of other trainers: one reader per format, each with its keys as data in a TOML file beside it.

``read(path)`` says of a file which format it is in, which fields of `Plan`, `Cluster` and `Model` it gives, which model
it names, each default that is filled in, and what differs from what is simulated. A key that the format does not have,
and a value that is not simulated, are refused by name. Python is read, and never run.
"""

from fsdp_sim.configurations.door import FORMATS, Configuration, NothingCalledError, format_of, read
from fsdp_sim.configurations.keys import Schema, schema_of

__all__ = ["FORMATS", "Configuration", "NothingCalledError", "Schema", "format_of", "read", "schema_of"]
