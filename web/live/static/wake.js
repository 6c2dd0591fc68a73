// Python as it was when the site was built (compile.mjs), in a worker and in node alike.
//
// A memory holds Python with our code imported. It points at functions of msgspec, a library that is linked when it is
// loaded: before Python goes on, the library is linked again, at the place in memory and table that it had.

/** The options for `loadPyodide`: `create` is pyodide.asm.mjs's, `memory` bytes, `library` a module, `places` JSON. */
export function waking(create, { memory, library, places }) {
  const createPyodideModule = async (settings) => {
    const [module, { table, base, name }] = await Promise.all([create(settings), places]);
    const [bytes, compiled] = await Promise.all([memory, library]);
    const begins = new Uint32Array(bytes.buffer, bytes.byteOffset, 2)[1]; // behind the snapshot's head
    if (module.HEAP8.length < bytes.length - begins) module.growMemory(bytes.length - begins);
    // Up to there the table has what this browser put into it, which may be more than node did.
    module.wasmTable.grow(table.start - module.wasmTable.length);
    module.placeOfNext = base;
    module.loadWebAssemblyModule(compiled, { nodelete: true }, name, {});
    module.placeOfNext = undefined;
    if (module.wasmTable.length !== table.end) throw new Error(`the table has ${module.wasmTable.length} functions, not ${table.end}`);
    const restore = module.API.restoreSnapshot;
    module.API.restoreSnapshot = () => {
      // How C functions are called here: node may know no such way, and without one each call goes by way of JavaScript.
      const trampoline = (module.__PyRuntime + module.HEAP32[module.__PyEM_EMSCRIPTEN_TRAMPOLINE_OFFSET / 4]) / 4;
      const calls = module.HEAP32[trampoline];
      const found = restore(bytes);
      module.HEAP32[trampoline] = calls;
      return found;
    };
    return module;
  };
  // The snapshot is empty here, since Pyodide would wait for one before it compiles itself.
  const lockFileContents = Promise.resolve(places).then(({ info }) => JSON.stringify({ info, packages: {} })); // none to fetch
  return { createPyodideModule, _loadSnapshot: new Uint8Array(0), lockFileContents };
}

/** pyodide.asm.mjs, in which the next library can be given its place in memory. */
export function placing(source) {
  const found = "var getMemory=size=>{";
  if (source.split(found).length !== 2) throw new Error("pyodide.asm.mjs has changed: getMemory is not where it was");
  return source.replace(found, `${found}if(Module.placeOfNext)return Module.placeOfNext;`);
}
