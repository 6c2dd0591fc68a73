"""What runs the project elsewhere: the repository's one address, workflows, the containers of other people."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from web import hosts

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
GENERATED = {"pyproject.toml": None, "README.md": hosts.readme, "CITATION.cff": hosts.citation}
PRETENDED = "https://github.com/Somebody/course"
ELSEWHERE = re.compile(r"codespaces\.new/|mybinder\.org/v2/|colab\.research\.google\.com/github/|github\.io/fsdp")
LINTERS = [  # each with a fault that it has to find, so that it is seen to look
    (["actionlint"], ("github.ref", "github.reff")),
    (["zizmor", "--offline", "--quiet", "--no-progress"], ("persist-credentials: false", "fetch-depth: 1")),
]


def tracked() -> list[Path]:
    said = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    texts = [ROOT / name for name in said.split("\0") if name and not name.endswith((".lock", ".gz", ".png"))]
    return [path for path in texts if path.is_file()]


class TestTheAddressOfTheRepository:
    @pytest.mark.parametrize("name", ["README.md", "CITATION.cff"])
    def test_what_follows_from_it_is_up_to_date(self, name):
        text = (ROOT / name).read_text()

        assert GENERATED[name](text, hosts.repository()) == text, "python -m web.hosts"

    def test_no_other_file_states_it(self):
        address = hosts.repository()
        found = [
            path.relative_to(ROOT).as_posix()
            for path in tracked()
            if ELSEWHERE.search(text := path.read_text(errors="replace")) or (address and address in text)
        ]

        assert set(found) <= {*GENERATED, "web/hosts.py", "tests/test_hosts.py"}

    def test_set_once_it_is_in_readme_and_the_citation_and_unset_it_leaves_nothing(self):
        """The links come first, under the title."""
        for name in ("README.md", "CITATION.cff"):
            text, write = (ROOT / name).read_text(), GENERATED[name]
            told = write(text, PRETENDED)

            assert PRETENDED in told or "/Somebody/course" in told
            assert write(told, hosts.repository()) == text
        links = re.findall(r"\]\((https://\S+)\)", hosts.readme((ROOT / "README.md").read_text(), PRETENDED))
        assert links[:2] == [
            "https://somebody.github.io/course/",
            "https://colab.research.google.com/github/Somebody/course/blob/main/notebooks/00_start_here.ipynb",
        ]

    def test_it_is_read_from_the_projects_urls(self, tmp_path):
        given = (
            (ROOT / "pyproject.toml")
            .read_text()
            .replace("[project.urls]", f'[project.urls]\nRepository = "{PRETENDED}"')
        )
        (tmp_path / "pyproject.toml").write_text(given)

        assert hosts.repository(tmp_path / "pyproject.toml") == PRETENDED

    def test_of_another_host_there_are_no_links(self):
        with pytest.raises(ValueError, match="OWNER/NAME only"):
            hosts.links("https://example.org/course")


class TestTheWorkflows:
    def test_each_action_is_pinned_by_the_hash_of_a_commit_and_says_its_version(self):
        uses = [line for path in WORKFLOWS for line in path.read_text().splitlines() if "uses:" in line]

        assert len(uses) >= 5
        for line in uses:
            assert re.search(r"uses: [\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line), line

    def test_an_action_has_one_version_in_all_of_them(self):
        pins = {
            re.search(r"uses: (\S+)@(\S+)", line).groups()
            for path in WORKFLOWS
            for line in path.read_text().splitlines()
            if "uses:" in line
        }

        assert len({name for name, _ in pins}) == len(pins)

    @pytest.mark.parametrize(("linter", "fault"), LINTERS, ids=lambda value: value[0])
    def test_a_linter_finds_nothing_and_does_find_its_fault(self, linter, fault, tmp_path):
        if shutil.which(linter[0]) is None:
            pytest.skip(f"needs {linter[0]}")
        folder = tmp_path / ".github" / "workflows"
        folder.mkdir(parents=True)

        def lint(old, new):
            for path in WORKFLOWS:
                (folder / path.name).write_text(path.read_text().replace(old, new) if old else path.read_text())
            return subprocess.run([*linter, *folder.iterdir()], capture_output=True, text=True, cwd=tmp_path)

        said = lint("", "")
        assert said.returncode == 0, said.stdout + said.stderr
        assert lint(*fault).returncode != 0

    def test_the_versions_are_those_that_the_project_names(self):
        jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
        pairs = [(one["python"], one["torch"]) for one in jobs["versions"]["strategy"]["matrix"]["include"]]

        assert {python for python, _ in pairs} == {"3.11", "3.12", "3.13", "3.14"}
        assert {torch.rpartition(".")[0] for _, torch in pairs} == {"2.11", "2.12", "2.13", "2.14", "2.15"}


class TestContainers:
    def test_the_devcontainer_calls_a_target_of_the_makefile(self):
        lines = (ROOT / ".devcontainer" / "devcontainer.json").read_text().splitlines()
        said = json.loads("\n".join(line for line in lines if not line.startswith("//")))
        target = said["postCreateCommand"].split()[-1]

        assert f"\n{target}:" in (ROOT / "Makefile").read_text()

    def test_binders_script_is_one_that_runs_and_names_what_setup_has(self):
        script = ROOT / "binder" / "postBuild"
        names = re.findall(r"setting ([A-Z_]+)", script.read_text())

        assert script.stat().st_mode & 0o111
        assert (ROOT / "binder" / "runtime.txt").read_text() == "python-3.11\n"
        assert set(names) == {"TORCH", "CPU_INDEX"}
        subprocess.run(["shellcheck", script], check=True)
