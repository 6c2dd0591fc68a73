"""All pages that are made of data: where each belongs, and what stands in it."""

from __future__ import annotations

from pathlib import Path

from fsdp_sim.learn.classroom import expect_pages, plan_pages
from fsdp_sim.learn.classroom.plans import plans
from fsdp_sim.learn.classroom.sections import instructor
from fsdp_sim.learn.find import CHAPTERS


def pages() -> dict[str, str]:
    """The pages by their paths in the kit: loads every exercise."""
    made = {f"plans/{name}.md": plan_pages.page(plan) for name, plan in plans().items()}
    return made | {f"expect/{chapter}.md": expect_pages.page(chapter) for chapter in CHAPTERS}


def write(folder: Path | None = None) -> list[str]:
    """Write the pages, and remove those that nothing makes any more.

    Args:
        folder: of the kit; the checkout's own if None.

    Returns:
        the paths of those that have changed or gone.
    """
    folder = folder or instructor()
    made, changed = pages(), []
    for name, text in made.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            changed.append(name)
    for path in (*folder.glob("plans/*.md"), *folder.glob("expect/*.md")):
        if (name := path.relative_to(folder).as_posix()) not in made:
            path.unlink()
            changed.append(name)
    return changed
