"""python -m labs.launch: what each setting does, and when."""

from rich.console import Console

from labs.launch.settings import table

if __name__ == "__main__":
    Console().print(table())
