// Builds one page, one script and one style sheet into ../static, which is committed: users need no npm.
import { defineConfig } from "vite";

export default defineConfig({
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
