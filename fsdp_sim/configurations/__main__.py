"""``python -m fsdp_sim.configurations``: the table of `docs/configurations.md`, from the readers' own data."""

from fsdp_sim.configurations.door import FORMATS
from fsdp_sim.configurations.keys import schema_of


def table() -> str:
    """A row for each format: its name, the version that was read, and how many of its keys are known."""
    rows = [
        "| format | `--config-format` | read from | keys known | of these understood |",
        "| --- | --- | --- | ---: | ---: |",
    ]
    for name in FORMATS:
        schema = schema_of(name)
        rows.append(f"| {schema.name} | `{name}` | {schema.package} | {schema.known} | {schema.understood} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
