"""python -m labs.cluster.launch: what each setting does, and when."""

from rich.console import Console

from labs.cluster.launch.settings import table

if __name__ == "__main__":
    Console().print(table())
