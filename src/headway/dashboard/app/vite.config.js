// Builds one page, one script and one style sheet into ../static, which is committed: users need no npm.
import { createHash } from "node:crypto";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { defineConfig } from "vite";

// So that a test can tell, without npm, whether the built files are of these sources.
const recordSources = {
  name: "record-sources",
  closeBundle() {
    const paths = [...readdirSync("src").map((name) => `src/${name}`), "index.html", "package.json", "vite.config.js"];
    const name = (path) => path.split("/").pop();
    paths.sort((a, b) => (name(a) < name(b) ? -1 : 1));
    const hash = createHash("sha256");
    for (const path of paths) hash.update(`${name(path)}\0`).update(readFileSync(path)).update("\0");
    writeFileSync("../static/sources.sha256", `${hash.digest("hex")}\n`);
  },
};

export default defineConfig({
  plugins: [recordSources],
  base: "/static/",
  esbuild: { jsx: "automatic", jsxImportSource: "preact", legalComments: "none" },
  build: {
    outDir: "../static",
    emptyOutDir: true,
    assetsDir: ".",
    assetsInlineLimit: 0,
    modulePreload: false,
    cssCodeSplit: false,
    chunkSizeWarningLimit: 400,
    rollupOptions: { output: { entryFileNames: "app.js", chunkFileNames: "[name].js", assetFileNames: "[name][extname]" } },
  },
});
