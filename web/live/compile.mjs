// node compile.mjs PYODIDE SOURCES.zip OUT.zip: each .py as a .pyc of the Python that runs in the page, the rest as it is.
import fs from "node:fs";
import { pathToFileURL } from "node:url";

const [folder, from, to] = process.argv.slice(2);
const { loadPyodide } = await import(pathToFileURL(`${folder}/pyodide.mjs`).href);
const python = await loadPyodide({ indexURL: folder });
python.FS.writeFile("/tmp/from.zip", fs.readFileSync(from));
python.runPython(`
import importlib._bootstrap_external as external, zipfile

with zipfile.ZipFile("/tmp/from.zip") as given, zipfile.ZipFile("/tmp/to.zip", "w", zipfile.ZIP_DEFLATED) as made:
    for name in sorted(given.namelist()):
        content = given.read(name)
        if name.endswith(".py"):
            code = compile(content, "/" + name, "exec", dont_inherit=True)
            name, content = name + "c", external._code_to_timestamp_pyc(code)
        made.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
`);
fs.writeFileSync(to, python.FS.readFile("/tmp/to.zip"));
